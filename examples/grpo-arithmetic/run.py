r"""GRPO on a task whose best answer is known: sums of two-digit numbers, written from the right as one adds by hand.

A tiny model learns from random weights what an answer looks like (SFT, a few steps): `73+86=` → `\boxed{501}`, which is
37 + 68 = 105. It gets the form right then, and part of the sums. GRPO goes on with problems that SFT never saw, and
with nothing but rewards: 1 for the right sum, 0.2 for the form. What counts is fixed before: **in every seed, the mean
reward of greedy answers to held-out problems rises from its start to within 2 % of the most there is, 1.2.** No
held-out sum is in training, nor is the same one the other way round.

    python examples/grpo-arithmetic/run.py [FOLDER [SEED …]]    # minutes on two cores; makes table.md, rewards.svg

Seeds that have been run already in FOLDER are read from there. Ends with exit code 1 where a seed does not get there.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import combinations_with_replacement
from pathlib import Path

from mortice import run

SEEDS = (0, 1, 2)
HELD_OUT = 300
"""Sums, in both orders."""
SFT_STEPS = 140
STEPS = 400
FORM = 0.2
"""Reward of the form alone."""
MOST = 1.0 + FORM
WITHIN = 0.02
MODEL = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 15, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 32, "tie_word_embeddings": True, "initializer_range": 0.05,
}  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    r"""One id for each digit and sign, one for \boxed{, and an end."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate("0123456789+=}")}, []))
    tokenizer.add_tokens([AddedToken(r"\boxed{", special=False, normalized=False)])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


def problem(a: int, b: int) -> dict[str, str]:
    """Every number with its last digit first."""
    left, right, answer = (str(n)[::-1] for n in (a, b, a + b))
    return {"prompt": f"{left}+{right}=", "answer": answer, "completion": rf"\boxed{{{answer}}}"}


def prepare(folder: Path) -> None:
    """Model, tokenizer, and the problems: held out, of SFT, of GRPO."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    write_tokenizer(folder)
    sums = list(combinations_with_replacement(range(10, 100), 2))
    random.Random(0).shuffle(sums)
    rest = sums[HELD_OUT:]
    parts = {"held_out": sums[:HELD_OUT], "sft": rest[: len(rest) // 2], "grpo": rest[len(rest) // 2 :]}
    for name, part in parts.items():
        both = sorted({pair for a, b in part for pair in ((a, b), (b, a))})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(problem(a, b)) + "\n" for a, b in both))


def common(folder: Path, data: str, form: str) -> dict[str, dict]:
    """What SFT and GRPO share."""
    files = {"train": str(folder / f"{data}.jsonl"), "valid": str(folder / "held_out.jsonl")}
    return {
        "model": {"init": "random", "config": str(folder / "config.json")},
        "data": {"format": form, **files, "max_length": 16},
        "backward": {"name": "segmented", "keep": "everything"},
        "layout": {"name": "packed"},
    }


def learn_the_form(folder: Path, seed: int) -> None:
    run(
        {
            **common(folder, "sft", "completion"),
            "loss": {"name": "sft"},
            "adapter": {"name": "full"},
            "optimizer": {"name": "adamw", "learning_rate": 2e-3},
            "schedule": {"name": "constant"},
            "train": {"steps": SFT_STEPS, "batch_size": 128, "seed": seed, "validate_every": SFT_STEPS},
            "run": {"path": str(folder / f"sft-{seed}")},
        }
    )


def learn_to_add(folder: Path, seed: int) -> None:
    form = {"name": "regex", "pattern": r"\\boxed\{\d+\}", "whole": True, "weight": FORM}
    run(
        {
            **common(folder, "grpo", "prompt"),
            "loss": {"name": "grpo"},
            "source": {"name": "rollout", "inner_epochs": 2},
            "rollout": {"name": "kv-cache", "samples": 8, "max_tokens": 6, "rows": 512},
            "reward": [{"name": "boxed", "compare": "exact"}, form],
            "adapter": {"name": "full", "init": str(folder / f"sft-{seed}" / "adapter")},
            "optimizer": {"name": "adamw", "learning_rate": 1e-3},
            "schedule": {"name": "cosine"},
            "train": {"steps": STEPS, "batch_size": 64, "seed": seed, "validate_every": STEPS // 20},
            "run": {"path": str(folder / f"grpo-{seed}")},
        }
    )


def lines(folder: Path, seed: int) -> list[dict]:
    return [json.loads(line) for line in (folder / f"grpo-{seed}" / "metrics.jsonl").read_text("utf-8").splitlines()]


def held_out(folder: Path, seed: int) -> list[dict]:
    return [line for line in lines(folder, seed) if "valid/reward" in line]


def table(folder: Path, seeds: list[int]) -> str:
    rows = [
        "| seed | reward at the start | at the end | of the most | right sums | right form |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for seed in seeds:
        first, *_, last = held_out(folder, seed)
        both = [
            f"{first[f'valid/reward/{name}']:.3f} → {last[f'valid/reward/{name}']:.3f}" for name in ("boxed", "regex")
        ]
        start, end = first["valid/reward"], last["valid/reward"]
        rows.append(f"| {seed} | {start:.3f} | {end:.3f} | {end / MOST:.1%} | {' | '.join(both)} |")
    return "\n".join(rows) + "\n"


def plot(folder: Path, seeds: list[int], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    for seed in seeds:
        found = held_out(folder, seed)
        steps = [line for line in lines(folder, seed) if "zero_signal" in line]
        left.plot([line["step"] for line in found], [line["valid/reward"] for line in found], label=f"seed {seed}")
        right.plot([line["step"] for line in steps], [line["zero_signal"] for line in steps], label=f"seed {seed}")
    left.axhline(MOST * (1 - WITHIN), linestyle=":", color="grey", label="within 2 % of the most")
    left.set(xlabel="step", title="reward of greedy answers, held out")
    right.set(xlabel="step", title="share of groups without signal")
    left.legend()
    figure.tight_layout()
    figure.savefig(file)


def there(folder: Path, seed: int) -> bool:
    first, *_, last = (line["valid/reward"] for line in held_out(folder, seed))
    return first < last and last >= MOST * (1 - WITHIN)


def main(folder: Path, seeds: list[int]) -> None:
    if not (folder / "held_out.jsonl").exists():
        prepare(folder)
    for seed in seeds:
        if not (folder / f"sft-{seed}" / "adapter").exists():
            learn_the_form(folder, seed)
        if not (folder / f"grpo-{seed}" / "adapter").exists():
            learn_to_add(folder, seed)
    text = table(folder, seeds)
    (folder / "table.md").write_text(text)
    print(text)
    plot(folder, seeds, folder / "rewards.svg")
    if failed := [seed for seed in seeds if not there(folder, seed)]:
        sys.exit(f"not within 2 % of the most, or not above the start: seed {', '.join(map(str, failed))}")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(Path(arguments[0] if arguments else "grpo-arithmetic"), [int(seed) for seed in arguments[1:]] or list(SEEDS))

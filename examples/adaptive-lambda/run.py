"""Constant λ against a λ that steers itself, on a preference whose right answer is known: upper-case answers.

A tiny model learns from random weights to answer "name NOUN" with the noun, in lower or upper case at random (SFT).
Then ORPO prefers upper case, once with each constant λ and once with `lambda_schedule = "adaptive"`, over three seeds,
for the same number of steps. What counts is fixed before: **the held-out margin `lw − lr` at the end, of those settings
under which the chosen answers' log-probability did not fall below its start by more than 0.02 nats a token.**

    python examples/adaptive-lambda/run.py [FOLDER]    # minutes on two cores; makes FOLDER/table.md, FOLDER/margins.svg
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from pathlib import Path

from mortice import run

NOUNS = [
    "apple", "boat", "chair", "dress", "eagle", "flute", "grass", "house", "igloo", "juice",
    "knife", "lemon", "mouse", "night", "ocean", "plant", "queen", "river", "shoes", "table",
    "uncle", "voice", "water", "yacht", "zebra", "bread", "cloud", "dance", "earth", "fruit",
    "glass", "heart",
]  # fmt: skip
CONSTANT = (0.05, 0.1, 0.3, 1.0)
SEEDS = (0, 1, 2)
STEPS = 60
ALLOWED = 0.02
"""Nats a token that the chosen answers may lose."""
MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 272, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """One id a byte, and an end."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


def write_lines(file: Path, records: list[dict]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def prepare(folder: Path) -> None:
    """Model, tokenizer and data; every fourth noun is held out of the preference."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    write_tokenizer(folder)
    draw = random.Random(0)
    both = [(noun, draw.choice((noun, noun.upper()))) for noun in NOUNS * 60]
    write_lines(folder / "sft.jsonl", [{"prompt": f"name {noun}: ", "completion": answer} for noun, answer in both])
    pairs = [{"prompt": f"name {noun}: ", "chosen": noun.upper(), "rejected": noun} for noun in NOUNS]
    write_lines(folder / "valid.jsonl", pairs[::4])
    write_lines(folder / "train.jsonl", [pair for i, pair in enumerate(pairs) if i % 4])


def learn(folder: Path, seed: int) -> Path:
    """The model after SFT from random weights, as a folder."""
    import mlx.core as mx

    out = run(
        {
            "model": {"config": str(folder / "config.json"), "init": "random"},
            "data": {"format": "completion", "train": str(folder / "sft.jsonl"), "template": "none"},
            "loss": {"name": "sft"}, "adapter": {"name": "full"}, "optimizer": {"name": "adamw", "learning_rate": 3e-3},
            "train": {"steps": 400, "batch_size": 16, "micro_batch_size": 16, "seed": seed},
            "tracker": {"name": "jsonl"}, "run": {"path": str(folder / f"sft-{seed}")},
        }
    )  # fmt: skip
    model = folder / f"model-{seed}"
    model.mkdir(exist_ok=True)
    (saved,) = (out.path / "adapter").glob("*.safetensors")
    mx.save_safetensors(str(model / "model.safetensors"), dict(mx.load(str(saved))), metadata={"format": "mlx"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((folder / name).read_bytes())
    return model


def prefer(folder: Path, model: Path, seed: int, name: str, loss: dict) -> dict:
    """One run of ORPO: held-out metrics at the start and at the end, and λ at each validation."""
    out = run(
        {
            "model": {"path": str(model)},
            "data": {"format": "preference", "train": str(folder / "train.jsonl"), "valid": str(folder / "valid.jsonl"),
                     "template": "none"},
            "loss": {"name": "orpo", "sft_scope": "response"} | loss,
            "adapter": {"name": "lora", "rank": 4}, "optimizer": {"name": "adamw", "learning_rate": 2e-3},
            "train": {"steps": STEPS, "batch_size": 8, "micro_batch_size": 8, "seed": seed, "validate_every": 5},
            "tracker": {"name": "jsonl"}, "run": {"path": str(folder / f"orpo-{name}-{seed}")},
        }
    )  # fmt: skip
    lines = [json.loads(line) for line in (out.path / "metrics.jsonl").read_text().splitlines()]
    held = [line for line in lines if "valid/lw" in line]
    weights = [line["adaptive-lambda/loss.beta"] for line in lines if "adaptive-lambda/loss.beta" in line]
    return {"margins": [line["valid/margin"] for line in held], "lw": [line["valid/lw"] for line in held],
            "accuracy": held[-1]["valid/accuracy"], "weights": weights}  # fmt: skip


def main(folder: Path) -> None:
    prepare(folder)
    settings = {f"{beta:g}": {"beta": beta} for beta in CONSTANT} | {"adaptive": {"lambda_schedule": "adaptive"}}
    found: dict[str, list[dict]] = {name: [] for name in settings}
    for seed in SEEDS:
        model = learn(folder, seed)
        for name, loss in settings.items():
            found[name].append(prefer(folder, model, seed, name, loss))
    table = ["| λ | margin at the end (each seed) | mean | lw, start → end (mean) | accuracy | counts |",
             "|---|---|---:|---:|---:|---|"]  # fmt: skip
    scores = {}
    for name, runs in found.items():
        ends = [r["margins"][-1] for r in runs]
        first, last = (statistics.mean(r["lw"][i] for r in runs) for i in (0, -1))
        counts = all(r["lw"][-1] >= r["lw"][0] - ALLOWED for r in runs)
        if counts:
            scores[name] = statistics.mean(ends)
        accuracy = statistics.mean(r["accuracy"] for r in runs)
        table.append(
            f"| {name} | {', '.join(f'{end:.3f}' for end in ends)} | {statistics.mean(ends):.3f} "
            f"| {first:.3f} → {last:.3f} | {accuracy:.2f} | {'yes' if counts else 'no'} |"
        )
    best = max(scores, key=lambda name: scores[name])
    table += ["", f"The best that counts: λ {best}.", "", "λ of the adaptive runs: " + "; ".join(
        ", ".join(f"{w:.3g}" for w in r["weights"]) for r in found["adaptive"]) + "."]  # fmt: skip
    (folder / "table.md").write_text("\n".join(table) + "\n")
    print("\n".join(table))
    plot(found, folder / "margins.svg")


def plot(found: dict[str, list[dict]], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    for name, runs in found.items():
        for axes, key in ((left, "margins"), (right, "lw")):
            curves = list(zip(*(r[key] for r in runs)))
            steps = [5 * i for i in range(len(curves))]
            axes.plot(steps, [statistics.mean(c) for c in curves], label=f"λ {name}", lw=2 if name == "adaptive" else 1)
    left.set(xlabel="step", ylabel="held-out margin lw − lr, nats a token")
    right.set(xlabel="step", ylabel="held-out lw, nats a token")
    left.legend()
    figure.tight_layout()
    figure.savefig(file)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "adaptive-lambda"))

"""Preference losses side by side on real pairs: one base, one set of pairs, one optimizer, so many steps each.

Every third pair is held out. Pairs with long prompts or answers are left out, so that it stays short. What is compared
is fixed before, and the same for every loss, whatever it optimises: held out, the mean log-probability of chosen and of
rejected answers, a token (`lw`, `lr`), their difference, and how far the chosen answers have moved from the start.

    python examples/preference-losses/run.py MODEL PAIRS.jsonl FOLDER [NAME …]    # makes table.md, curves.svg there

Settings that have been run already in FOLDER are read from there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mortice import run

SETTINGS = {
    "dpo": {"name": "dpo", "beta": 0.1},
    "simpo": {"name": "simpo"},
    "orpo": {"name": "orpo", "sft_scope": "response", "beta": 0.1},
    "orpo-0.3": {"name": "orpo", "sft_scope": "response", "beta": 0.3},
    "orpo-1": {"name": "orpo", "sft_scope": "response", "beta": 1.0},
    "orpo-adaptive": {"name": "orpo", "sft_scope": "response", "lambda_schedule": "adaptive"},
}
STEPS = 48
BATCH = 4
LEARNING_RATE = 1e-4
LONGEST = 384
"""Tokens of a prompt, and of an answer."""
HELD_OUT = 3


def split(pairs: Path, folder: Path) -> None:
    """Every third pair is held out."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = pairs.read_text("utf-8").splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(x for i, x in enumerate(lines) if i % HELD_OUT), "utf-8")
    (folder / "valid.jsonl").write_text("".join(lines[::HELD_OUT]), "utf-8")


def train(model: Path, folder: Path, name: str) -> None:
    run(
        {
            "model": {"path": str(model)},
            "data": {"format": "preference", "train": str(folder / "train.jsonl"),
                     "valid": str(folder / "valid.jsonl"), "max_length": 2 * LONGEST},
            "filter": [{"name": "length", "max_prompt": LONGEST, "max_answer": LONGEST}],
            "loss": SETTINGS[name],
            "head": {"name": "flash-cce"}, "backward": {"name": "segmented", "keep": "everything"},
            "layout": {"name": "prefix-shared"}, "adapter": {"name": "lora", "rank": 16, "scale": 2.0},
            "optimizer": {"name": "adamw", "learning_rate": LEARNING_RATE},
            "schedule": {"name": "cosine", "warmup": 0.1},
            "train": {"steps": STEPS, "batch_size": BATCH, "seed": 0, "validate_every": STEPS // 6},
            "run": {"path": str(folder / name)},
        }
    )  # fmt: skip


def held_out(folder: Path, name: str) -> list[dict]:
    """The lines of all validations."""
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line for line in lines if "valid/lw" in line]


def values(line: dict) -> dict[str, float]:
    """What every setting is compared by."""
    chosen, rejected = line["valid/lw"], line["valid/lr"]
    return {"lw − lr": chosen - rejected, "lw: chosen": chosen, "lr: rejected": rejected}


def table(found: dict[str, list[dict]]) -> str:
    start = values(next(iter(found.values()))[0])
    rows = [f"| setting | {' | '.join(start)} | chosen answers moved |", "|---|---:|---:|---:|---:|"]
    rows.append(f"| before | {' | '.join(f'{value:.4f}' for value in start.values())} | |")
    for name, lines in found.items():
        last = values(lines[-1])
        cells = " | ".join(f"{value:.4f}" for value in last.values())
        rows.append(f"| {name} | {cells} | {last['lw: chosen'] - start['lw: chosen']:+.4f} |")
    return "\n".join(rows) + "\n"


def plot(found: dict[str, list[dict]], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, sides = plt.subplots(1, 3, figsize=(11, 3.5))
    for axes, key in zip(sides, ("lw − lr", "lw: chosen", "lr: rejected")):
        for name, lines in found.items():
            axes.plot([line["step"] for line in lines], [values(line)[key] for line in lines], label=name)
        axes.set(xlabel="step", title=f"{key}, nats a token, held out")
    sides[0].legend()
    figure.tight_layout()
    figure.savefig(file)


def main(model: Path, pairs: Path, folder: Path, names: list[str]) -> None:
    split(pairs, folder)
    for name in names:
        if not (folder / name / "adapter").exists():
            train(model, folder, name)
    found = {name: held_out(folder, name) for name in names}
    text = table(found)
    (folder / "table.md").write_text(text)
    plot(found, folder / "curves.svg")
    print(text)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if len(arguments) < 3:
        sys.exit(__doc__)
    main(*map(Path, arguments[:3]), arguments[3:] or list(SETTINGS))

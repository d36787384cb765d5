"""Whether the quickstart's result holds for other seeds: `python benchmarks/quickstart_seeds.py FOLDER [KEY=VALUE …]`.

FOLDER is what `mortice quickstart` made. Trains once for each of three seeds and prints held-out NLL, margin and
accuracy before and after. Exit code 1 where NLL or margin got worse for any seed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from mortice import blas

blas.load()

from mortice.config import load_config  # noqa: E402
from mortice.launch import train  # noqa: E402

SEEDS = (0, 1, 2)


def main(folder: str, *settings: str) -> int:
    worse = False
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in SEEDS:
            config = load_config(
                Path(folder, "run.toml"),
                settings=[f"train.seed={seed}", *settings],
                run_path=Path(scratch, f"seed-{seed}"),
            )
            done = train(config)
            before, after = done.before, done.after
            worse |= after["nll"] >= before["nll"] or after["margin"] <= before["margin"]
            cells = [f"{before[name]:.4f} → {after[name]:.4f}" for name in ("nll", "margin", "accuracy")]
            rows.append(f"| {seed} | {' | '.join(cells)} | {done.tokens / done.seconds:.0f} | {done.peak_gb:.2f} |")
    print("| seed | NLL | margin | accuracy | tokens/s | peak GB |\n|---|---|---|---|---|---|")
    print("\n".join(rows))
    print("worse for a seed" if worse else "NLL and margin better for every seed")
    return int(worse)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

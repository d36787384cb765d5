"""`python -m benchmarks`: measures, and writes tables (Markdown, JSON) and pictures. README.md says what."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mortice import blas

LOADED = blas.load()  # before anything imports mlx

from benchmarks import groups, heads, losses, options, plots, rate, report, rollouts, slopes, steps  # noqa: E402
from benchmarks.measurement import Journal  # noqa: E402
from benchmarks.settings import Settings  # noqa: E402
from mortice.errors import MorticeError  # noqa: E402

SECTIONS = {
    "steps": steps.run, "groups": groups.run, "heads": heads.run, "slopes": slopes.run, "options": options.run,
    "rate": rate.run, "rollouts": rollouts.run,
}  # fmt: skip


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description="Memory and speed of mortice, measured.")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections (default: all)")
    parser.add_argument("--model", type=Path, help="folder of the model for steps, groups, options, rate and rollouts")
    parser.add_argument("--pairs", type=Path, help="preference file (JSON Lines) for steps and rate")
    parser.add_argument("--peers", metavar="PYTHON", help="a Python that has mlx-lm and mlx-lm-lora")
    parser.add_argument("--repeats", type=int, help="rounds of fresh processes (default 3; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--resume", action="store_true", help="keep the rounds that an earlier run finished")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    parser.add_argument("--width", type=int, default=576, help="hidden size of the heads section (default 576)")
    parser.add_argument("--memory-limit", type=float, default=12, help="GB that full logits may take (default 12)")
    parser.add_argument(
        "--cache-limit",
        type=float,
        default=0.032,
        help="GB that MLX may cache, both sides (default 0.032, as in a run on the CPU)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 where a measurement failed, 2 for a mistake in the arguments."""
    args = arguments().parse_args(argv)
    failed = False
    for name in args.only:
        settings = Settings(
            out=args.out,
            journal=Journal(args.out / f"{name}.jsonl", args.resume),
            plugins=losses.plugins(),
            blas=LOADED,
            repeats=args.repeats or (1 if args.quick else 3),
            quick=args.quick,
            model=args.model and args.model.absolute(),
            pairs=args.pairs,
            peers=args.peers,
            width=args.width,
            memory_limit=int(args.memory_limit * 1e9),
            cache_limit=int(args.cache_limit * 1e9),
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        machine = report.machine(LOADED)
        try:
            found = SECTIONS[name](settings)
        except (MorticeError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        versions = steps.versions(found.measurements)
        found.machine = machine | {f"peers' {name}": version for name, version in versions.items()}
        found.settings = {**found.settings, "rounds": settings.repeats, "cache limit GB": args.cache_limit}
        try:
            plots.draw(found, args.out)
        except ModuleNotFoundError:
            found.notes.append("No picture: matplotlib is not installed (`pip install 'mortice[bench]'`).")
        found.write(args.out)
        print(found.markdown())
        failed |= bool(found.failed)
    write_index(args.out)
    return int(failed)


def write_index(folder: Path) -> None:
    """results.md: every section that has been measured, in order."""
    parts = [(folder / f"{name}.md").read_text() for name in SECTIONS if (folder / f"{name}.md").exists()]
    (folder / "results.md").write_text("# Measured\n\n" + "\n".join(parts))


if __name__ == "__main__":
    sys.exit(main())

"""`mortice train`: a run from its file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mortice.cli.run_flags import RunFlags, load

if TYPE_CHECKING:
    from mortice.trainer import Outcome


def train(file: Path, *, run: Path | None = None, flags: RunFlags | None = None) -> int:
    """Train as a run file says.

    Exit code 130 after SIGINT, 143 after SIGTERM: the step that ran is finished or left out, and everything is saved.

    Parameters
    ----------
    file
        Run file (TOML).
    run
        Run folder; must not exist or be empty.
    """
    from mortice import blas

    blas.load()
    from mortice.cli.output import warn
    from mortice.launch import Notices
    from mortice.launch import train as launch

    config = load(file, flags, run)
    return report(launch(config, Notices(show=warn, progress=warn)))


def report(outcome: Outcome) -> int:
    """Print how a run ended; the exit code."""
    print(f"{'stopped at' if outcome.signal else 'done:'} step {outcome.steps}, {outcome.tokens:,} tokens")
    for name in sorted(set(outcome.before) & set(outcome.after)):
        if name in ("loss", "nll", "margin", "accuracy", "displacement", "reward"):
            print(f"held out {name}: {outcome.before[name]:.4f} → {outcome.after[name]:.4f}")
    print(f"checkpoint: {outcome.checkpoint}")
    print(f"adapter:    {outcome.path / 'adapter'}")
    return 0 if outcome.signal is None else 128 + outcome.signal

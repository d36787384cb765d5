"""`mortice check`: everything that can be wrong with a run, without training."""

from __future__ import annotations

from pathlib import Path

from mortice.cli.output import print_json, print_table
from mortice.cli.run_flags import RunFlags, load


def check(file: Path, *, json: bool = False, flags: RunFlags | None = None) -> None:
    """Check a run file, its plugins, its model and all of its data. Nothing is trained.

    Parameters
    ----------
    file
        Run file (TOML).
    json
        Print JSON.
    """
    from mortice import blas

    blas.load()
    from mortice.cli.output import warn
    from mortice.launch import Notices, prepare

    config = load(file, flags)
    notices = Notices(show=None if json else warn)
    ready = prepare(config, notices)
    facts = {
        "run": str(ready.config.run_path),
        "model": str(ready.pretrained.path),
        "parameters": ready.parameters,
        "trainable": ready.trainable,
        "steps": ready.total_steps,
        "steps an epoch": ready.source.steps_per_epoch,
        "evaluation": "on" if ready.source.can_validate else "off",
    }
    strategies: dict[str, list[str]] = {}
    for chosen in ready.config.chosen:
        strategies.setdefault(chosen.kind, []).append(f"{chosen.provider}:{chosen.name}")
    if json:
        print_json({**facts, "strategies": strategies, "notices": notices.messages, "counts": notices.counts})
        return
    rows = [
        (name, f"{value:,}" if isinstance(value, int) and value is not True else str(value))
        for name, value in facts.items()
    ]
    print_table(None, ("", ""), [*rows, *((kind, ", ".join(names)) for kind, names in strategies.items())])
    print("\nall is well")

"""`mortice task`: problems of a task as a data file."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from mortice.cli.output import warn
from mortice.errors import ConfigError


def task(name: str, output: Path, *, split: str = "train", count: int = 1000, seed: int = 0) -> None:
    """Write problems of a task with their right answers, as records {"prompt", "completion", …}.

    Train on them with format = "completion" (SFT), or on the prompts alone with format = "prompt".

    Parameters
    ----------
    name
        A task by name, or '{name = "arithmetic", digits = 3}' with options.
    output
        File to write (JSON Lines).
    split
        Split of the task; no problem is in two.
    count
        Most problems.
    seed
        Names their order.
    """
    import json

    from mortice import atomic
    from mortice.cli.pairs import strategy_of
    from mortice.plugins import load_plugins

    if count < 1:
        raise ConfigError(f"--count {count} is out of range")
    found = strategy_of(load_plugins(), "task", name, "NAME").options
    answer = getattr(found, "completion", None)
    if answer is None:
        raise ConfigError(f"task {name} gives no right answers, so there is nothing to write")
    records = [
        {**problem, "prompt": problem["prompt"], "completion": answer(problem)}
        for problem in islice(found.problems(split, seed), count)
    ]
    if len(records) < count:
        warn(f"the split {split!r} has {len(records)} problems")
    atomic.write_text(output.expanduser(), "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    print(f"{output.expanduser().absolute()}  {len(records)} problems")

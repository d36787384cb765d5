"""`mortice runs`: list run folders, compare them, remove what is not needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import asdict

from mortice.cli.output import print_json, print_table
from mortice.errors import ConfigError


def runs(
    *folders: Path, compare: bool = False, prune: bool = False, delete: bool = False, yes: bool = False,
    json: bool = False,
) -> int:  # fmt: skip
    """List the runs in a folder, compare them, or remove checkpoints.

    Parameters
    ----------
    folders
        Run folders, or folders that hold some (default: runs).
    compare
        Last metrics side by side, and the settings that differ.
    prune
        Remove all checkpoints but the best and the newest of each run.
    delete
        Remove the runs themselves.
    yes
        Do not ask before anything is removed.
    json
        Print JSON.
    """
    from mortice.runs import compared, different, find, summarize

    if compare + prune + delete > 1:
        raise ConfigError("--compare, --prune and --delete are three things; give one of them")
    found = [path for folder in (folders or (Path("runs"),)) for path in find(folder)]
    if prune or delete:
        return _remove(found, everything=delete, yes=yes, json=json)
    summaries = [summarize(path) for path in found]
    if not compare:
        if json:
            print_json([{**asdict(each), "path": str(each.path)} for each in summaries])
            return 0
        rows = [_row(each) for each in summaries]
        print_table(None, ("run", "state", "step", "loss", "held-out loss", "best", "checkpoints", "size"), rows)
        return 0
    if len(summaries) < 2:
        raise ConfigError("--compare takes two runs or more")
    metrics, settings = compared(summaries), different(summaries)
    names = [each.path.name for each in summaries]
    if json:
        print_json({"runs": [str(each.path) for each in summaries], "metrics": metrics, "settings": settings})
        return 0
    _table("metrics", names, metrics)
    print()
    _table("settings that differ", names, settings)
    return 0


def _row(each: Any) -> tuple[str, ...]:
    from mortice.runs import finite
    from mortice.sizes import readable

    of = "" if each.total is None else f" of {each.total}"
    held_out = finite(each.metrics.get("valid/loss", each.metrics.get("valid/reward")))
    return (
        each.path.name, each.state, f"{each.step}{of}", each.loss, held_out, each.best or "", str(each.checkpoints),
        readable(each.bytes),
    )  # fmt: skip


def _table(title: str, names: list[str], values: Any) -> None:
    def text(value: Any) -> str:
        return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)

    print_table(title, ("", *names), [(key, *map(text, row)) for key, row in values.items()])


def _remove(paths: list[Path], *, everything: bool, yes: bool, json: bool) -> int:
    from mortice.runs import removable, remove, size_of
    from mortice.sizes import readable

    going = [gone for path in paths for gone in removable(path, everything=everything)]
    size = size_of(going)
    if json and not yes:
        raise ConfigError("--json asks nothing; say --yes to remove, or leave out --json")
    if not json:
        for path in going:
            print(path)
        print(f"{len(going)} folders, {readable(size)}")
    if going and not yes and input("remove them? [y/N] ").strip().lower() not in ("y", "yes"):
        print("nothing was removed")
        return 1
    remove(going)
    if json:
        print_json({"removed": [str(path) for path in going], "bytes": size})
    return 0

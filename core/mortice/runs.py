"""Run folders: what they hold, how they compare, what of them can go. Nothing of a model is read."""

from __future__ import annotations

import fcntl
import json
import math
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from mortice.checkpoint import LOCK, step_of
from mortice.errors import ConfigError
from mortice.provenance import flat

STATES = ("running", "complete", "stopped", "begun")


@frozen
class RunSummary:
    """One run folder."""

    path: Path
    state: str
    """`running`: a process holds it; `complete`; `stopped` at its newest checkpoint; `begun`: it has none."""
    step: int
    total: int | None
    """Steps it is to have, where that is known."""
    loss: str
    """Names of its losses."""
    best: str | None
    """Which metric `best` goes by and its value."""
    checkpoints: int
    bytes: int
    settings: Mapping[str, Any]
    """In force, by dotted key."""
    metrics: Mapping[str, float]
    """The last of each: of training, and with `valid/` of validation."""


def find(folder: Path) -> list[Path]:
    """Run folders in a folder, or the folder itself where it is one. Raises ConfigError where there is none."""
    folder = folder.expanduser().absolute()
    if _is_run(folder):
        return [folder]
    found = sorted(p for p in folder.iterdir() if _is_run(p)) if folder.is_dir() else []
    if not found:
        raise ConfigError(f"{folder} is no run folder and holds none")
    return found


def _is_run(path: Path) -> bool:
    return (path / "run.toml").is_file() and (path / "checkpoints").is_dir()


def summarize(path: Path) -> RunSummary:
    """What a run folder tells. Raises ConfigError where its run.toml cannot be read."""
    try:
        tables = tomllib.loads((path / "run.toml").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / 'run.toml'}: {error}") from error
    steps = [step_of(p) for p in checkpoints(path)]
    metrics = last_metrics(path / "metrics.jsonl")
    total = _total(path)
    step = max(steps, default=0)
    if held(path):
        state = "running"
    elif not steps:
        state = "begun"
    else:
        state = "complete" if total is not None and step >= total else "stopped"
    losses = tables.get("loss", {})
    names = [each.get("name", "?") for each in (losses if isinstance(losses, list) else [losses])]
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    settings = dict(flat(tables))
    return RunSummary(path, state, step, total, " + ".join(names), _best(path), len(steps), size, settings, metrics)


def checkpoints(path: Path) -> list[Path]:
    """Whole checkpoints, oldest step first."""
    found = [p for p in (path / "checkpoints").glob("step-*") if (p / "state.json").exists()]
    return sorted(found, key=step_of)


def held(path: Path) -> bool:
    """Whether a process holds the folder."""
    lock = path / LOCK
    if not lock.exists():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _total(path: Path) -> int | None:
    try:
        return int(json.loads((path / "provenance.json").read_text("utf-8"))["total_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _best(path: Path) -> str | None:
    file = path / "best"
    named = file.read_text("utf-8").split() if file.exists() else []
    return None if not named else f"{named[0]}: {float(named[1]):.4f}" if len(named) > 1 else named[0]


def last_metrics(file: Path) -> dict[str, float]:
    """The last value of every metric; lines that are not whole are passed over."""
    found: dict[str, float] = {}
    for line in _lines(file):
        found |= {name: value for name, value in line.items() if isinstance(value, (int, float))}
    return found


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    if not file.exists():
        return
    for text in file.read_text("utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


def different(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """Settings that are not the same in all runs, by dotted key; None where a run has none."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    found = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def compared(runs: Sequence[RunSummary]) -> dict[str, list[float | None]]:
    """Last metrics that say something of a result, by name."""
    left_out = ("memory_", "seconds", "tokens", "data_", "learning_rate", "nonfinite", "step", "rollout_")
    names = dict.fromkeys(
        name for run in runs for name in run.metrics if not name.removeprefix("valid/").startswith(left_out)
    )
    return {name: [run.metrics.get(name) for run in runs] for name in sorted(names)}


def removable(path: Path, *, everything: bool = False) -> list[Path]:
    """Checkpoints that may go: all but the best and the newest, or with `everything` the whole folder.

    Raises ConfigError where a process holds the run.
    """
    if held(path):
        raise ConfigError(f"{path} is in use; nothing of it is removed")
    if everything:
        return [path]
    file = path / "best"
    best = file.read_text("utf-8").split()[:1] if file.exists() else []
    aside = list((path / "checkpoints").glob("damaged-*"))
    return [p for p in checkpoints(path)[:-1] if [p.name] != best] + aside


def size_of(paths: Iterable[Path]) -> int:
    return sum(p.stat().st_size for path in paths for p in path.rglob("*") if p.is_file())


def remove(paths: Iterable[Path]) -> None:
    """Each is renamed before it is removed, so that a kill leaves no half of one under its name."""
    for path in paths:
        gone = path.with_name(f".tmp-gone-{path.name}")
        path.rename(gone)
        shutil.rmtree(gone)


def finite(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if math.isfinite(value) else str(value)

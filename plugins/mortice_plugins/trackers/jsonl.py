"""`metrics.jsonl` in the run folder: one line a step, written at once, so that a kill loses one line at most."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from attrs import frozen

from mortice import atomic
from mortice.errors import MorticeError
from mortice.protocols import RunInfo


@frozen
class JSONLines:
    """metrics.jsonl in the run folder: one JSON object a step, `null` for numbers that are not finite."""

    @contextmanager
    def open(self, run: RunInfo, /) -> Iterator[LiveLines]:
        path = run.path / "metrics.jsonl"
        if path.exists():
            _cut(path, run.start_step if run.resumed else -1)
        with path.open("ab", buffering=0) as file:
            yield LiveLines(file)


@frozen
class LiveLines:
    file: FileIO

    def log(self, step: int, metrics: Mapping[str, Any], /) -> None:
        """Raises MorticeError where the disk refuses."""
        line = {"step": step} | {name: _finite(value) for name, value in metrics.items()}
        try:
            self.file.write(f"{json.dumps(line, allow_nan=False)}\n".encode())
        except OSError as error:
            raise MorticeError(f"cannot write {self.file.name}: {error.strerror}") from error


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut(path: Path, last: int) -> None:
    """Keep whole lines up to step `last`: what a run that goes on from there will not write again."""

    def kept(line: str) -> bool:
        try:
            return json.loads(line)["step"] <= last
        except (ValueError, KeyError, TypeError):
            return False

    lines = [line for line in path.read_text("utf-8").splitlines() if kept(line)]
    atomic.write_text(path, "".join(f"{line}\n" for line in lines))

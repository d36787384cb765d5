"""The run folder and its checkpoints. Everything is written to a temporary name, flushed and renamed.

    run.toml  provenance.json  metrics.jsonl  adapter/  checkpoints/step-00200/  best  latest  .lock

A checkpoint is safetensors and JSON; reading one runs no code. `best` and `latest` are small files with a step's
folder name. What a killed process left under temporary names is never read, and cleared when the folder is made again.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
from attrs import define, field, frozen

from mortice import atomic
from mortice.errors import CheckpointError, ConfigError, MorticeError, TrainingError

LOCK = ".lock"
WEIGHTS = "weights.safetensors"
_NAME = re.compile(r"step-(\d+)")


@frozen(eq=False)
class Checkpoint:
    """A complete state of a run between two optimizer steps, but for the trained weights: those the adapter writes."""

    step: int
    optimizer: Mapping[str, mx.array]
    """The optimizer's state, flattened."""
    state: Mapping[str, Any] = field(factory=dict)
    """JSON values: counters, the state of source and controllers."""
    weights: Mapping[str, mx.array] = field(factory=dict)
    """Trained weights that the adapter does not keep (a head's own)."""


@define(eq=False)
class RunFolder:
    """One run's folder, held by this process until `close`."""

    path: Path
    keep: int = 2
    """Checkpoints that stay, the best and the newest always among them; 0 for all."""
    best_mode: str = "min"
    keep_every: int | None = None
    """Checkpoints of steps that are multiples of this stay too."""
    _lock: IO[str] | None = None

    @classmethod
    def create(
        cls, path: Path, config: str, *, keep: int = 2, best_mode: str = "min", keep_every: int | None = None
    ) -> RunFolder:
        """Make the folder, hold it and write `run.toml`.

        Raises TrainingError where another process holds it or a run has left checkpoints in it, MorticeError where it
        cannot be written.
        """
        path = path.absolute()
        folder = cls(path, keep, best_mode, keep_every)
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            folder._hold()
            for part in (path, path / "checkpoints"):
                atomic.clean(part)
            if newest := folder.newest():
                folder.close()
                raise TrainingError(
                    f"{path} holds a run already, up to {newest.name}; go on with it (mortice resume {path}), or "
                    "choose another folder"
                )
            atomic.write_text(path / "run.toml", config)
        except OSError as error:
            folder.close()
            raise MorticeError(f"cannot write the run folder {path}: {error.strerror or error}") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Hold a folder that a run has left, and clear what a killed process left in it.

        Raises ConfigError where it is no run folder, TrainingError where another process holds it, MorticeError where
        it cannot be written.
        """
        path = path.absolute()
        if not (path / "run.toml").is_file() or not (path / "checkpoints").is_dir():
            raise ConfigError(f"{path} is no run folder: it has no run.toml with checkpoints beside it")
        folder = cls(path)
        try:
            folder._hold()
            for part in (path, path / "checkpoints"):
                atomic.clean(part)
        except OSError as error:
            folder.close()
            raise MorticeError(f"cannot write the run folder {path}: {error.strerror or error}") from error
        return folder

    def set_aside(self, path: Path) -> Path:
        """Take a damaged checkpoint out of the way, under a name that is never read."""
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        return path.rename(aside)

    def mark_best(self, step: int, metric: float) -> None:
        """Point `best` at a checkpoint that was saved before its metric was known."""
        atomic.write_text(self.path / "best", f"{step_name(step)} {metric!r}\n")

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the folder go."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _hold(self) -> None:
        """An advisory lock, which the system drops with the process, and the process id for the message.

        The file stays: removing it would let one process lock the old file and another one a new file.
        """
        import fcntl

        lock = (self.path / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            with lock:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
            raise TrainingError(
                f"{self.path} is in use by process {holder}; one run folder takes one process"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def save(self, checkpoint: Checkpoint, write_adapter: Callable[[Path], None], metric: float | None = None) -> Path:
        """Write a checkpoint, point `latest` at it, and `best` where `metric` is better than every one before.

        A tie keeps the earlier one; a number that is not finite is never best. Checkpoints beyond `keep` are removed,
        oldest first, the best never. Raises MorticeError where the disk refuses; older checkpoints are then untouched.
        """
        if metric is not None and not math.isfinite(metric):
            metric = None
        path = self.path / "checkpoints" / step_name(checkpoint.step)
        try:
            with atomic.writing_folder(path) as folder:
                write_adapter(folder / "adapter")
                mx.save_safetensors(
                    str(folder / "optimizer.safetensors"), dict(checkpoint.optimizer), metadata={"format": "mlx"}
                )
                state = {**checkpoint.state, "step": checkpoint.step, "metric": metric}
                if checkpoint.weights:
                    mx.save_safetensors(str(folder / WEIGHTS), dict(checkpoint.weights), metadata={"format": "mlx"})
                (folder / "state.json").write_text(json.dumps(state, indent=1) + "\n", "utf-8")
            if metric is not None and self._is_best(metric, path.name):
                self.mark_best(checkpoint.step, metric)
            atomic.write_text(self.path / "latest", f"{path.name}\n")
            self._retain()
        except (OSError, RuntimeError) as error:
            raise MorticeError(f"cannot write checkpoint {path}: {error}") from error
        return path

    def _is_best(self, metric: float, name: str) -> bool:
        old = self.best()
        if old is None or old.name == name:
            return True
        named = (self.path / "best").read_text("utf-8").split()
        value = float(named[1]) if len(named) > 1 else json.loads((old / "state.json").read_text("utf-8"))["metric"]
        return metric < value if self.best_mode == "min" else metric > value

    def _retain(self) -> None:
        best, found = self.best(), self.checkpoints()
        passing = [p for p in found if not self.keep_every or step_of(p) % self.keep_every]
        surplus = len(passing) - self.keep if self.keep else 0
        for path in [p for p in passing if p not in (best, found[-1])][: max(0, surplus)]:
            gone = atomic.temporary(path)  # renamed first: a kill must not leave half of one under its name
            path.rename(gone)
            shutil.rmtree(gone)

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest step first."""
        found = [p for p in (self.path / "checkpoints").iterdir() if _NAME.fullmatch(p.name) and _complete(p)]
        return sorted(found, key=step_of)

    def newest(self) -> Path | None:
        """The checkpoint of the highest step."""
        found = self.checkpoints()
        return found[-1] if found else None

    def best(self) -> Path | None:
        return self._pointed("best")

    def latest(self) -> Path | None:
        return self._pointed("latest")

    def _pointed(self, name: str) -> Path | None:
        file = self.path / name
        if not file.exists():
            return None
        named = file.read_text("utf-8").split()
        path = self.path / "checkpoints" / (named[0] if named else "none")
        return path if _complete(path) else None


def _complete(path: Path) -> bool:
    return (path / "state.json").exists()


def step_name(step: int) -> str:
    return f"step-{step:05d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def load_checkpoint(path: Path) -> Checkpoint:
    """Raises CheckpointError for a checkpoint that is missing or damaged."""
    try:
        state = json.loads((path / "state.json").read_text("utf-8"))
        optimizer: Any = mx.load(str(path / "optimizer.safetensors"))
        weights: Any = mx.load(str(path / WEIGHTS)) if (path / WEIGHTS).exists() else {}
        mx.eval(optimizer, weights)  # reads it: a file that was cut shows here
        return Checkpoint(state["step"], optimizer, state, weights)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} is no complete checkpoint: {error}") from error

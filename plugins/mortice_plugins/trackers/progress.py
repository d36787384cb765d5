"""The terminal: a bar with loss, rate, tokens/s, memory and time left; lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attrs import define, frozen
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from mortice.options import ge, option
from mortice.protocols import RunInfo

SHOWN = ("nll", "odds", "margin", "accuracy", "displacement", "reward", "kl", "length", "truncated")
"""Metrics worth a place beside the loss, where a run has them."""


@frozen
class Progress:
    """A progress bar with loss, learning rate, tokens/s, memory and time left; lines on a pipe or in a file."""

    every: float = option(10.0, help="seconds between two lines where there is no terminal", validator=ge(0))

    @contextmanager
    def open(self, run: RunInfo, /) -> Iterator[LiveProgress]:
        console = Console(file=sys.stderr, highlight=False)
        bar = Bar(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.description}"),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        with bar:
            task = bar.add_task("", total=run.total_steps, completed=run.start_step)
            yield LiveProgress(console, bar, task, run.total_steps, self.every)


@define
class LiveProgress:
    console: Console
    bar: Bar
    task: Any
    total: int
    every: float
    last: float = 0.0

    def log(self, step: int, metrics: Mapping[str, Any], /) -> None:
        if "loss" in metrics:
            text = training(metrics)
            self.bar.update(self.task, completed=step, description=text)
            now = time.monotonic()
            if self.bar.disable and (now - self.last >= self.every or step == self.total):
                self.last = now
                self.console.print(f"step {step}/{self.total}  {text}", soft_wrap=True, markup=False)
        elif any(name.startswith("valid/") for name in metrics):
            found = "  ".join(
                f"{name} {metrics[f'valid/{name}']:.4f}" for name in ("loss", *SHOWN) if f"valid/{name}" in metrics
            )
            self.say(f"step {step}  held out: {found}")

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        self.console.print(message, soft_wrap=True, markup=False)


def training(metrics: Mapping[str, Any]) -> str:
    """One line for a training step."""
    parts = [f"loss {metrics['loss']:.4f}"]
    parts += [f"{name} {metrics[name]:.3f}" for name in SHOWN if name in metrics]
    parts += [f"rate {metrics['learning_rate']:.2e}", f"{metrics['tokens_per_second']:.0f} tok/s"]
    parts += [f"peak {metrics['memory_peak_gb']:.2f} GB", f"cache {metrics['memory_cache_gb']:.2f} GB"]
    if metrics.get("nonfinite_steps"):
        parts.append(f"skipped {metrics['nonfinite_steps']}")
    return "  ".join(parts)

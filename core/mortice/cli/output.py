"""Tables and JSON on standard output, the same for every command that lists something."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def print_json(value: Any) -> None:
    """For programs: one JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """For people: a table as wide as the terminal, or as its longest line where there is none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=i == 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 200
    Console(highlight=False, width=width).print(table)


def warn(text: str) -> None:
    """A line on standard error that stops nothing."""
    print(f"mortice: {text}", file=sys.stderr)


@contextmanager
def spinner(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A function that shows what long work is at: on a terminal beside a spinner, else not at all."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status("reading") as status:
        yield status.update


@contextmanager
def bar(what: str, *, quiet: bool = False, every: float | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """A function (done, all, the next one's name) that shows how far work with an end is, on a terminal.

    Elsewhere, with `every`, it prints a line after so many seconds.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    if quiet or not console.is_terminal:
        last = time.monotonic()

        def line(done: int, whole: int, at: str) -> None:
            nonlocal last
            if not quiet and every is not None and time.monotonic() - last >= every:
                last = time.monotonic()
                console.print(f"{what} {done}/{whole}  {at}", soft_wrap=True, markup=False)

        yield line
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[at]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None, at="")
        yield lambda done, whole, at: progress.update(task, completed=done, total=whole, at=at)

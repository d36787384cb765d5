"""Pictures of a section's tables, as SVG. Needs matplotlib (`pip install 'mortice[bench]'`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import groups, steps
from benchmarks.report import Report, Table

AGAINST = {*steps.PEERS.values(), groups.PLAIN}


def draw(report: Report, folder: Path) -> None:
    """Draw the section's pictures and name them in the report. Raises ModuleNotFoundError without matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "mortice", "axes.grid": True, "grid.alpha": 0.3, "font.size": 9})
    from matplotlib import pyplot

    panels = PANELS[report.section](report) if report.measurements else []
    if not panels:
        return
    figure, places = pyplot.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.6), squeeze=False)
    for panel, axes in zip(panels, places[0]):
        panel(axes)
    figure.tight_layout()
    name = f"{report.section}.svg"
    figure.savefig(folder / name, metadata={"Date": None})
    pyplot.close(figure)
    report.plots = [name]


Panel = Callable[[Any], None]


def _bars(rows: Sequence[Any], labels: tuple[str, str], column: str, title: str) -> Panel:
    """Bars, grey for what the others are compared with."""

    def panel(axes: Any) -> None:
        held = [row for row in rows if row[column] is not None]
        names = [f"{row[labels[0]]} · {row[labels[1]]}" for row in held]
        colors = ["0.6" if row[labels[1]] in AGAINST else "C0" for row in held]
        axes.barh(names, [row[column] for row in held], color=colors)
        axes.invert_yaxis()
        axes.set_title(title)

    return panel


def _lines(table: Table, x: str, y: str, by: str, title: str, *, logarithmic: bool = False) -> Panel:
    def panel(axes: Any) -> None:
        for name in dict.fromkeys(row[by] for row in table.rows):
            points = [(row[x], row[y]) for row in table.rows if row[by] == name and row[y] is not None]
            if points:
                axes.plot(*zip(*points), marker="o", label=name)
        if logarithmic and axes.lines:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        axes.set(xlabel=x, ylabel=y, title=title)
        if axes.lines:
            axes.legend()

    return panel


def _steps(report: Report) -> list[Panel]:
    rows = report.tables[-1].rows
    return [
        _bars(rows, ("objective", "side"), "s a step", "seconds a step"),
        _bars(rows, ("objective", "side"), "above the weights MiB", "peak above the weights, MiB"),
    ]


def _groups(report: Report) -> list[Panel]:
    rows = report.tables[-1].rows
    return [
        _bars(rows, ("prompt", "layout"), "s", "seconds an update"),
        _bars(rows, ("prompt", "layout"), "above the weights MiB", "peak above the weights, MiB"),
    ]


def _heads(report: Report) -> list[Panel]:
    rows = report.tables[0].rows
    middle = sorted({row["M"] for row in rows})[len({row["M"] for row in rows}) // 2]
    table = Table("", [row for row in rows if row["M"] == middle])
    return [
        _lines(table, "V", "peak MiB", "head", f"peak, {middle:,} tokens", logarithmic=True),
        _lines(table, "V", "s", "head", f"time, {middle:,} tokens", logarithmic=True),
    ]


def _slopes(report: Report) -> list[Panel]:
    tables = {table.title: table for table in report.tables}
    return [
        _lines(tables[f"Over {axis}"], axis, "peak MiB", "backward", f"peak above the weights over {axis}")
        for axis in ("tokens", "layers")
    ]


def _rate(report: Report) -> list[Panel]:
    return [_bars(report.tables[-1].rows, ("objective", "side"), "GFLOP/s", "GFLOP/s")]


def _options(report: Report) -> list[Panel]:
    return [
        _bars(
            [row | {"tokens": table.title} for row in table.rows],
            ("tokens", "backward"),
            column,
            f"{title}, {table.title}",
        )
        for table in report.tables
        for column, title in (("peak MiB", "peak above the weights, MiB"), ("s", "seconds"))
    ]


def _rollouts(report: Report) -> list[Panel]:
    return [_bars(report.tables[-1].rows, ("prompts", "side"), "tokens/s", "tokens a second")]


PANELS: dict[str, Callable[[Report], list[Panel]]] = {
    "steps": _steps, "groups": _groups, "heads": _heads, "slopes": _slopes, "options": _options,
    "rate": _rate, "rollouts": _rollouts,
}  # fmt: skip

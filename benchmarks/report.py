"""Tables of a section: rows of numbers, written as JSON and as Markdown, with what they were measured on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict, define, field, frozen

from benchmarks.measurement import Measurement, Spread
from mortice.blas import Blas

MIB = 2**20


@frozen
class Table:
    """Rows of one shape. A column's name says its unit; a `Spread` is a ratio."""

    title: str
    rows: Sequence[Mapping[str, Any]]

    def markdown(self) -> str:
        columns = list(self.rows[0])
        numbers = [any(not isinstance(row[c], str) for row in self.rows) for c in columns]
        lines = [f"### {self.title}", "", f"| {' | '.join(columns)} |"]
        lines.append("|" + "".join("---:|" if number else "---|" for number in numbers))
        lines += [f"| {' | '.join(_cell(row[c]) for c in columns)} |" for row in self.rows]
        return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, Spread):
        return f"**{_number(value.median)}** ({_number(value.low)} to {_number(value.high)})"
    return value if isinstance(value, str) else _number(value)


def _number(value: float) -> str:
    """Three digits that count, no exponent."""
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


@define
class Report:
    """What one section found."""

    section: str
    title: str
    what: str
    """One paragraph: what is compared with what."""
    settings: Mapping[str, Any]
    tables: list[Table] = field(factory=list)
    notes: list[str] = field(factory=list)
    """What was left out, and why."""
    measurements: list[Measurement] = field(factory=list)
    machine: Mapping[str, str] = field(factory=dict)
    plots: list[str] = field(factory=list)

    @property
    def failed(self) -> list[Measurement]:
        return [m for m in self.measurements if m.failed]

    def markdown(self) -> str:
        parts = [f"## {self.title}", self.what]
        parts.append("; ".join(f"{name} {value}" for name, value in self.settings.items()) + ".")
        parts += [table.markdown() for table in self.tables if table.rows]
        failures = dict.fromkeys(f"{m.contender} ({_cell_name(m.cell)}) failed: {m.failed}" for m in self.failed)
        if self.notes or failures:
            parts.append("\n".join(f"- {note}" for note in [*self.notes, *failures]))
        parts += [f"![{self.title}]({plot})" for plot in self.plots]
        parts.append("Measured on: " + "; ".join(f"{name} {value}" for name, value in self.machine.items()) + ".")
        return "\n\n".join(parts) + "\n"

    def write(self, folder: Path) -> None:
        """SECTION.json and SECTION.md."""
        (folder / f"{self.section}.json").write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")
        (folder / f"{self.section}.md").write_text(self.markdown())


def _cell_name(cell: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in cell.items())


def mib(value: float | None) -> float | None:
    """Bytes in MiB."""
    return None if value is None else value / MIB


def machine(blas: Blas) -> dict[str, str]:
    """Processor, system, the version of everything that computes, and how busy the machine is now."""
    found = {
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        "BLAS": " ".join(filter(None, [blas.name, _version(blas.name), Path(blas.path or "").name])),
        "date": datetime.now(UTC).date().isoformat(),
    }
    found |= {name: _version(name) for name in ("mortice", "mlx", "numpy")}
    numpy_blas: Any = np.show_config(mode="dicts")
    own = numpy_blas["Build Dependencies"]["blas"]
    return found | {"numpy's BLAS": f"{own['name']} {own['version']}", "load before": f"{os.getloadavg()[0]:.1f}"}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor() or 'unknown'}, {os.cpu_count()} cores"

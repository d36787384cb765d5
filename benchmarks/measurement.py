"""Measurements in fresh processes, both sides of a comparison in turn, kept in a journal as they come.

A *cell* is what is compared (an objective, a length, a vocabulary); a *contender* is one of those that are compared in
it. Repeats go round the contenders: a ratio is only ever taken between two measurements of one repeat.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

from attrs import asdict, define, field, frozen

ROOT = Path(__file__).resolve().parent.parent


@frozen
class Contender:
    """One of the sides: a function of a module, the arguments it is called with, and the Python that runs it."""

    name: str
    function: str
    """`module:function`, run by `benchmarks.worker`, or a module alone, run as it is."""
    arguments: Mapping[str, Any] = field(factory=dict)
    """JSON values, given on standard input."""
    python: str = sys.executable

    @property
    def digest(self) -> str:
        """Stands for name, function and arguments: another size or another file is another measurement."""
        return sha256(
            json.dumps([self.name, self.function, dict(self.arguments)], sort_keys=True).encode()
        ).hexdigest()[:12]

    def measure(self) -> dict[str, Any]:
        """What the function returns, from a process of its own. A failure is `{"failed": last line of its errors}`."""
        module, _, function = self.function.partition(":")
        command = [self.python, "-m", *(["benchmarks.worker", self.function] if function else [module])]
        done = subprocess.run(
            command, input=json.dumps(dict(self.arguments)), capture_output=True, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
        if done.returncode:
            errors = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            return {"failed": errors[-1][:300]}
        return json.loads(done.stdout.splitlines()[-1])


@frozen
class Measurement:
    """What one process found."""

    section: str
    cell: Mapping[str, Any]
    contender: str
    digest: str
    """Of the contender."""
    repeat: int
    values: Mapping[str, Any]

    @property
    def failed(self) -> str | None:
        return self.values.get("failed")


@define
class Journal:
    """Every measurement of a run, one JSON line each. With `resume`, those of an earlier run that did not fail are
    taken over."""

    file: Path
    resume: bool = False
    found: list[Measurement] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.resume and self.file.exists():
            found = [Measurement(**json.loads(line)) for line in self.file.read_text().splitlines()]
            self.found = [m for m in found if not m.failed]
        else:
            self.file.write_text("")

    def add(self, measurement: Measurement) -> None:
        self.found.append(measurement)
        with self.file.open("a") as out:
            out.write(json.dumps(asdict(measurement)) + "\n")

    def round(
        self, section: str, cell: Mapping[str, Any], contenders: Sequence[Contender], repeat: int
    ) -> list[Measurement]:
        """A round that was measured to its end before; empty where any contender is missing."""
        held = {m.digest: m for m in self.found if (m.section, m.cell, m.repeat) == (section, cell, repeat)}
        return [held[c.digest] for c in contenders] if all(c.digest in held for c in contenders) else []


def interleaved(
    section: str, cell: Mapping[str, Any], contenders: Sequence[Contender], repeats: int, journal: Journal,
    say: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:  # fmt: skip
    """Every contender once, then every contender again: `repeats` rounds of fresh processes."""
    found: list[Measurement] = []
    where = " ".join(f"{key} {value}" for key, value in cell.items())
    for repeat in range(repeats):
        held = journal.round(section, cell, contenders, repeat)
        if held:
            found += held
            continue
        for contender in contenders:
            start = time.perf_counter()
            measurement = Measurement(section, cell, contender.name, contender.digest, repeat, contender.measure())
            seconds = time.perf_counter() - start
            outcome = f"FAILED: {measurement.failed}" if measurement.failed else f"{seconds:.0f} s"
            say(f"{section}: {where}: {contender.name}, round {repeat + 1} of {repeats}: {outcome}")
            journal.add(measurement)
            found.append(measurement)
    return found


@frozen
class Spread:
    """A median and what it lies between."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None of no values."""
        held = list(values)
        return cls(median(held), min(held), max(held)) if held else None


def value(measurements: Iterable[Measurement], contender: str, name: str) -> float | None:
    """The median of one value of a contender over its repeats; None where every one failed."""
    spread = Spread.of(m.values[name] for m in measurements if m.contender == contender and not m.failed)
    return None if spread is None else spread.median


def ratio(
    measurements: Iterable[Measurement], of: str, to: str, name: str, *, to_name: str | None = None
) -> Spread | None:
    """`of`'s value over `to`'s, taken repeat by repeat; None where no repeat has both."""
    held = [m for m in measurements if not m.failed]
    above = {m.repeat: m.values[name] for m in held if m.contender == of}
    below = {m.repeat: m.values[to_name or name] for m in held if m.contender == to}
    return Spread.of(above[repeat] / below[repeat] for repeat in above if below.get(repeat))

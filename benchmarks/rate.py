"""Section `rate`: the fraction of the machine's sgemm rate that an ORPO step reaches."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from benchmarks import steps
from benchmarks.measurement import Measurement, Spread, ratio, value
from benchmarks.report import Report, Table
from benchmarks.settings import Settings


def run(settings: Settings) -> Report:
    report = Report(
        "rate",
        "How much of the machine a step uses",
        "The products of an ORPO step, counted (linear layers, LoRA, causal attention, head, and a second forward "
        "where the backward makes one), divided by its seconds; against MLX's rate for float32 products of 2,048 × "
        "2,048 in the same process, the best of three behind the step.",
        {"pairs": steps.count(settings), **steps.RECIPE, "dtype": "float32"},
    )
    if settings.model is None or settings.pairs is None:
        report.notes.append("Left out: it needs --model and --pairs.")
        return report
    file, _ = steps.chosen_pairs(settings)
    contenders = steps.ours(settings, "orpo", file)
    report.measurements = [_with_rate(m) for m in settings.measure("rate", {"objective": "orpo"}, contenders)]
    report.tables.append(Table("Steps", [_row(c.name, report.measurements) for c in contenders]))
    return report


def _with_rate(m: Measurement) -> Measurement:
    """The same with `reached`, operations a second."""
    return m if m.failed else evolve(m, values={**m.values, "reached": m.values["flops"] / m.values["seconds"]})


def _row(name: str, found: list[Measurement]) -> dict[str, Any]:
    def giga(key: str) -> float | None:
        median = value(found, name, key)
        return None if median is None else median / 1e9

    fraction: Spread | None = ratio(found, name, name, "reached", to_name="sgemm")
    return {
        "objective": "orpo",
        "side": name,
        "s a step": value(found, name, "seconds"),
        "GFLOP a step": giga("flops"),
        "GFLOP/s": giga("reached"),
        "sgemm GFLOP/s": giga("sgemm"),
        "fraction of sgemm": fraction,
    }

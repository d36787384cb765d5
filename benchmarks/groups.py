"""Section `groups`: a GRPO-shaped update, by every layout against `separate`."""

from __future__ import annotations

from typing import Any

from benchmarks.measurement import Contender, Measurement, ratio, value
from benchmarks.report import Report, Table, mib
from benchmarks.settings import Settings
from benchmarks.steps import RECIPE

PLAIN = "separate"
BACKWARD = "segmented"
"""`full` would keep the activations of eight whole rows at once."""


def run(settings: Settings) -> Report:
    completions, length, prompts = (4, 32, [128]) if settings.quick else (8, 128, [512, 1024])
    report = Report(
        "groups",
        "A GRPO-shaped update",
        "One group a step: completions of random token ids behind one prompt, the loss the sum of their "
        "log-probabilities weighted by given advantages. Peak: weights included.",
        {"completions": completions, "tokens each": length, "head": "flash-cce", "backward": BACKWARD, **RECIPE},
    )
    if settings.model is None:
        report.notes.append("Left out: it needs --model.")
        return report
    recipe = {"steps": 1, "cache_limit": settings.cache_limit, **RECIPE}
    rows: list[dict[str, Any]] = []
    for prompt in prompts:
        common = {
            "model": str(settings.model), "prompt": prompt, "completions": completions, "length": length,
            "backward": BACKWARD, "recipe": recipe,
        }  # fmt: skip
        contenders = [
            Contender(layout, "benchmarks.training:group_step", common | {"layout": layout})
            for layout in sorted(settings.names("layout"), key=lambda name: name != PLAIN)
        ]
        found = settings.measure("groups", {"prompt": prompt}, contenders)
        report.measurements += found
        rows += [_row(prompt, c.name, found) for c in contenders]
    report.tables.append(Table("Updates", rows))
    return report


def _row(prompt: int, name: str, found: list[Measurement]) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "layout": name,
        "s": value(found, name, "seconds"),
        "peak MiB": mib(value(found, name, "peak")),
        "above the weights MiB": mib(value(found, name, "above")),
        f"time, {PLAIN} / it": ratio(found, PLAIN, name, "seconds"),
        f"memory above the weights, {PLAIN} / it": ratio(found, PLAIN, name, "above"),
    }

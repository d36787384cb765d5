"""Section `options`: what each way to go backward costs and buys on a real model, short and long rows."""

from __future__ import annotations

from typing import Any

from benchmarks.measurement import Contender, Measurement, ratio, value
from benchmarks.report import Report, Table, mib
from benchmarks.settings import Settings

PLAIN = "full"
ANSWER = 128
CHUNK = 256
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    PLAIN: ("full", {}, 0),
    f"full, mlp_chunk {CHUNK}": ("full", {}, CHUNK),
    "checkpoint": ("checkpoint", {}, 0),
    "checkpoint, segment_size 8": ("checkpoint", {"segment_size": 8}, 0),
    "segmented": ("segmented", {}, 0),
    'segmented, keep "cuts"': ("segmented", {"keep": "cuts"}, 0),
    'segmented, keep "everything"': ("segmented", {"keep": "everything"}, 0),
    "segmented, segment_size 1": ("segmented", {"segment_size": 1}, 0),
    "segmented, segment_size 8": ("segmented", {"segment_size": 8}, 0),
    f"segmented, mlp_chunk {CHUNK}": ("segmented", {}, CHUNK),
    "segmented, not eager": ("segmented", {"eager": False}, 0),
    "segmented, compile": ("segmented", {"compile": True}, 0),
}
"""(backward, its options, `[context] mlp_chunk`)."""


def run(settings: Settings) -> Report:
    report = Report(
        "options",
        "What each way to go backward costs and buys",
        f"An SFT step on one row of random token ids, the last {ANSWER} of which are scored. Peak: above the weights.",
        {"head": "flash-cce", "layout": "separate", "dtype": "float32", "rank": 8},
    )
    if settings.model is None:
        report.notes.append("Left out: it needs --model.")
        return report
    for tokens in [256] if settings.quick else [512, 2048]:
        common = {
            "model": str(settings.model), "prompt": tokens - ANSWER, "length": ANSWER,
            "recipe": {"steps": 1, "cache_limit": settings.cache_limit},
        }  # fmt: skip
        contenders = [
            Contender(
                name,
                "benchmarks.training:option_step",
                common | {"backward": backward, "options": options, "mlp_chunk": chunk},
            )
            for name, (backward, options, chunk) in VARIANTS.items()
        ]
        found = settings.measure("options", {"tokens": tokens}, contenders)
        report.measurements += found
        report.tables.append(Table(f"{tokens:,} tokens", [_row(c.name, found) for c in contenders]))
    return report


def _row(name: str, found: list[Measurement]) -> dict[str, Any]:
    return {
        "backward": name,
        "peak MiB": mib(value(found, name, "above")),
        "s": value(found, name, "seconds"),
        f"memory, it / {PLAIN}": ratio(found, name, PLAIN, "above"),
        f"time, it / {PLAIN}": ratio(found, name, PLAIN, "seconds"),
    }

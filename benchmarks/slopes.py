"""Section `slopes`: peak memory of every backward as rows grow longer and models deeper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.measurement import Contender, Measurement, ratio, value
from benchmarks.report import Report, Table, mib
from benchmarks.settings import Settings

PLAIN = "full"
ANSWER = 128
"""Tokens that are scored, so that the head takes the same everywhere."""


def config(layers: int, *, quick: bool) -> dict[str, Any]:
    """A Llama with random weights."""
    width = 64 if quick else 256
    return {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers,
        "num_attention_heads": width // 32, "num_key_value_heads": width // 64, "vocab_size": 32_000,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 16_384, "hidden_act": "silu",
        "tie_word_embeddings": True,
    }  # fmt: skip


def run(settings: Settings) -> Report:
    tokens, layers = ([256, 512], [2, 4]) if settings.quick else ([512, 1024, 2048, 4096, 8192], [4, 8, 16, 32, 48])
    depth, length = (2, 256) if settings.quick else (16, 1024)
    shape = config(depth, quick=settings.quick)
    report = Report(
        "slopes",
        "Peak memory against length and depth",
        f"An SFT step on one row whose last {ANSWER} tokens are scored, random weights, every registered backward with "
        "its default options. Peak: above the weights.",
        {
            "hidden size": shape["hidden_size"], "vocabulary": shape["vocab_size"], "layers over lengths": depth,
            "tokens over depths": length, "head": "flash-cce", "layout": "separate",
        },
    )  # fmt: skip
    for axis, places in (("tokens", tokens), ("layers", layers)):
        rows: list[dict[str, Any]] = []
        for place in places:
            at = {"tokens": length, "layers": depth} | {axis: place}
            contenders = _contenders(settings, **at)
            found = settings.measure("slopes", at, contenders)
            report.measurements += found
            rows += [_row(axis, place, c.name, found) for c in contenders]
        report.tables.append(Table(f"Over {axis}", rows))
        report.tables.append(Table(f"Slopes over {axis}", _slopes(axis, rows)))
    return report


def _contenders(settings: Settings, tokens: int, layers: int) -> list[Contender]:
    common = {
        "config": config(layers, quick=settings.quick), "prompt": tokens - ANSWER, "length": ANSWER,
        "recipe": {"steps": 1, "cache_limit": settings.cache_limit},
    }  # fmt: skip
    return [
        Contender(backward, "benchmarks.training:random_step", common | {"backward": backward})
        for backward in sorted(settings.names("backward"), key=lambda name: name != PLAIN)
    ]


def _row(axis: str, place: int, name: str, found: list[Measurement]) -> dict[str, Any]:
    return {
        axis: place,
        "backward": name,
        "peak MiB": mib(value(found, name, "above")),
        "s": value(found, name, "seconds"),
        f"memory, {PLAIN} / it": ratio(found, PLAIN, name, "above"),
        f"time, it / {PLAIN}": ratio(found, name, PLAIN, "seconds"),
    }


def _slopes(axis: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """MiB that one more layer, or a thousand more tokens, take: the least-squares line through the peaks."""
    each, unit = (1000, "1,000 tokens") if axis == "tokens" else (1, "layer")
    found = []
    for name in dict.fromkeys(row["backward"] for row in rows):
        points = [(row[axis], row["peak MiB"]) for row in rows if row["backward"] == name and row["peak MiB"]]
        if len(points) > 1:
            found.append({"backward": name, f"MiB for each {unit}": each * slope(points)})
    return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the least-squares line through points of at least two different abscissas."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)

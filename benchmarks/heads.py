"""Section `heads`: memory and time of every head, against full logits and against the head's own two products."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.measurement import Contender, Measurement, ratio, value
from benchmarks.report import Report, Table, mib
from benchmarks.settings import Settings

if TYPE_CHECKING:
    import mlx.core as mx

    from mortice.model import Output

PLAIN = "dense"
LIBRARIES = ("mlx", "numpy")
"""Which can multiply: numpy brings a BLAS of its own."""
COPIES = 4
"""Arrays of full logits that `dense` holds at once, at most."""


def run(settings: Settings) -> Report:
    vocabularies = [8192, 32_768] if settings.quick else [32_768, 131_072, 262_144]
    counts = [256] if settings.quick else [512, 2048, 8192]
    width = 256 if settings.quick else settings.width
    report = Report(
        "heads",
        "Heads",
        "One scoring of M tokens with its unit gradient. Peak: above the inputs. Time: of that call, behind one of 64 "
        "tokens and 1,024 entries. The two products are logits `x @ W.T` and `p @ W` in the tiles that flash-cce "
        "takes, and nothing else, by MLX and by numpy.",
        {"hidden size": width, "dtype": "float32"},
    )
    names = [s.name for s in settings.plugins.registry.all("head") if "values" not in getattr(s.load(), "provides", ())]
    rows: list[dict[str, Any]] = []
    for tokens in counts:
        for vocab in vocabularies:
            needed = COPIES * tokens * vocab * 4
            heads = [name for name in names if name != PLAIN or needed <= settings.memory_limit]
            if PLAIN not in heads:
                report.notes.append(f"{PLAIN} at M {tokens:,}, V {vocab:,} is left out: about {needed / 1e9:.0f} GB.")
            shape = {"tokens": tokens, "vocab": vocab, "width": width}
            scored = shape | {"cache_limit": settings.cache_limit}
            contenders = [
                *(Contender(name, "benchmarks.heads:score", scored | {"head": name}) for name in heads),
                *(Contender(_products(l), "benchmarks.heads:products", shape | {"library": l}) for l in LIBRARIES),
            ]
            found = settings.measure("heads", {"M": tokens, "V": vocab}, contenders)
            report.measurements += found
            rows += [_row(tokens, vocab, name, found) for name in heads]
    report.tables += [Table("Heads", rows), Table("Peak from the smallest vocabulary to the largest", _growth(rows))]
    return report


def _products(library: str) -> str:
    return f"two products, {library}"


def _row(tokens: int, vocab: int, name: str, found: list[Measurement]) -> dict[str, Any]:
    return {
        "M": tokens,
        "V": vocab,
        "head": name,
        "peak MiB": mib(value(found, name, "peak")),
        "s": value(found, name, "seconds"),
        f"memory, {PLAIN} / it": ratio(found, PLAIN, name, "peak"),
        f"time, {PLAIN} / it": ratio(found, PLAIN, name, "seconds"),
        **{f"time, it / {_products(l)}": ratio(found, name, _products(l), "seconds") for l in LIBRARIES},
    }


def _growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much more a head takes at the largest vocabulary that it ran at: 1 is flat."""
    found = []
    for tokens, name in dict.fromkeys((row["M"], row["head"]) for row in rows):
        own = [row for row in rows if (row["M"], row["head"]) == (tokens, name) and row["peak MiB"]]
        if len(own) > 1:
            first, last = own[0], own[-1]
            grown = last["peak MiB"] / first["peak MiB"]
            found.append(
                {"head": name, "M": tokens, "V": f"{first['V']:,} to {last['V']:,}", "largest / smallest": grown}
            )
    return found


def score(head: str, tokens: int, vocab: int, width: int, cache_limit: int) -> dict[str, Any]:
    """Peak bytes above the inputs, and seconds, of one scoring with its unit gradient."""
    import mlx.core as mx

    from benchmarks.losses import plugins
    from benchmarks.memory import PeakMeter

    mx.set_cache_limit(cache_limit)
    strategy = plugins().get("head", head).load()()

    def call(hidden: mx.array, targets: mx.array, output: Output) -> None:
        scores = strategy.score(hidden, targets, output, grad=True)
        mx.eval(scores.logprobs, scores.dhidden)

    call(*_inputs(64, 1024, width))
    inputs = _inputs(tokens, vocab, width)
    meter = PeakMeter()
    start = time.perf_counter()
    call(*inputs)
    return {"seconds": time.perf_counter() - start, **meter.read()}


def products(library: str, tokens: int, vocab: int, width: int) -> dict[str, Any]:
    """Seconds of the two products of every tile, by `mlx` or `numpy`."""
    from mortice.sizes import parse_size
    from mortice_plugins.heads.flash_cce import TILE_MEMORY
    from mortice_plugins.heads.tiling import TileCost, choose_tile

    call = {"mlx": _mlx_products, "numpy": _numpy_products}[library]
    tile = choose_tile(parse_size(TILE_MEMORY), tokens, vocab, TileCost(width))
    for hidden, _, output in (_inputs(64, 1024, width), _inputs(tokens, vocab, width)):
        start = time.perf_counter()
        call(hidden, output.weight, tile)
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "tile": tile}


def _inputs(tokens: int, vocab: int, width: int) -> tuple[mx.array, mx.array, Output]:
    import mlx.core as mx

    from mortice.model import Output

    mx.random.seed(0)
    hidden = mx.random.normal((tokens, width))
    targets = mx.random.randint(0, vocab, (tokens,))
    output = Output(mx.random.normal((vocab, width)) * 0.05, "head.weight")
    mx.eval(hidden, targets, output.weight)
    return hidden, targets, output


def _mlx_products(hidden: mx.array, weight: mx.array, tile: tuple[int, int]) -> None:
    import mlx.core as mx

    for start in range(0, weight.shape[0], tile[1]):
        rows = weight[start : start + tile[1]]
        for at in range(0, hidden.shape[0], tile[0]):
            mx.eval((hidden[at : at + tile[0]] @ rows.T) @ rows)


def _numpy_products(hidden: mx.array, weight: mx.array, tile: tuple[int, int]) -> None:
    import numpy as np

    h, w = np.asarray(hidden), np.asarray(weight)
    scratch, product = np.empty(tile[0] * tile[1], np.float32), np.empty((tile[0], h.shape[1]), np.float32)
    for start in range(0, len(w), tile[1]):
        rows = w[start : start + tile[1]]
        for at in range(0, len(h), tile[0]):
            x = h[at : at + tile[0]]
            logits = np.matmul(x, rows.T, out=scratch[: len(x) * len(rows)].reshape(len(x), len(rows)))
            np.matmul(logits, rows, out=product[: len(x)])

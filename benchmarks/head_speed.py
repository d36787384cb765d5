"""Time of the heads against the two matrix products that no head can do without.

    python benchmarks/head_speed.py [--tokens 512 1024 2048] [--width 576 1024] [--vocab 32768 49152] [--one-thread]

The products are numpy's, on the tiles that `flash-cce` takes: logits from hidden states and output rows, and weights
times output rows, with nothing between them. Every repeat runs the products and all heads, one after the other; a cell
is the median over the repeats of head / products. `--one-thread` gives every BLAS one thread and counts processor time
instead of wall time, for machines that have other work to do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from mortice import blas
from mortice.sizes import parse_size

SETTLE = 0.3
"""Seconds; threads of a BLAS spin for up to 0.2 after a product and slow the next one where that uses another BLAS."""
HEADS = ("flash-cce", "flash-cce, mlx", "flash-cce, traced", "chunked", "chunked, traced")


def scoring(name: str, hidden: Any, targets: Any, output: Any) -> Callable[[], None]:
    """One scoring with its unit gradient."""
    import mlx.core as mx

    from mortice_plugins.heads.chunked import Chunked
    from mortice_plugins.heads.flash_cce import FlashCCE

    kind, _, mode = name.partition(", ")
    head: Any = Chunked() if kind == "chunked" else FlashCCE(backend="mlx" if mode else "auto")

    def run() -> None:
        scores = head.score(hidden, targets, output, grad=True, traced=mode == "traced")
        mx.eval(scores.logprobs, scores.dhidden)

    return run


def products(hidden: Any, output: Any) -> tuple[Callable[[], None], tuple[int, int]]:
    """The two products of every tile, and the tile."""
    import numpy as np

    from mortice_plugins.heads import numpy_tiles
    from mortice_plugins.heads.flash_cce import TILE_MEMORY
    from mortice_plugins.heads.tiling import choose_tile, spans

    h, w = np.asarray(hidden), np.asarray(output.weight)
    cost = numpy_tiles.cost(hidden, output, grad=True, entropy=False)
    tile = choose_tile(parse_size(TILE_MEMORY), len(h), len(w), cost)
    z, e = np.ones(tile, np.float32), np.empty((tile[0], h.shape[1]), np.float32)

    def run() -> None:
        for low, high in spans(len(w), tile[1]):
            for start, stop in spans(len(h), tile[0]):
                block = z.reshape(-1)[: (stop - start) * (high - low)].reshape(stop - start, high - low)
                np.matmul(h[start:stop], w[low:high].T, out=block)
                np.matmul(block, w[low:high], out=e[: stop - start])

    return run, tile


def cell(
    tokens: int, width: int, vocab: int, heads: list[str], repeats: int, clock: Callable[[], float]
) -> str:  # fmt: skip
    """One line of the table."""
    import mlx.core as mx

    from mortice.model import Output

    mx.random.seed(0)
    hidden = mx.random.normal((tokens, width))
    targets = mx.random.randint(0, vocab, (tokens,))
    output = Output(mx.random.normal((vocab, width)) * 0.05, "head.weight")
    mx.eval(hidden, targets, output.weight)
    plain, tile = products(hidden, output)
    runs = [plain, *(scoring(name, hidden, targets, output) for name in heads)]
    seconds: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for run, times in zip(runs, seconds):
            time.sleep(SETTLE)
            start = clock()
            run()
            if repeat:  # the first one warms up
                times.append(clock() - start)
    ratios = [statistics.median(t / p for t, p in zip(times, seconds[0])) for times in seconds[1:]]
    shape = f"{tokens:,} × {width:,} × {vocab:,} | {tile[0]:,} × {tile[1]:,}"
    return f"| {shape} | {statistics.median(seconds[0]):.3f} | " + " | ".join(f"{r:.2f}" for r in ratios) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--width", type=int, nargs="+", default=[576, 1024])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_768, 49_152])
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one-thread", action="store_true")
    args = parser.parse_args()
    if args.one_thread:  # before any BLAS is loaded
        os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    blas.load()
    clock = time.process_time if args.one_thread else time.perf_counter
    print("| tokens × width × vocabulary | tile | products, s | " + " | ".join(args.heads) + " |")
    print("|---|---|" + "---:|" * (len(args.heads) + 1))
    for width in args.width:
        for vocab in args.vocab:
            for tokens in args.tokens:
                print(cell(tokens, width, vocab, args.heads, args.repeats, clock), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

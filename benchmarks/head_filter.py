"""What `eps` of `flash-cce` costs in accuracy and saves in time, on made-up confident tokens and on a real model.

    python benchmarks/head_filter.py [--model FOLDER --text FILE.jsonl] [--tokens 1024] [--repeats 5] [--one-thread]

Rows of one table come from one process, with all values of `eps` interleaved; times are medians, relative to eps = 0.
The error is ‖dhidden − exact‖ / ‖exact‖ over all scored tokens, where exact is eps = 0; log-probabilities are compared
too and must be equal but for rounding (the tile is another one). The text is JSON Lines of `messages`; every token of
it is scored. `--one-thread` gives every BLAS one thread and counts processor time, for machines that have other work to
do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mortice import blas

EPSILONS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3)


def confident(tokens: int, width: int = 576, vocab: int = 49_152) -> tuple[Any, Any, Any]:
    """(hidden, targets, output): logits of standard deviation 2, targets from hardly to almost surely predicted."""
    import mlx.core as mx
    import numpy as np

    from mortice.model import Output

    rng = np.random.default_rng(0)
    weight = rng.normal(size=(vocab, width)).astype(np.float32) / np.sqrt(width)
    targets = rng.integers(0, vocab, tokens)
    noise = 2.0 * rng.normal(size=(tokens, width))
    toward = weight[targets] / np.square(weight[targets]).sum(axis=1, keepdims=True)
    hidden = noise + rng.uniform(8, 24, (tokens, 1)) * toward  # an even chance is at about 13
    return (
        mx.array(hidden.astype(np.float32)),
        mx.array(targets.astype(np.int32)),
        Output(mx.array(weight), "head.weight"),
    )


def real(folder: Path, text: Path, tokens: int) -> tuple[Any, Any, Any]:
    """(hidden, targets, output) of a model on the first records of a file, in rows of at most 512 tokens."""
    import mlx.core as mx

    from mortice.batch import Row, Span
    from mortice.context import SpanContext
    from mortice.objective import hidden_states
    from mortice.plugins import load_plugins
    from mortice.pretrained import load

    pretrained = load(folder, plugins=load_plugins())
    tokenizer = pretrained.tokenizer
    if tokenizer is None:
        raise SystemExit(f"{folder} has no tokenizer")
    hidden: list[Any] = []
    targets: list[int] = []
    for line in text.read_text("utf-8").splitlines():
        ids = tokenizer.encode(tokenizer.apply_chat_template(json.loads(line)["messages"]))[:513]
        row = Row(ids[:-1], (Span(0, len(ids) - 1, None, 0),), [], [], [], [], [])
        hidden += hidden_states(pretrained.model, [SpanContext(row)])
        targets += ids[1:]
        if len(targets) >= tokens:
            break
    return mx.concatenate(hidden)[:tokens], mx.array(targets[:tokens]), pretrained.model.output


def table(hidden: Any, targets: Any, output: Any, repeats: int, clock: Callable[[], float]) -> str:
    import mlx.core as mx
    import numpy as np

    from mortice_plugins.heads.flash_cce import FlashCCE

    mx.eval(hidden, targets, output.weight)
    heads = [FlashCCE(eps=eps) for eps in EPSILONS]
    found = [head.score(hidden, targets, output, grad=True) for head in heads]
    seconds: list[list[float]] = [[] for _ in heads]
    for _ in range(repeats):
        for head, times in zip(heads, seconds):
            start = clock()
            head.score(hidden, targets, output, grad=True)
            times.append(clock() - start)
    exact, plain = np.asarray(found[0].dhidden), statistics.median(seconds[0])
    lines = ["| eps | error of dhidden | time / eps = 0 | seconds |", "|---|---:|---:|---:|"]
    for eps, scores, times in zip(EPSILONS, found, seconds):
        if not mx.allclose(scores.logprobs, found[0].logprobs, rtol=1e-6, atol=1e-5).item():
            raise SystemExit(f"eps = {eps:g} moved log-probabilities")
        error = np.linalg.norm(np.asarray(scores.dhidden) - exact) / np.linalg.norm(exact)
        median = statistics.median(times)
        lines.append(f"| {eps:g} | {error:.1e} | {median / plain:.2f} | {median:.3f} |")
    p = np.exp(np.asarray(found[0].logprobs))
    heading = f"{len(p)} tokens, width {hidden.shape[1]}, vocabulary {output.vocab:,}; "
    return f"{heading}target's probability: median {np.median(p):.2f}, mean {p.mean():.2f}\n\n" + "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", type=Path, help="model folder")
    parser.add_argument("--text", type=Path, help="JSON Lines of messages")
    parser.add_argument("--one-thread", action="store_true")
    args = parser.parse_args()
    if (args.model is None) != (args.text is None):
        parser.error("--model and --text belong together")
    if args.one_thread:  # before any BLAS is loaded
        os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    blas.load()
    clock = time.process_time if args.one_thread else time.perf_counter
    print("made up:", table(*confident(args.tokens), args.repeats, clock), sep="\n", flush=True)
    if args.model:
        print(f"\n{args.model.name}:", table(*real(args.model, args.text, args.tokens), args.repeats, clock), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

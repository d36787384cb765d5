"""Full rows of logits for a chunk of tokens at a time: `dense`, with the memory of one chunk.

A chunk holds a few arrays `[chunk, V]` of float32, whatever the number of scored tokens. The unit gradient is written
out, so that no trace keeps the logits of a chunk for later. Where products go through float rows of the output matrix
(on the CPU, a matrix that is not float32), these are made a block of the vocabulary at a time, once for each chunk and
once more for its gradient: there `flash-cce`, which makes them once, is the better choice. What it leaves out: tiles of
the vocabulary inside a chunk; see `flash_cce`.
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
from attrs import evolve, frozen

from mortice.batch import Gradients, TokenLogprobs
from mortice.model import Output
from mortice.options import ge, option
from mortice_plugins.heads.mlx_tiles import Barrier, Running, advance, joined, nothing, sloped
from mortice_plugins.heads.tiling import spans

ROWS = 8192
"""Vocabulary entries whose output rows are in use at a time."""


@frozen
class Chunked:
    """Full logits of a few tokens at a time: simple, with the memory of one chunk."""

    provides: ClassVar = frozenset({"entropy"})
    leaner: ClassVar = {"chunk": (512, 256, 128, 64, 32, 16)}

    chunk: int = option(128, help="tokens whose full rows of logits are held at a time", validator=ge(1))

    def score(
        self, hidden: mx.array, targets: mx.array, output: Output, *, grad: bool = False,
        entropy: bool = False, traced: bool = False,
    ) -> TokenLogprobs:  # fmt: skip
        """Log-probability of each target; `dhidden` is `Σ_v (δ_vy − p_v) · slope_v · W_v`."""
        count, width = hidden.shape
        if not count:
            return nothing(width, grad=grad, entropy=entropy)
        barrier = Barrier(traced=traced)
        found = []
        for start, stop in spans(count, self.chunk):
            y = targets[start:stop]
            nothing_yet = Running.start(stop - start, entropy=entropy)
            running, weights, _ = advance(_project(hidden[start:stop], output, barrier), y, nothing_yet, output)
            barrier.done([*running.arrays(), weights])  # the raw logits are free from here on
            scores = running.scores(y, output, _pull(weights, output, barrier) if grad else None)
            barrier.done([x for x in (scores.logprobs, scores.lse, scores.entropy, scores.dhidden) if x is not None])
            found.append(scores)
        return joined(found)

    def output_gradients(
        self, hidden: mx.array, targets: mx.array, output: Output, dlogprobs: mx.array, lse: mx.array, *,
        traced: bool = False,
    ) -> Gradients:  # fmt: skip
        """Gradients of the output's parameters, in a second pass: `d loss / d raw logits` to `output.accumulate`."""
        gradients = {name: mx.zeros(value.shape) for name, value in output.parameters().items()}
        barrier = Barrier(traced=traced)
        for start, stop in spans(hidden.shape[0], self.chunk) if gradients else ():
            h = hidden[start:stop]
            raw = _project(h, output, barrier)  # [c, V]
            g = dlogprobs[start:stop, None] * _dlogits(raw, targets[start:stop], output, lse[start:stop])
            for low, high in spans(output.vocab, ROWS):
                output.accumulate(barrier.after(h), g[:, low:high], low, high, gradients)
                barrier.done(list(gradients.values()))
        return gradients


def _dlogits(raw: mx.array, targets: mx.array, output: Output, lse: mx.array) -> mx.array:
    """d logprob / d raw logits, `[c, V]`."""
    hit = targets[:, None] == mx.arange(output.vocab)
    return sloped(hit - mx.exp(output.finish(raw) - lse[:, None]), raw, output)


def _project(hidden: mx.array, output: Output, barrier: Barrier) -> mx.array:
    """Raw logits `[c, V]`, the output rows a block at a time."""
    parts: list[mx.array] = []
    for start, stop in spans(output.vocab, ROWS):
        parts.append(_after(output, barrier).project(barrier.after(hidden), start, stop))
        barrier.done([parts[-1]])
    return mx.concatenate(parts, axis=1)


def _pull(g: mx.array, output: Output, barrier: Barrier) -> mx.array:
    """`g [c, V]` times the output rows, a block at a time: `[c, D]`."""
    total: mx.array | None = None
    for start, stop in spans(output.vocab, ROWS):
        part = _after(output, barrier).pull(g[:, start:stop], start, stop)
        total = part if total is None else total + part
        barrier.done([total])
    assert total is not None
    return total


def _after(output: Output, barrier: Barrier) -> Output:
    """The same output, whose rows are not made before the last block is done."""
    return evolve(output, weight=barrier.after(output.weight))

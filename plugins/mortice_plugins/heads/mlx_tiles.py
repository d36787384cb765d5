"""The tile loop of `flash-cce` in MLX: eager with `mx.eval` between tiles, or traced with `mx.depends`.

Either barrier lets a tile start only after the one before it is done, so that one tile is alive at a time. Inside a
transform `mx.eval` would keep every tile instead; a chain of dependencies holds there too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import mlx.core as mx
from attrs import evolve, frozen

from mortice.batch import Gradients, TokenLogprobs
from mortice.model import Output


@frozen(eq=False)
class Running:
    """What is known of a tile of tokens after some blocks of the vocabulary; float32."""

    peak: mx.array
    """`[t]` maximum of the logits."""
    total: mx.array
    """`[t]` Σ e^(z − peak)."""
    target: mx.array
    """`[t]` raw logit of the target."""
    spread: mx.array | None
    """`[t]` Σ e^(z − peak) (z − peak), where entropy is wanted."""

    @classmethod
    def start(cls, count: int, *, entropy: bool) -> Running:
        zeros = mx.zeros((count,))
        return cls(mx.full((count,), mx.finfo(mx.float32).min), zeros, zeros, zeros if entropy else None)

    def arrays(self) -> list[mx.array]:
        return [a for a in (self.peak, self.total, self.target, self.spread) if a is not None]


class Advance(Protocol):
    """`advance`, or what agrees with it."""

    def __call__(
        self, raw: mx.array, place: mx.array, before: Running, output: Output, /
    ) -> tuple[Running, mx.array, mx.array]: ...


def advance(raw: mx.array, place: mx.array, before: Running, output: Output) -> tuple[Running, mx.array, mx.array]:
    """One more block: from its raw logits `[t, v]` and what was known before to what is known now.

    `place [t]` is where in the block each target stands; outside of it for most. Gives also the weights
    `[t, v]` e^(z − peak) · slope of the block's output rows, and the factor `[t]` that brings what was summed under the
    old maximum to the new one. Everything between the two products of a tile is here.
    """
    z = output.finish(raw)
    peak = mx.maximum(before.peak, z.max(axis=1))
    shift = before.peak - peak
    rescale = mx.exp(shift)
    z = z - peak[:, None]
    weights = mx.exp(z)
    spread = before.spread
    if spread is not None:
        spread = rescale * (spread + shift * before.total) + (weights * z).sum(axis=1)
    total = rescale * before.total + weights.sum(axis=1)
    now = Running(peak, total, _pick(raw, place, before.target), spread)
    return now, _sloped(weights, raw, output), rescale


def _pick(raw: mx.array, place: mx.array, otherwise: mx.array) -> mx.array:
    """The raw logits at `place`, `otherwise` where that is outside of the block."""
    inside = (place >= 0) & (place < raw.shape[1])
    place = mx.where(inside, place, 0)
    return mx.where(inside, mx.take_along_axis(raw, place[:, None], axis=1).squeeze(1), otherwise)


class _Tokens:
    """A tile of tokens on its way through the vocabulary."""

    def __init__(self, hidden: mx.array, targets: mx.array, epilogue: Advance, *, grad: bool, entropy: bool) -> None:
        self._hidden, self._targets, self._epilogue = hidden, targets, epilogue
        self._running = Running.start(len(targets), entropy=entropy)
        self._expected = mx.zeros(hidden.shape) if grad else None  # [t, D] Σ e^(z − peak) slope W

    def add(self, block: _Block, barrier: _Barrier) -> None:
        raw = block.project(barrier.after(self._hidden))  # [t, v]
        place = self._targets - block.start
        self._running, weights, rescale = self._epilogue(raw, place, self._running, block.output)
        left = self._running.arrays()
        if self._expected is not None:
            self._expected = rescale[:, None] * self._expected + block.pull(weights)
            left.append(self._expected)
        barrier.done(left)

    def scores(self, output: Output) -> TokenLogprobs:
        """What all blocks together say."""
        running = self._running
        log_total = mx.log(running.total)
        dhidden = None
        if self._expected is not None:
            own = output.slope(running.target)
            dhidden = own[:, None] * output.take(self._targets) - self._expected / running.total[:, None]
        return TokenLogprobs(
            (output.finish(running.target) - running.peak) - log_total,
            lse=running.peak + log_total,
            entropy=None if running.spread is None else log_total - running.spread / running.total,
            dhidden=dhidden,
        )


@frozen(eq=False)
class _Block:
    """A block of the vocabulary. Where products go through float rows, these are made once for all of its tiles."""

    output: Output
    start: int
    stop: int
    rows: mx.array | None
    """`[v, D]` float32, or None where a GPU multiplies by the quantized rows."""

    @classmethod
    def of(cls, output: Output, start: int, stop: int) -> _Block:
        direct = output.quantized and mx.default_device() != mx.cpu
        return cls(output, start, stop, None if direct else output.rows(start, stop))

    def project(self, hidden: mx.array) -> mx.array:
        if self.rows is None:
            return self.output.project(hidden, self.start, self.stop)
        return hidden.astype(mx.float32) @ self.rows.T

    def pull(self, g: mx.array) -> mx.array:
        return self.output.pull(g, self.start, self.stop) if self.rows is None else g @ self.rows


class _Barrier:
    """Keeps one tile alive at a time."""

    def __init__(self, *, traced: bool) -> None:
        self._traced = traced
        self._last: Sequence[mx.array] = ()

    def done(self, arrays: Sequence[mx.array]) -> None:
        """These are what the tile leaves behind."""
        if self._traced:
            self._last = arrays
        else:
            mx.eval(arrays)

    def after(self, x: mx.array) -> mx.array:
        """`x`, once the last tile is done."""
        return mx.depends(x, self._last) if self._last else x


def score(
    hidden: mx.array, targets: mx.array, output: Output, tile: tuple[int, int], *,
    grad: bool, entropy: bool, traced: bool, epilogue: Advance = advance,
) -> TokenLogprobs:  # fmt: skip
    """Log-probabilities of `targets [M]` from `hidden [M, D]`, in tiles of (tokens, vocabulary)."""
    count, width = hidden.shape
    if not count:
        return _nothing(width, grad=grad, entropy=entropy)
    barrier = _Barrier(traced=traced)
    tokens = [
        _Tokens(hidden[start:stop], targets[start:stop], epilogue, grad=grad, entropy=entropy)
        for start, stop in _spans(count, tile[0])
    ]
    for block in _blocks(output, tile[1], barrier):
        for some in tokens:
            some.add(block, barrier)
    found = [some.scores(output) for some in tokens]

    def joined(name: str) -> mx.array:
        return mx.concatenate([getattr(scores, name) for scores in found])

    return TokenLogprobs(
        joined("logprobs"),
        lse=joined("lse"),
        entropy=joined("entropy") if entropy else None,
        dhidden=joined("dhidden") if grad else None,
    )


def output_gradients(
    hidden: mx.array, targets: mx.array, output: Output, dlogprobs: mx.array, lse: mx.array, tile: tuple[int, int], *,
    traced: bool,
) -> Gradients:  # fmt: skip
    """Gradients of the output's parameters: `d loss / d raw logits` of each tile, handed to `output.accumulate`."""
    gradients = {name: mx.zeros(value.shape) for name, value in output.parameters().items()}
    tiles = list(_spans(hidden.shape[0], tile[0]))
    barrier = _Barrier(traced=traced)
    for block in _blocks(output, tile[1], barrier) if tiles else ():
        places = mx.arange(block.start, block.stop)
        for start, stop in tiles:
            h = barrier.after(hidden[start:stop])
            raw = block.project(h)  # [t, v]
            p = mx.exp(output.finish(raw) - lse[start:stop, None])
            hit = targets[start:stop, None] == places
            g = _sloped(dlogprobs[start:stop, None] * (hit - p), raw, output)
            output.accumulate(h, g, block.start, block.stop, gradients)
            barrier.done(list(gradients.values()))
    return gradients


def _sloped(x: mx.array, raw: mx.array, output: Output) -> mx.array:
    """x · slope, `[t, v]`; no array is made of a slope that is 1 everywhere."""
    return x if output.softcap is None and output.temperature == 1.0 else x * output.slope(raw)


def _spans(count: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, size):
        yield start, min(start + size, count)


def _blocks(output: Output, size: int, barrier: _Barrier) -> Iterator[_Block]:
    """The blocks of the vocabulary; the float rows of each are made after the last tile of the one before."""
    for start, stop in _spans(output.vocab, size):
        yield _Block.of(evolve(output, weight=barrier.after(output.weight)), start, stop)


def _nothing(width: int, *, grad: bool, entropy: bool) -> TokenLogprobs:
    none = mx.zeros((0,))
    return TokenLogprobs(
        none, lse=none, entropy=none if entropy else None, dhidden=mx.zeros((0, width)) if grad else None
    )

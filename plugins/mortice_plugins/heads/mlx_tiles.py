"""The tile loop of `flash-cce` in MLX: eager with `mx.eval` between tiles, or traced with `mx.depends`.

Either barrier lets a tile start only after the one before it is done, so that one tile is alive at a time. Inside a
transform `mx.eval` would keep every tile instead; a chain of dependencies holds there too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np
from attrs import evolve, frozen

from mortice.batch import Gradients, TokenLogprobs
from mortice.linear import on_cpu
from mortice.model import Output
from mortice_plugins.heads.tiling import FILTER_BLOCK, LOG_HIGHEST, TileCost, spans, worth_gathering


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

    def scores(
        self, targets: mx.array, output: Output, expected: mx.array | None, missed: mx.array | None = None
    ) -> TokenLogprobs:  # fmt: skip
        """What all blocks together say; `expected [t, D]` is Σ e^(z − peak) slope W, where a gradient is wanted.

        `missed [t]` marks tokens in whose `expected` the target's own row is not.
        """
        log_total = mx.log(self.total)
        logprobs = (output.finish(self.target) - self.peak) - log_total
        dhidden = None
        if expected is not None:
            own = output.slope(self.target)
            if missed is not None:
                own = own * (1.0 - mx.where(missed, mx.exp(logprobs), 0.0))
            dhidden = own[:, None] * output.take(targets) - expected / self.total[:, None]
        return TokenLogprobs(
            logprobs,
            lse=self.peak + log_total,
            entropy=None if self.spread is None else log_total - self.spread / self.total,
            dhidden=dhidden,
        )


class Advance(Protocol):
    """`advance`, or what agrees with it."""

    def __call__(
        self, raw: mx.array, place: mx.array, before: Running, output: Output, /
    ) -> tuple[Running, mx.array, mx.array]: ...


def advance(
    raw: mx.array, place: mx.array, before: Running, output: Output
) -> tuple[Running, mx.array, mx.array]:  # fmt: skip
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
    return now, sloped(weights, raw, output), rescale


def _pick(raw: mx.array, place: mx.array, otherwise: mx.array) -> mx.array:
    """The raw logits at `place`, `otherwise` where that is outside of the block."""
    inside = (place >= 0) & (place < raw.shape[1])
    place = mx.where(inside, place, 0)
    return mx.where(inside, mx.take_along_axis(raw, place[:, None], axis=1).squeeze(1), otherwise)


def sloped(x: mx.array, raw: mx.array, output: Output) -> mx.array:
    """x · slope, `[t, v]`; no array is made of a slope that is 1 everywhere."""
    return x if output.softcap is None and output.temperature == 1.0 else x * output.slope(raw)


class _Tokens:
    """A tile of tokens on its way through the vocabulary."""

    def __init__(
        self, hidden: mx.array, targets: mx.array, output: Output, epilogue: Advance, *,
        grad: bool, entropy: bool, eps: float,
    ) -> None:  # fmt: skip
        self._epilogue = epilogue
        self._hidden, self._targets = hidden, targets
        self._running = Running.start(len(targets), entropy=entropy)
        self._expected = mx.zeros(hidden.shape) if grad else None  # [t, D] Σ e^(z − peak) slope W
        self._filter = _Filter(hidden, targets, output, eps) if grad and eps else None

    def add(self, block: _Block, barrier: Barrier) -> None:
        raw = block.project(barrier.after(self._hidden))  # [t, v]
        place = self._targets - block.start
        self._running, weights, rescale = self._epilogue(raw, place, self._running, block.output)
        left = self._running.arrays()
        if self._expected is not None:
            self._expected = rescale[:, None] * self._expected
            if self._filter is None:
                self._expected = self._expected + block.pull(weights)
            else:
                self._expected = self._filter.pull(block, weights, place, self._running, self._expected)
            left.append(self._expected)
        barrier.done(left)

    def scores(self, output: Output) -> TokenLogprobs:
        missed = None if self._filter is None else mx.array(self._filter.missed)
        return self._running.scores(self._targets, output, self._expected, missed)


class _Filter:
    """Which tokens have anything to gain from a block of output rows, and the product for those alone. Eager only."""

    def __init__(self, hidden: mx.array, targets: mx.array, output: Output, eps: float) -> None:
        raw = (hidden.astype(mx.float32) * output.take(targets)).sum(axis=1)
        self._target = output.finish(raw)  # [t] z_y, a lower bound of the normaliser that is known from the start
        self._eps = eps / output.temperature  # weights carry 1/T
        mx.eval(self._target)
        self.missed = np.zeros(len(targets), bool)
        """`[t]` whether the target's own row was left out with its block."""

    def pull(
        self, block: _Block, weights: mx.array, place: mx.array, running: Running, expected: mx.array
    ) -> mx.array:  # fmt: skip
        """`expected [t, D]` with `weights [t, v]` times the rows of the block, without what is not likely."""
        least = mx.exp(mx.minimum(self._target - running.peak, LOG_HIGHEST))
        floor = self._eps * mx.maximum(running.total, least)  # [t]
        parts = list(spans(weights.shape[1], FILTER_BLOCK))
        likely = mx.stack([weights[:, start:stop].max(axis=1) > floor for start, stop in parts])
        mx.eval(weights, likely, expected, running.arrays())
        where = np.asarray(place)
        for (start, stop), kept in zip(parts, np.asarray(likely)):
            rows = block.part(start, stop)
            if not worth_gathering(np.count_nonzero(kept), len(kept)):
                expected = expected + rows.pull(weights[:, start:stop])
                continue
            self.missed |= ~kept & (where >= start) & (where < stop)
            if kept.any():
                index = mx.array(np.flatnonzero(kept))
                expected = expected.at[index].add(rows.pull(weights[index, start:stop]))
            mx.eval(expected)
        return expected


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
        direct = output.quantized and not on_cpu()
        return cls(output, start, stop, None if direct else output.rows(start, stop))

    def project(self, hidden: mx.array) -> mx.array:
        if self.rows is None:
            return self.output.project(hidden, self.start, self.stop)
        return hidden.astype(mx.float32) @ self.rows.T

    def pull(self, g: mx.array) -> mx.array:
        return self.output.pull(g, self.start, self.stop) if self.rows is None else g @ self.rows

    def part(self, start: int, stop: int) -> _Block:
        """Entries `start` to `stop` of the block."""
        rows = None if self.rows is None else self.rows[start:stop]
        return _Block(self.output, self.start + start, self.start + stop, rows)


class Barrier:
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


def cost(
    hidden: mx.array, output: Output, *, grad: bool, entropy: bool, filtered: bool = False, traced: bool = False
) -> TileCost:  # fmt: skip
    """What a tile of `score` holds, as measured: inside a trace MLX allocates several steps ahead of what it runs."""
    extras = int(entropy) + int(output.softcap is not None or output.temperature != 1.0)
    return TileCost(hidden.shape[1], logits=6 + 3 * extras if traced else 2 + 2 * extras, filtered=filtered)


def score(
    hidden: mx.array, targets: mx.array, output: Output, tile: tuple[int, int], *,
    grad: bool, entropy: bool, eps: float = 0.0, traced: bool, epilogue: Advance = advance,
) -> TokenLogprobs:  # fmt: skip
    """Log-probabilities of `targets [M]` from `hidden [M, D]`, in tiles of (tokens, vocabulary)."""
    barrier = Barrier(traced=traced)
    tokens = [
        _Tokens(hidden[start:stop], targets[start:stop], output, epilogue, grad=grad, entropy=entropy, eps=eps)
        for start, stop in spans(hidden.shape[0], tile[0])
    ]
    for block in _blocks(output, tile[1], barrier):
        for some in tokens:
            some.add(block, barrier)
    return joined([some.scores(output) for some in tokens])


def output_gradients(
    hidden: mx.array, targets: mx.array, output: Output, dlogprobs: mx.array, lse: mx.array, tile: tuple[int, int],
    into: Gradients, *, traced: bool,
) -> None:  # fmt: skip
    """Add the gradients of the output's parameters: `output.accumulate` gets `d loss / d raw logits` of each tile."""
    barrier = Barrier(traced=traced)
    for block in _blocks(output, tile[1], barrier):
        places = mx.arange(block.start, block.stop)
        for start, stop in spans(hidden.shape[0], tile[0]):
            h = barrier.after(hidden[start:stop])
            raw = block.project(h)  # [t, v]
            p = mx.exp(output.finish(raw) - lse[start:stop, None])
            hit = targets[start:stop, None] == places
            g = sloped(dlogprobs[start:stop, None] * (hit - p), raw, output)
            output.accumulate(h, g, block.start, block.stop, into)
            barrier.done(list(into.values()))


def _blocks(output: Output, size: int, barrier: Barrier) -> Iterator[_Block]:
    """The blocks of the vocabulary; the float rows of each are made after the last tile of the one before."""
    for start, stop in spans(output.vocab, size):
        yield _Block.of(evolve(output, weight=barrier.after(output.weight)), start, stop)


def joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """The scores of runs of tokens, one after the other."""

    def whole(name: str) -> mx.array | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else mx.concatenate(found)

    logprobs = whole("logprobs")
    assert logprobs is not None
    return TokenLogprobs(logprobs, lse=whole("lse"), entropy=whole("entropy"), dhidden=whole("dhidden"))


def nothing(width: int, *, grad: bool, entropy: bool) -> TokenLogprobs:
    """The scores of no tokens, for which MLX has no reductions."""
    none = mx.zeros((0,))
    return TokenLogprobs(
        none, lse=none, entropy=none if entropy else None, dhidden=mx.zeros((0, width)) if grad else None
    )

"""The tile loop of `flash-cce` in MLX: eager with `mx.eval` between tiles, or traced with `mx.depends`.

Either barrier lets a tile start only after the one before it is done, so that one tile is alive at a time. Inside a
transform `mx.eval` would keep every tile instead; a chain of dependencies holds there too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
from attrs import evolve, frozen

from mortice.batch import Gradients, TokenLogprobs
from mortice.model import Output


@frozen(eq=False)
class _Running:
    """What is known of a tile of tokens after some blocks of the vocabulary."""

    peak: mx.array
    """`[t]` maximum of the logits."""
    total: mx.array
    """`[t]` Σ e^(z − peak)."""
    target: mx.array
    """`[t]` raw logit of the target."""
    spread: mx.array | None
    """`[t]` Σ e^(z − peak) (z − peak)."""
    expected: mx.array | None
    """`[t, D]` Σ e^(z − peak) slope W."""

    @classmethod
    def start(cls, count: int, width: int, *, grad: bool, entropy: bool) -> _Running:
        zeros = mx.zeros((count,))
        lowest = mx.full((count,), mx.finfo(mx.float32).min)
        return cls(
            lowest, zeros, zeros, zeros if entropy else None, mx.zeros((count, width)) if grad else None
        )  # fmt: skip

    def arrays(self) -> list[mx.array]:
        return [a for a in (self.peak, self.total, self.target, self.spread, self.expected) if a is not None]

    def add(self, block: _Block, hidden: mx.array, targets: mx.array) -> _Running:
        """The same after one more block."""
        output = block.output
        raw = block.project(hidden)  # [t, v]
        z = output.finish(raw)
        peak = mx.maximum(self.peak, z.max(axis=1))
        shift = self.peak - peak
        rescale = mx.exp(shift)
        z = z - peak[:, None]
        weights = mx.exp(z)
        spread, expected = self.spread, self.expected
        if spread is not None:
            spread = rescale * (spread + shift * self.total) + (weights * z).sum(axis=1)
        if expected is not None:
            expected = rescale[:, None] * expected + block.pull(_sloped(weights, raw, output))
        total = rescale * self.total + weights.sum(axis=1)
        return _Running(peak, total, block.pick(raw, targets, self.target), spread, expected)

    def scores(self, targets: mx.array, output: Output) -> TokenLogprobs:
        """What all blocks together say."""
        log_total = mx.log(self.total)
        dhidden = None
        if self.expected is not None:
            slope = output.slope(self.target)[:, None]
            dhidden = slope * output.take(targets) - self.expected / self.total[:, None]
        return TokenLogprobs(
            (output.finish(self.target) - self.peak) - log_total,
            lse=self.peak + log_total,
            entropy=None if self.spread is None else log_total - self.spread / self.total,
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

    def pick(self, raw: mx.array, targets: mx.array, before: mx.array) -> mx.array:
        """The raw logits of those targets that lie in the block, `before` for the others."""
        place = targets - self.start
        inside = (place >= 0) & (place < self.stop - self.start)
        place = mx.where(inside, place, 0)
        return mx.where(inside, mx.take_along_axis(raw, place[:, None], axis=1).squeeze(1), before)


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


def score(
    hidden: mx.array, targets: mx.array, output: Output, tile: tuple[int, int], *,
    grad: bool, entropy: bool, traced: bool,
) -> TokenLogprobs:  # fmt: skip
    """Log-probabilities of `targets [M]` from `hidden [M, D]`, in tiles of (tokens, vocabulary)."""
    count, width = hidden.shape
    if not count:
        return nothing(width, grad=grad, entropy=entropy)
    tiles = [(hidden[start:stop], targets[start:stop]) for start, stop in spans(count, tile[0])]
    barrier = Barrier(traced=traced)
    running = [_Running.start(len(y), width, grad=grad, entropy=entropy) for _, y in tiles]
    for block in _blocks(output, tile[1], barrier):
        for i, (h, y) in enumerate(tiles):
            running[i] = running[i].add(block, barrier.after(h), y)
            barrier.done(running[i].arrays())
    found = [r.scores(y, output) for r, (_, y) in zip(running, tiles)]

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
    tiles = list(spans(hidden.shape[0], tile[0]))
    barrier = Barrier(traced=traced)
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


def spans(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of runs of at most `size` that cover `count`."""
    for start in range(0, count, size):
        yield start, min(start + size, count)


def _blocks(output: Output, size: int, barrier: Barrier) -> Iterator[_Block]:
    """The blocks of the vocabulary; the float rows of each are made after the last tile of the one before."""
    for start, stop in spans(output.vocab, size):
        yield _Block.of(evolve(output, weight=barrier.after(output.weight)), start, stop)


def nothing(width: int, *, grad: bool, entropy: bool) -> TokenLogprobs:
    """The scores of no tokens, for which MLX has no reductions."""
    none = mx.zeros((0,))
    return TokenLogprobs(
        none, lse=none, entropy=none if entropy else None, dhidden=mx.zeros((0, width)) if grad else None
    )

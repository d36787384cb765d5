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
from mortice_plugins.heads.kernels.tile import Epilogue, State, plain, sloped


@frozen(eq=False)
class _Running:
    """What is known of a tile of tokens after some blocks of the vocabulary."""

    state: State
    expected: mx.array | None
    """`[t, D]` Σ e^(z − peak) slope W."""

    @classmethod
    def start(cls, count: int, width: int, *, grad: bool, entropy: bool) -> _Running:
        return cls(State.start(count, entropy=entropy), mx.zeros((count, width)) if grad else None)

    def arrays(self) -> list[mx.array]:
        return [*self.state.arrays(), *([] if self.expected is None else [self.expected])]

    def add(self, block: _Block, hidden: mx.array, targets: mx.array, epilogue: Epilogue) -> _Running:
        """The same after one more block."""
        raw = block.project(hidden)  # [t, v]
        step = epilogue(self.state, raw, targets, block.start, block.output, grad=self.expected is not None)
        expected = self.expected
        if expected is not None:
            expected = step.rescale[:, None] * expected + block.pull(step.weights)
        return _Running(step.state, expected)

    def scores(self, targets: mx.array, output: Output) -> TokenLogprobs:
        """What all blocks together say."""
        peak, total, target, spread = self.state.peak, self.state.total, self.state.target, self.state.spread
        log_total = mx.log(total)
        dhidden = None
        if self.expected is not None:
            slope = output.slope(target)[:, None]
            dhidden = slope * output.take(targets) - self.expected / total[:, None]
        return TokenLogprobs(
            (output.finish(target) - peak) - log_total,
            lse=peak + log_total,
            entropy=None if spread is None else log_total - spread / total,
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
    grad: bool, entropy: bool, traced: bool, epilogue: Epilogue = plain,
) -> TokenLogprobs:  # fmt: skip
    """Log-probabilities of `targets [M]` from `hidden [M, D]`, in tiles of (tokens, vocabulary)."""
    count, width = hidden.shape
    if not count:
        return _nothing(width, grad=grad, entropy=entropy)
    tiles = [(hidden[start:stop], targets[start:stop]) for start, stop in _spans(count, tile[0])]
    barrier = _Barrier(traced=traced)
    running = [_Running.start(len(y), width, grad=grad, entropy=entropy) for _, y in tiles]
    for block in _blocks(output, tile[1], barrier):
        for i, (h, y) in enumerate(tiles):
            running[i] = running[i].add(block, barrier.after(h), y, epilogue)
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
    tiles = list(_spans(hidden.shape[0], tile[0]))
    barrier = _Barrier(traced=traced)
    for block in _blocks(output, tile[1], barrier) if tiles else ():
        places = mx.arange(block.start, block.stop)
        for start, stop in tiles:
            h = barrier.after(hidden[start:stop])
            raw = block.project(h)  # [t, v]
            p = mx.exp(output.finish(raw) - lse[start:stop, None])
            hit = targets[start:stop, None] == places
            g = sloped(dlogprobs[start:stop, None] * (hit - p), raw, output)
            output.accumulate(h, g, block.start, block.stop, gradients)
            barrier.done(list(gradients.values()))
    return gradients


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

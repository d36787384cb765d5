"""The tile loop of `flash-cce` in numpy, for MLX's CPU backend, whose `exp` and `tanh` are scalar.

It works on zero-copy views of evaluated arrays, in two scratch tiles, and agrees with `mlx_tiles`. It cannot run inside
a transform.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from mortice.batch import Gradients, TokenLogprobs
from mortice.model import Output


def score(
    hidden: mx.array, targets: mx.array, output: Output, tile: tuple[int, int], *, grad: bool, entropy: bool
) -> TokenLogprobs:
    """Log-probabilities of `targets [M]` from `hidden [M, D]`, in tiles of (tokens, vocabulary)."""
    h, y = _floats(hidden), np.asarray(targets)  # [M, D], [M]
    count, width = h.shape
    tiles = _Tiles(output, tile, count)

    peak = np.full(count, np.finfo(np.float32).min, np.float32)  # running maximum of the logits
    total = np.zeros(count, np.float32)  # Σ e^(z − peak)
    target = np.zeros(count, np.float32)  # z_y
    spread = np.zeros(count, np.float32)  # Σ e^(z − peak) (z − peak)
    expected = np.zeros((count, width), np.float32) if grad else None  # Σ e^(z − peak) (1 − tanh²) W
    for start, stop, rows in tiles.blocks():
        for at in tiles.tokens():
            z = tiles.logits(h[at], rows)  # [t, v]
            tiles.pick(z, y[at], start, stop, into=target[at])
            top = np.maximum(peak[at], z.max(axis=1))
            shift = peak[at] - top
            rescale = np.exp(shift)
            z -= top[:, None]
            weights = tiles.exp(z, keep=entropy or (grad and output.softcap is not None))
            if entropy:
                spread[at] = rescale * (spread[at] + shift * total[at]) + np.einsum("tv,tv->t", weights, z)
            total[at] = rescale * total[at] + weights.sum(axis=1)
            peak[at] = top
            if expected is not None:
                if output.softcap is not None:
                    z += top[:, None]
                    weights *= _uncapped(z, output, out=z)
                expected[at] *= rescale[:, None]
                expected[at] += weights @ rows

    spread_mean = spread / total
    lse = peak + np.log(total)
    if expected is not None:
        expected /= -total[:, None]
        for at in tiles.tokens():
            expected[at] += _uncapped(target[at, None], output) * np.asarray(output.take(targets[at]))
        expected /= output.temperature
    return TokenLogprobs(
        mx.array((target - peak) - np.log(total)),
        lse=mx.array(lse),
        entropy=mx.array(np.log(total) - spread_mean) if entropy else None,
        dhidden=None if expected is None else mx.array(expected),
    )


def output_gradients(
    hidden: mx.array, targets: mx.array, output: Output, dlogprobs: mx.array, lse: mx.array, tile: tuple[int, int]
) -> Gradients:
    """Gradients of the output's parameters: `d loss / d raw logits` of each tile, handed to `output.accumulate`."""
    gradients = {name: mx.zeros(value.shape) for name, value in output.parameters().items()}
    hidden = hidden.astype(mx.float32)
    h, y, d, norm = _floats(hidden), np.asarray(targets), _floats(dlogprobs), _floats(lse)
    tiles = _Tiles(output, tile, len(h))
    for start, stop, rows in tiles.blocks():
        for at in tiles.tokens():
            z = tiles.logits(h[at], rows)  # [t, v]
            slope = None if output.softcap is None else _uncapped(z, output, out=tiles.other(z))
            z -= norm[at, None]
            g = np.exp(z, out=z)
            g *= -1.0
            hit = np.flatnonzero((y[at] >= start) & (y[at] < stop))
            g[hit, y[at][hit] - start] += 1.0
            if slope is not None:
                g *= slope
            g *= (d[at] / output.temperature)[:, None]
            output.accumulate(hidden[at], mx.array(g), start, stop, gradients)
            mx.eval(gradients)
    return gradients


class _Tiles:
    """The tiles of one call and the scratch they share."""

    def __init__(self, output: Output, tile: tuple[int, int], count: int) -> None:
        self._output, self._count = output, count
        self._token_tile, self._vocab_tile = tile
        size = min(self._token_tile, count) * min(self._vocab_tile, output.vocab)
        self._logits = np.empty(size, np.float32)
        self._other: np.ndarray | None = None

    def blocks(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """(start, stop, rows `[v, D]`) of each block of the vocabulary; none where there are no tokens."""
        for start in range(0, self._output.vocab if self._count else 0, self._vocab_tile):
            stop = min(start + self._vocab_tile, self._output.vocab)
            yield start, stop, np.asarray(self._output.rows(start, stop))

    def tokens(self) -> Iterator[slice]:
        for start in range(0, self._count, self._token_tile):
            yield slice(start, min(start + self._token_tile, self._count))

    def logits(self, h: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Soft-capped, tempered logits `[t, v]`, in scratch."""
        shape = (len(h), len(rows))
        z = np.matmul(h, rows.T, out=self._logits[: shape[0] * shape[1]].reshape(shape))
        if self._output.softcap is not None:
            z /= self._output.softcap
            np.tanh(z, out=z)
            z *= self._output.softcap
        if self._output.temperature != 1.0:
            z /= self._output.temperature
        return z

    def other(self, z: np.ndarray) -> np.ndarray:
        """Scratch of the same shape."""
        if self._other is None:
            self._other = np.empty_like(self._logits)
        return self._other[: z.size].reshape(z.shape)

    def exp(self, z: np.ndarray, *, keep: bool) -> np.ndarray:
        """e^z, in place unless z must be kept."""
        return np.exp(z, out=self.other(z) if keep else z)

    def pick(self, z: np.ndarray, y: np.ndarray, start: int, stop: int, *, into: np.ndarray) -> None:
        """The logits of those targets `y [t]` that lie in the block."""
        hit = np.flatnonzero((y >= start) & (y < stop))
        into[hit] = z[hit, y[hit] - start]


def _uncapped(z: np.ndarray, output: Output, out: np.ndarray | None = None) -> np.ndarray:
    """d (soft cap) / d (raw logit) = 1 − tanh², from soft-capped, tempered logits."""
    if output.softcap is None:
        return np.ones_like(z)
    tanh = np.multiply(z, output.temperature / output.softcap, out=out)
    np.square(tanh, out=tanh)
    return np.subtract(1.0, tanh, out=tanh)


def _floats(x: mx.array) -> np.ndarray:
    """A float32 view; bfloat16 has no buffer protocol, so other types are cast first."""
    return np.asarray(x.astype(mx.float32))

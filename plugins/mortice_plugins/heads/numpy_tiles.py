"""The tile loop of `flash-cce` in numpy, for MLX's CPU backend, whose `exp` and `tanh` are scalar.

It agrees with `mlx_tiles` and cannot run inside a transform. It reads zero-copy views of evaluated arrays and works in
views of arrays that MLX has allocated, so that MLX's memory counters see all of it. Writing through such a view is safe
here because the arrays are new, evaluated and held by nothing else; they become results only after the last write.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from mortice.batch import Gradients, TokenLogprobs
from mortice.model import Output
from mortice_plugins.heads.tiling import FILTER_BLOCK, LOG_HIGHEST, TileCost, spans, worth_gathering


def cost(
    hidden: mx.array, output: Output, *, grad: bool, entropy: bool, filtered: bool = False, traced: bool = False
) -> TileCost:  # fmt: skip
    """What a tile of `score` holds; a second `[t, v]` where weights and logits are wanted at the same time."""
    both = entropy or (grad and output.softcap is not None)
    return TileCost(hidden.shape[1], logits=2 if both else 1, filtered=filtered)


def score(
    hidden: mx.array, targets: mx.array, output: Output, tile: tuple[int, int], *,
    grad: bool, entropy: bool, eps: float = 0.0,
) -> TokenLogprobs:  # fmt: skip
    """Log-probabilities of `targets [M]` from `hidden [M, D]`, in tiles of (tokens, vocabulary)."""
    h, y = _floats(hidden), np.asarray(targets)  # [M, D], [M]
    count, width = h.shape
    tiles = _Tiles(output, tile, count)

    peak = np.full(count, np.finfo(np.float32).min, np.float32)  # running maximum of the logits
    total = np.zeros(count, np.float32)  # Σ e^(z − peak)
    target = np.zeros(count, np.float32)  # z_y
    spread = np.zeros(count, np.float32)  # Σ e^(z − peak) (z − peak)
    unit, expected = _zeros(count, width) if grad else (None, None)  # [M, D] Σ e^(z − peak) (1 − tanh²) W
    product = _zeros(min(tile[0], count), width)[1] if grad else None  # [t, D]
    likely = _Likely(h, targets, output, eps, tiles, product) if product is not None and eps else None
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
                if (rescale != 1.0).any():
                    expected[at] *= rescale[:, None]
                if likely is None:
                    expected[at] += np.matmul(weights, rows, out=product[: len(weights)])
                else:
                    likely.pull(weights, rows, y[at] - start, at, top, total[at], into=expected[at])
        del rows  # before the floats of the next block are made

    spread_mean = spread / total
    lse = peak + np.log(total)
    if expected is not None:
        expected /= -total[:, None]
        for at in tiles.tokens():
            own = _uncapped(target[at, None], output)
            if likely is not None:
                own *= 1.0 - np.where(likely.missed[at], np.exp(target[at] - lse[at]), 0.0)[:, None]
            expected[at] += own * np.asarray(output.take(targets[at]))
        expected /= output.temperature
    return TokenLogprobs(
        mx.array((target - peak) - np.log(total)),
        lse=mx.array(lse),
        entropy=mx.array(np.log(total) - spread_mean) if entropy else None,
        dhidden=unit,
    )


def output_gradients(
    hidden: mx.array, targets: mx.array, output: Output, dlogprobs: mx.array, lse: mx.array, tile: tuple[int, int],
    into: Gradients,
) -> None:  # fmt: skip
    """Add the gradients of the output's parameters: `output.accumulate` gets `d loss / d raw logits` of each tile."""
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
            output.accumulate(hidden[at], tiles.shared(g), start, stop, into)
            mx.eval(into)  # before the scratch that `g` lies in is written again
        del rows


class _Tiles:
    """The tiles of one call and the scratch they share."""

    def __init__(self, output: Output, tile: tuple[int, int], count: int) -> None:
        self._output, self._count = output, count
        self._token_tile, self._vocab_tile = tile
        size = min(self._token_tile, count) * min(self._vocab_tile, output.vocab)
        self._array, self._logits = _zeros(size)
        self._other: np.ndarray | None = None

    def blocks(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """(start, stop, rows `[v, D]`) of each block of the vocabulary."""
        for start, stop in spans(self._output.vocab, self._vocab_tile):
            yield start, stop, np.asarray(self._output.rows(start, stop))

    def tokens(self) -> Iterator[slice]:
        for start, stop in spans(self._count, self._token_tile):
            yield slice(start, stop)

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
            self._other = _zeros(self._logits.size)[1]
        return self._other[: z.size].reshape(z.shape)

    def exp(self, z: np.ndarray, *, keep: bool) -> np.ndarray:
        """e^z, in place unless z must be kept."""
        return np.exp(z, out=self.other(z) if keep else z)

    def pick(self, z: np.ndarray, y: np.ndarray, start: int, stop: int, *, into: np.ndarray) -> None:
        """The logits of those targets `y [t]` that lie in the block."""
        hit = np.flatnonzero((y >= start) & (y < stop))
        into[hit] = z[hit, y[hit] - start]

    def shared(self, z: np.ndarray) -> mx.array:
        """The MLX array of what `logits` has put into scratch; not a copy."""
        return self._array[: z.size].reshape(z.shape)


class _Likely:
    """Which tokens have anything to gain from a block of output rows, and the product for those alone."""

    def __init__(
        self, h: np.ndarray, targets: mx.array, output: Output, eps: float, tiles: _Tiles, product: np.ndarray
    ) -> None:  # fmt: skip
        self._eps, self._product = eps, product
        self._gathered = _zeros(len(product) * FILTER_BLOCK)[1]
        self._target = np.zeros(len(h), np.float32)  # z_y, a lower bound of the normaliser that is known from the start
        for at in tiles.tokens():
            raw = np.einsum("td,td->t", h[at], np.asarray(output.take(targets[at])))
            self._target[at] = np.asarray(output.finish(mx.array(raw)))
        self.missed = np.zeros(len(h), bool)
        """`[M]` whether the target's own row was left out with its block."""

    def pull(
        self, weights: np.ndarray, rows: np.ndarray, place: np.ndarray, at: slice, peak: np.ndarray,
        total: np.ndarray, *, into: np.ndarray,
    ) -> None:  # fmt: skip
        """Add `weights [t, v] @ rows [v, D]` to the running sums `[t, D]`, without what is not likely."""
        least = np.exp(np.minimum(self._target[at] - peak, LOG_HIGHEST))
        floor = self._eps * np.maximum(total, least)  # [t]
        missed = self.missed[at]
        for start, stop in spans(len(rows), FILTER_BLOCK):
            part = weights[:, start:stop]
            kept = part.max(axis=1) > floor
            index = np.flatnonzero(kept)
            if not worth_gathering(len(index), len(kept)):
                into += np.matmul(part, rows[start:stop], out=self._product[: len(part)])
                continue
            missed |= ~kept & (place >= start) & (place < stop)
            if len(index):
                some = self._gathered[: len(index) * (stop - start)].reshape(len(index), stop - start)
                np.take(part, index, axis=0, out=some, mode="clip")  # other modes buffer `out`
                into[index] += np.matmul(some, rows[start:stop], out=self._product[: len(index)])


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


def _zeros(*shape: int) -> tuple[mx.array, np.ndarray]:
    """An array of zeros that MLX has allocated, and a view to write through; the view keeps the array alive."""
    array = mx.zeros(shape)
    mx.eval(array)
    return array, np.asarray(array)

"""Attention of one row on MLX's CPU backend, outside every trace: products by MLX, everything else by numpy.

The twin of `attention.products`, whose elementwise work it does in place, in one buffer of scores: numpy's exp is eight
times faster than what can be written in MLX there. The forward keeps the log-sum-exp of each query, so that the
backward needs no maximum and no sum (Dao et al., FlashAttention, 2022, arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from attrs import frozen

from mortice.attention import Piece


@frozen(eq=False)
class Stretch:
    """Queries `[start, …)` of a row, the token ranges that they may see (their own last), and how they are cut up."""

    start: int
    ranges: tuple[tuple[int, int], ...]
    pieces: Sequence[Piece]


@frozen(eq=False)
class RowAttention:
    """`q [T, H, d]`, `k, v [T, Hk, d]` → `[T, H, d]`: each stretch of queries on the ranges that it may see."""

    worth_keeping: ClassVar = True

    stretches: Sequence[Stretch]
    scale: float

    @np.errstate(invalid="ignore")  # a diverged run is found by its loss
    def forward(self, *inputs: mx.array) -> tuple[mx.array, Any]:
        q, k, v = (x.astype(mx.float32) for x in inputs)
        tokens, heads, _ = q.shape
        out = _zeros((tokens, heads, v.shape[2]))
        lse = np.empty((tokens, heads), np.float32)
        for stretch in self.stretches:
            keys, values = _gather(k, stretch.ranges), _gather(v, stretch.ranges)
            for piece in stretch.pieces:
                at, (low, high) = _queries(stretch, piece), piece.keys
                scores = self._scores(q[at], keys, piece)
                weights = view(scores)
                peak = weights.max(axis=-1, keepdims=True)
                weights -= peak
                np.exp(weights, out=weights)
                total = weights.sum(axis=-1, keepdims=True)
                part = scores @ values[:, low:high]
                mx.eval(part)
                mean = view(part)
                mean /= total
                view(out)[at] = _tokens_first(mean, heads)
                lse[at] = _tokens_first(peak + np.log(total), heads)[..., 0]
        return out.astype(inputs[0].dtype), lse

    @np.errstate(invalid="ignore", over="ignore")
    def backward(
        self, inputs: Sequence[mx.array], output: mx.array, saved: Any, cotangent: mx.array
    ) -> Sequence[mx.array]:
        q, k, v = (x.astype(mx.float32) for x in inputs)
        dout = cotangent.astype(mx.float32)
        heads, kv_heads = q.shape[1], k.shape[1]
        dq, dk, dv = _zeros(q.shape), _zeros(k.shape), _zeros(v.shape)
        mx.eval(dout)
        for stretch in self.stretches:
            keys, values = _gather(k, stretch.ranges), _gather(v, stretch.ranges)
            dkeys, dvalues = np.zeros(keys.shape, np.float32), np.zeros(values.shape, np.float32)
            for piece in stretch.pieces:
                at, (low, high) = _queries(stretch, piece), piece.keys
                queries, outs = _heads_first(q[at], kv_heads), _heads_first(dout[at], kv_heads)
                scores = self._scores(q[at], keys, piece)
                product = outs @ values[:, low:high].swapaxes(1, 2)
                mx.eval(product)
                weights, dscores = view(scores), view(product)
                weights -= _rows(saved[at][..., None], kv_heads)
                np.exp(weights, out=weights)
                # A piece has all keys of its queries, so this is Σ dout · out, of an output that is not rounded.
                dscores -= np.einsum("hnm,hnm->hn", weights, dscores)[..., None]
                dscores *= weights
                parts = product @ keys[:, low:high], product.swapaxes(1, 2) @ queries, scores.swapaxes(1, 2) @ outs
                mx.eval(parts)
                view(dq)[at] = _tokens_first(view(parts[0]), heads)
                dkeys[:, low:high] += view(parts[1])
                dvalues[:, low:high] += view(parts[2])
            _scatter(dkeys, stretch.ranges, view(dk))
            _scatter(dvalues, stretch.ranges, view(dv))
        for total in (dq, dk):
            scaled = view(total)
            scaled *= self.scale
        return [total.astype(x.dtype) for total, x in zip((dq, dk, dv), inputs)]

    def _scores(self, queries: mx.array, keys: mx.array, piece: Piece) -> mx.array:
        """Masked, scaled products `[Hk, each · n, m]`, evaluated."""
        kv_heads = keys.shape[0]
        low, high = piece.keys
        scores = _heads_first(queries * self.scale, kv_heads) @ keys[:, low:high].swapaxes(1, 2)
        mx.eval(scores)
        first, mask = piece.bias()
        n, m = piece.queries[1] - piece.queries[0], high - low
        view(scores).reshape(kv_heads, -1, n, m)[..., first:] += mask
        return scores


def view(x: mx.array) -> np.ndarray:
    """The numbers of an evaluated float32 array, to be read and written in place."""
    return np.array(x, copy=False)


def _zeros(shape: Sequence[int]) -> mx.array:
    zeros = mx.zeros(shape)
    mx.eval(zeros)
    return zeros


def _queries(stretch: Stretch, piece: Piece) -> slice:
    return slice(stretch.start + piece.queries[0], stretch.start + piece.queries[1])


def _gather(x: mx.array, ranges: Sequence[tuple[int, int]]) -> mx.array:
    """Tokens of these ranges, heads first: `[T, Hk, d] → [Hk, m, d]`."""
    parts = [x[start:stop] for start, stop in ranges]
    found = mx.contiguous((parts[0] if len(parts) == 1 else mx.concatenate(parts)).swapaxes(0, 1))
    mx.eval(found)
    return found


def _scatter(x: np.ndarray, ranges: Sequence[tuple[int, int]], into: np.ndarray) -> None:
    """Add `[Hk, m, d]` to the tokens of the ranges of `[T, Hk, d]`."""
    at = 0
    for start, stop in ranges:
        into[start:stop] += x[:, at : at + stop - start].swapaxes(0, 1)
        at += stop - start


def _heads_first(x: mx.array, kv_heads: int) -> mx.array:
    """`[n, H, d] → [Hk, each · n, d]`: query heads that share a key head are rows of one product."""
    n, heads, width = x.shape
    return x.reshape(n, kv_heads, heads // kv_heads, width).transpose(1, 2, 0, 3).reshape(kv_heads, -1, width)


def _rows(x: np.ndarray, kv_heads: int) -> np.ndarray:
    """The same in numpy."""
    n, heads, width = x.shape
    return x.reshape(n, kv_heads, heads // kv_heads, width).transpose(1, 2, 0, 3).reshape(kv_heads, -1, width)


def _tokens_first(x: np.ndarray, heads: int) -> np.ndarray:
    """`[Hk, each · n, d] → [n, H, d]`."""
    kv_heads, rows, width = x.shape
    each = heads // kv_heads
    return x.reshape(kv_heads, each, rows // each, width).transpose(2, 0, 1, 3).reshape(-1, heads, width)

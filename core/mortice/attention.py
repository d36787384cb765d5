"""Causal attention of a path's last positions, in pieces that need no `[T, T]` mask and keep no scores.

Two twins. `fused` hands each piece to `mx.fast.scaled_dot_product_attention`; it is what runs on a GPU. On the CPU
MLX's attention falls back to plain operations whose `exp` is slow and whose backward keeps every score; `products`
writes the same in products and the fast exp of `elementwise`, with a backward by hand. Scores are recomputed in both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from attrs import frozen

from mortice.elementwise import exp
from mortice.linear import on_cpu

WINDOW_BLOCK = 128
"""Queries in one block of a sliding window."""
MASKED = -1e9


@frozen
class Piece:
    """Some queries of a path and the keys that they can reach, both as ranges, with the mask between them."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: Any


def _pieces(queries: int, keys: int, window: int | None, chunk: int) -> list[Piece]:
    """How the last `queries` positions of a path of `keys` positions are cut up."""
    before = keys - queries
    window = keys if window is None else window
    windowed = keys > window
    size = WINDOW_BLOCK if windowed else chunk or queries
    found = []
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        low, high = 0, before + stop
        mask: Any = "causal"
        if windowed and high > window:
            low = max(0, before + start - window + 1)
            i = np.arange(before + start, high)[:, None]
            j = np.arange(low, high)[None, :]
            mask = mx.array((j <= i) & (i - j < window))  # [block, at most window + block - 1]
        found.append(Piece((start, stop), (low, high), mask))
    return found


def causal_attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, *, window: int | None = None, chunk: int = 0
) -> mx.array:
    """Attention of the last `Tq` positions of a path on all its `Tk`: `q [1, H, Tq, d]`, `k, v [1, Hk, Tk, d]`.

    With `window`, query i sees the last `window` keys, itself included, in blocks of queries; with `chunk`, queries
    go in chunks. Pieces run one after the other and are recomputed in the backward, one after the other as well.
    """
    pieces = _pieces(q.shape[2], k.shape[2], window, chunk)
    return products(q, k, v, scale, pieces) if on_cpu() else fused(q, k, v, scale, pieces)


def fused(q: mx.array, k: mx.array, v: mx.array, scale: float, pieces: list[Piece]) -> mx.array:
    """By MLX's own attention."""
    if len(pieces) == 1:
        low, high = pieces[0].keys
        return mx.fast.scaled_dot_product_attention(
            q, k[:, :, low:high], v[:, :, low:high], scale=scale, mask=pieces[0].mask
        )

    def attend(piece: Piece, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=piece.mask)

    def cut(piece: Piece, q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        (start, stop), (low, high) = piece.queries, piece.keys
        return [q[:, :, start:stop], k[:, :, low:high], v[:, :, low:high]]

    @mx.custom_function
    def forward(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        parts: list[mx.array] = []
        for piece in pieces:
            inputs = cut(piece, q, k, v)
            if parts:
                inputs = mx.depends(inputs, parts[-1])
            parts.append(attend(piece, *inputs))
        return mx.concatenate(parts, axis=2)

    @forward.vjp
    def backward(primals: Any, cotangent: mx.array, _: Any) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v = primals
        dq: list[mx.array] = []
        dk, dv = mx.zeros_like(k), mx.zeros_like(v)
        for piece in pieces:
            inputs = cut(piece, q, k, v)
            if dq:
                inputs = mx.depends(inputs, [dq[-1], dk, dv])
            (start, stop), (low, high) = piece.queries, piece.keys
            _, (dqi, dki, dvi) = mx.vjp(partial(attend, piece), inputs, [cotangent[:, :, start:stop]])
            dq.append(dqi)
            dk[:, :, low:high] += dki
            dv[:, :, low:high] += dvi
        return mx.concatenate(dq, axis=2), dk, dv

    out: Any = forward(q, k, v)
    return out


def products(q: mx.array, k: mx.array, v: mx.array, scale: float, pieces: list[Piece]) -> mx.array:
    """By float32 products, for the CPU. Query heads that share a key head are rows of one product."""
    dtype = q.dtype
    heads, length, width = q.shape[1:]
    kv_heads = k.shape[1]
    each = heads // kv_heads

    def rows(x: mx.array, piece: Piece) -> mx.array:
        """Queries of a piece: `[1, H, Tq, d]` → `[Hk, each · n, d]`."""
        start, stop = piece.queries
        return x.reshape(kv_heads, each, length, width)[:, :, start:stop].reshape(kv_heads, -1, width)

    def back(x: mx.array, piece: Piece) -> mx.array:
        start, stop = piece.queries
        return x.reshape(kv_heads, each, stop - start, width)

    def probabilities(piece: Piece, q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        """Softmax without its division, and the divisor: `[Hk, each · n, m]`, `[Hk, each · n, 1]`."""
        low, high = piece.keys
        scores = (rows(q, piece) * scale) @ k[0, :, low:high].swapaxes(1, 2)
        n, m = piece.queries[1] - piece.queries[0], high - low
        mask = mx.arange(m)[None, :] <= mx.arange(m - n, m)[:, None] if piece.mask == "causal" else piece.mask
        scores = mx.where(mask, scores.reshape(kv_heads, each, n, m), MASKED).reshape(scores.shape)
        weights = exp(scores - scores.max(axis=-1, keepdims=True))
        return weights, weights.sum(axis=-1, keepdims=True)

    @mx.custom_function
    def forward(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        parts: list[mx.array] = []
        for piece in pieces:
            low, high = piece.keys
            inputs = mx.depends([q, k], parts[-1]) if parts else [q, k]
            weights, total = probabilities(piece, *inputs)
            parts.append(back((weights @ v[0, :, low:high]) / total, piece))
        return mx.concatenate(parts, axis=2).reshape(1, heads, length, width)

    @forward.vjp
    def backward(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v = primals
        dq: list[mx.array] = []
        dk, dv = mx.zeros(k.shape[1:]), mx.zeros(v.shape[1:])
        for piece in pieces:
            low, high = piece.keys
            inputs = mx.depends([q, k], [dq[-1], dk, dv]) if dq else [q, k]
            weights, total = probabilities(piece, *inputs)
            weights = weights / total
            dout = rows(cotangent, piece)
            along = (dout * rows(output, piece)).sum(axis=-1, keepdims=True)
            dscores = weights * (dout @ v[0, :, low:high].swapaxes(1, 2) - along) * scale
            dq.append(back(dscores @ k[0, :, low:high], piece))
            dk[:, low:high] += dscores.swapaxes(1, 2) @ rows(q, piece)
            dv[:, low:high] += weights.swapaxes(1, 2) @ dout
        return mx.concatenate(dq, axis=2).reshape(q.shape), dk[None], dv[None]

    out: Any = forward(*(x.astype(mx.float32) for x in (q, k, v)))
    return out.astype(dtype)

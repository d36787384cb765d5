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
SCORES = 2**20
"""Scores in one chunk where its size is left to mortice (4 MiB in float32): larger ones leave the processor's cache."""
SMALLEST, LARGEST = 16, 256
"""Bounds of such a chunk, in queries."""
MASKED = -1e9


def auto_chunk(heads: int, keys: int) -> int:
    """Queries in one chunk of full attention, by size. A GPU's own attention keeps no scores and needs no chunks."""
    if not on_cpu():
        return 0
    fitting = SCORES // max(1, heads * keys) // SMALLEST * SMALLEST
    return min(LARGEST, max(SMALLEST, fitting))


@frozen(eq=False)
class Piece:
    """Some queries of a path and the keys that they can reach, both as ranges. Always causal."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    before: int
    """Positions of the path in front of its queries: query i stands at position `before + i`."""
    window: int | None = None
    """Set where the window hides some of these keys."""

    def hidden(self) -> np.ndarray:
        """Which keys each query must not see, `[n, m]`."""
        i = self.before + np.arange(*self.queries)[:, None]
        j = np.arange(*self.keys)[None, :]
        return (j > i) if self.window is None else (j > i) | (i - j >= self.window)

    def bias(self) -> tuple[int, np.ndarray]:
        """(first key, `[n, keys from it on]`): what is added to scores; keys before the first are seen by all."""
        n, m = self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]
        first = 0 if self.window is not None else m - n
        return first, np.where(self.hidden()[:, first:], np.float32(MASKED), np.float32(0))


def pieces_of(queries: int, keys: int, window: int | None, chunk: int) -> list[Piece]:
    """How the last `queries` positions of a path of `keys` positions are cut up."""
    before = keys - queries
    window = keys if window is None else window
    windowed = keys > window
    size = WINDOW_BLOCK if windowed else chunk or queries
    found = []
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        high = before + stop
        hides = windowed and high > window
        low = max(0, before + start - window + 1) if hides else 0
        found.append(Piece((start, stop), (low, high), before, window if hides else None))
    return found


def causal_attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, *, window: int | None = None, chunk: int | None = None
) -> mx.array:
    """Attention of the last `Tq` positions of a path on all its `Tk`: `q [1, H, Tq, d]`, `k, v [1, Hk, Tk, d]`.

    With `window`, query i sees the last `window` keys, itself included, in blocks of queries; else queries go in chunks
    of `chunk`: 0 for never, None to choose by size. Pieces run one after the other and are recomputed in the backward,
    one after the other as well.
    """
    chunk = auto_chunk(q.shape[1], k.shape[2]) if chunk is None else chunk
    pieces = pieces_of(q.shape[2], k.shape[2], window, chunk)
    return products(q, k, v, scale, pieces) if on_cpu() else fused(q, k, v, scale, pieces)


def fused(q: mx.array, k: mx.array, v: mx.array, scale: float, pieces: list[Piece]) -> mx.array:
    """By MLX's own attention."""
    if len(pieces) == 1:
        low, high = pieces[0].keys
        return _fused_piece(pieces[0], scale, q, k[:, :, low:high], v[:, :, low:high])

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
            parts.append(_fused_piece(piece, scale, *inputs))
        return mx.concatenate(parts, axis=2)

    @forward.vjp
    def backward(primals: Any, cotangent: mx.array, _: Any) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v = primals
        dq: list[mx.array] = []
        dk, dv = mx.zeros(k.shape), mx.zeros(v.shape)  # float32: a sum over many pieces
        for piece in pieces:
            inputs = cut(piece, q, k, v)
            if dq:
                inputs = mx.depends(inputs, [dq[-1], dk, dv])
            (start, stop), (low, high) = piece.queries, piece.keys
            _, (dqi, dki, dvi) = mx.vjp(partial(_fused_piece, piece, scale), inputs, [cotangent[:, :, start:stop]])
            dq.append(dqi)
            dk[:, :, low:high] += dki.astype(mx.float32)
            dv[:, :, low:high] += dvi.astype(mx.float32)
        return mx.concatenate(dq, axis=2), dk.astype(k.dtype), dv.astype(v.dtype)

    out: Any = forward(q, k, v)
    return out


def _fused_piece(piece: Piece, scale: float, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    mask: Any = "causal" if piece.window is None else mx.array(~piece.hidden())
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def products(q: mx.array, k: mx.array, v: mx.array, scale: float, pieces: list[Piece]) -> mx.array:
    """By float32 products, for the CPU. Query heads that share a key head are rows of one product."""
    dtype = q.dtype
    heads, length = q.shape[1:3]
    kv_heads = k.shape[1]
    each = heads // kv_heads

    def rows(x: mx.array, piece: Piece) -> mx.array:
        """Queries of a piece: `[1, H, Tq, d]` → `[Hk, each · n, d]`."""
        start, stop = piece.queries
        return x.reshape(kv_heads, each, length, -1)[:, :, start:stop].reshape(kv_heads, -1, x.shape[-1])

    def back(x: mx.array, piece: Piece) -> mx.array:
        start, stop = piece.queries
        return x.reshape(kv_heads, each, stop - start, -1)

    def probabilities(piece: Piece, q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        """Softmax without its division, and the divisor: `[Hk, each · n, m]`, `[Hk, each · n, 1]`."""
        low, high = piece.keys
        scores = (rows(q, piece) * scale) @ k[0, :, low:high].swapaxes(1, 2)
        n, m = piece.queries[1] - piece.queries[0], high - low
        i = piece.before + mx.arange(*piece.queries)[:, None]
        j = mx.arange(low, high)[None, :]
        seen = j <= i if piece.window is None else (j <= i) & (i - j < piece.window)
        # Added, since `where` takes as long as fifteen additions on the CPU.
        scores = (scores.reshape(kv_heads, each, n, m) + mx.where(seen, 0.0, MASKED)).reshape(scores.shape)
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
        return mx.concatenate(parts, axis=2).reshape(1, heads, length, -1)

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

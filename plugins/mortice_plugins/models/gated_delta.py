"""The gated delta rule (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024, arXiv:2412.06464).

With decay α = e^g, strength β, keys k and values v of a token, a head's state S `[Dv, Dk]` is

    S ← α S + β (v − α S k) kᵀ,    y = S q

`stepwise` is that, token by token (`mx.fast.gated_delta_update`: one kernel on a GPU, a loop elsewhere). `chunked` is
the same in products of whole chunks of tokens (their section 3.3, after Yang et al. 2024, arXiv:2406.06484), which is
how the CPU does it. Neither scales or normalises queries and keys.
"""

from __future__ import annotations

import mlx.core as mx

from mortice.linear import on_cpu

CHUNK = 64
"""Tokens of one product."""
FEW = 8
"""Tokens up to which going step by step is faster."""
NEVER = -1e9
"""Added to an exponent: no contribution."""


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """`q, k [T, Hk, Dk]`, `v [T, Hv, Dv]`, log-decay `g [T, Hv]`, `beta [T, Hv]`, state `[Hv, Dv, Dk]` (None: zeros) →
    (`y [T, Hv, Dv]` in the type of v, state behind the last token in float32)."""
    if on_cpu() and q.shape[0] > FEW:
        return chunked(q, k, v, g, beta, state)
    return stepwise(q, k, v, g, beta, state)


def stepwise(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """`gated_delta`, token by token."""
    before = None if state is None else state[None]
    one = (x[None] for x in (q, k, v, mx.exp(g.astype(mx.float32)), beta))
    y, after = mx.fast.gated_delta_update(*one, initial_state=before)
    return y[0].astype(v.dtype), after[0]


def chunked(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """`gated_delta` in chunks of tokens, in float32.

    Within a chunk the corrections of all tokens solve (I + A) u = β (v − …), A strictly lower triangular, so one
    triangular inverse serves values and keys; only the state goes from chunk to chunk.
    """
    tokens, heads, kind = v.shape[0], v.shape[1], v.dtype
    q, k = (_chunks(mx.repeat(x, heads // x.shape[1], axis=1)) for x in (q, k))  # [N, H, C, Dk]
    v, g, beta = _chunks(v), _chunks(g[..., None])[..., 0], _chunks(beta[..., None])  # [N, H, C(, Dv | 1)]
    decay = mx.cumsum(g, axis=-1)  # [N, H, C], log of what is left since the chunk's start
    place = mx.arange(decay.shape[-1])
    late = mx.where(place[:, None] >= place[None, :], 0.0, NEVER)  # [C, C]
    between = mx.exp(decay[..., :, None] - decay[..., None, :] + late)  # [N, H, C, C], from column to row
    keyed = k * beta
    inverse = unit_lower_inverse((keyed @ k.swapaxes(-1, -2)) * between)
    since = mx.exp(decay)[..., None]  # [N, H, C, 1]
    values, keys = inverse @ (v * beta), inverse @ (keyed * since)
    scores = (q @ k.swapaxes(-1, -2)) * between
    until = mx.exp(decay[..., -1:] - decay)[..., None]  # [N, H, C, 1], to the chunk's end
    asked, left = q * since, k * until
    s = mx.zeros((heads, k.shape[-1], v.shape[-1])) if state is None else state.astype(mx.float32).swapaxes(-1, -2)
    outs = []
    for n in range(q.shape[0]):
        u = values[n] - keys[n] @ s  # [H, C, Dv]
        outs.append(asked[n] @ s + scores[n] @ u)
        s = s * since[n, :, -1:] + left[n].swapaxes(-1, -2) @ u  # [H, Dk, Dv]
    y = mx.stack(outs).swapaxes(1, 2).reshape(-1, heads, v.shape[-1])
    return y[:tokens].astype(kind), s.swapaxes(-1, -2)


def _chunks(x: mx.array) -> mx.array:
    """`[T, H, D]` → `[N, H, C, D]` float32, zeros behind the last token: such a token changes no state."""
    tokens, heads, width = x.shape
    x = mx.pad(x.astype(mx.float32), [(0, -tokens % CHUNK), (0, 0), (0, 0)])
    return x.reshape(-1, CHUNK, heads, width).swapaxes(1, 2)


def unit_lower_inverse(a: mx.array) -> mx.array:
    """(I + the strictly lower part of `a`)⁻¹ of `a [..., n, n]`, n a power of two: by halves, as stable as forward
    substitution, and in log n products."""
    size = a.shape[-1]
    inverse = mx.ones((*a.shape[:-2], size, 1, 1))  # of the diagonal blocks, side by side
    half = 1
    while half < size:
        pairs = size // (2 * half)
        blocks = a.reshape(*a.shape[:-2], pairs, 2, half, pairs, 2, half)[..., 1, :, :, 0, :]
        below = mx.diagonal(blocks, axis1=-4, axis2=-2)  # [..., half, half, pairs]
        below = mx.moveaxis(below, -1, -3)
        inverse = inverse.reshape(*inverse.shape[:-3], pairs, 2, half, half)
        first, second = inverse[..., 0, :, :], inverse[..., 1, :, :]
        corner = -(second @ below @ first)
        top = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        inverse = mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)
        half *= 2
    return inverse[..., 0, :, :]

"""Attention, positions and keyed randomness of a forward pass: they belong to a context, not to the model.

A model adapter is written once, for plain sequences: it calls `ctx.rope(x, …)` and `ctx.attend(q, k, v, …)` on
`[T, H, d]`. `SpanContext` trains on a forest of spans; `CacheContext` decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx

_active: ContextVar[Context | None] = ContextVar("mortice_context", default=None)


@contextmanager
def activate(ctx: Context) -> Iterator[None]:
    """Make `ctx` the one that `current()` gives to modules which are called with activations only (dropout)."""
    token = _active.set(ctx)
    try:
        yield
    finally:
        _active.reset(token)


def current() -> Context | None:
    """The context of the forward pass that is running."""
    return _active.get()


class Context:
    """What a model adapter sees. `constants` holds arrays that stay the same in every block (per-layer inputs)."""

    def __init__(self) -> None:
        self.constants: dict[str, mx.array] = {}

    def rope(
        self, x: mx.array, dims: int, *, base: float | None = None, scale: float = 1.0, freqs: mx.array | None = None,
        traditional: bool = False,
    ) -> mx.array:  # fmt: skip
        """Rotary positions on `x [T, H, d]`, arguments as `mx.fast.rope`."""
        raise NotImplementedError

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, window: int | None = None, layer: int = 0
    ) -> mx.array:
        """Causal attention: `q [T, H, d]`, `k, v [T, Hk, d]` → `[T, H, d]`. `window`: query i sees j iff i − j < window.

        `layer` names the K/V cache entry when decoding."""
        raise NotImplementedError

    def tokenwise(self, fn: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        """`fn(x)` for what acts on each token alone, in chunks of tokens where that saves memory."""
        return fn(x)

    def uniform(self, module: str, shape: tuple[int, ...]) -> mx.array | None:
        """Keyed uniform numbers `[T, …]` for dropout in `module`, or None where nothing is random (evaluation)."""
        return None


__all__ = ["Any", "Context", "activate", "current"]

"""Attention and rotary positions of mlx-lm's modules, led to mortice's context.

Families import `scaled_dot_product_attention` into their own module. Each attention instance gets a subclass of its own
class whose `__call__` is the same code over a copy of that module's names, in which this one name leads to
`ctx.attend`. An attribute that turns queries and keys (`rope` and the like) is replaced, in the instance, by one that
calls it for each stretch of consecutive positions. No class and no module of mlx-lm is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mortice.context import current
from mortice_mlx_lm.refusal import Refused

ATTENTION = "scaled_dot_product_attention"
ROTARY = ("rope", "rotary_emb", "rotary", "rope_local", "rope_global")
"""Attributes of an attention module that turn queries and keys."""


def attentions(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer that call mlx-lm's attention by its name."""
    return [m for m in layer.modules() if ATTENTION in getattr(type(m).__call__, "__code__", _NOTHING).co_names]


def address(layer: nn.Module, index: int, window: int | None) -> None:
    """Lead a layer's attention and positions to the context."""
    for module in attentions(layer):
        module.__class__ = attending(type(module), index, window)
        for name in ROTARY:
            rope = getattr(module, name, None)
            if callable(rope):
                module.pop(name, None)
                object.__setattr__(module, name, Turning(rope))


_NOTHING = (lambda: None).__code__


def attending(kind: type, index: int, window: int | None) -> type:
    """A subclass whose `__call__` is the same code, with one name of its module leading to the context."""
    call = kind.__call__
    names = dict(call.__globals__) | {ATTENTION: partial(attend, layer=index, window=window)}
    own = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    own.__kwdefaults__ = call.__kwdefaults__
    return type(kind.__name__, (kind,), {"__call__": own, "__module__": kind.__module__})


def attend(
    q: mx.array, k: mx.array, v: mx.array, cache: Any = None, scale: float = 1.0, mask: Any = None, sinks: Any = None,
    *, layer: int, window: int | None,
) -> mx.array:  # fmt: skip
    """mlx-lm's `scaled_dot_product_attention` on `[1, H, T, d]`, by the context that runs."""
    if sinks is not None:
        raise Refused("its attention has sinks, which no context knows")
    if mask is not None:  # a layer is given none: this is one of its own making
        raise Refused("its attention has a mask or a bias of its own")
    ctx = current()
    assert ctx is not None
    q, k, v = (x[0].swapaxes(0, 1) for x in (q, k, v))
    return ctx.attend(q, k, v, scale=scale, window=window, layer=layer).swapaxes(0, 1)[None]


class Turning:
    """Rotary positions that belong to the context: mlx-lm's own, for each stretch of consecutive tokens."""

    def __init__(self, rope: Callable[..., mx.array]) -> None:
        self._rope = rope

    def __call__(self, x: mx.array, offset: Any = 0, *_: Any, **__: Any) -> mx.array:
        ctx = current()
        assert ctx is not None
        turned = ctx.rotated(self._turn, x[0].swapaxes(0, 1))  # [T, H, d]
        return turned.swapaxes(0, 1)[None]

    def _turn(self, x: mx.array, offset: int) -> mx.array:
        return self._rope(x.swapaxes(0, 1)[None], offset=offset)[0].swapaxes(0, 1)

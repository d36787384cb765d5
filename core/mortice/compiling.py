"""Compiled pieces of a model (`mx.compile`), one for each shape of row.

A compiled piece is a pure function of arrays: everything that changes from call to call goes in as an argument, above
all the parameters that train and the keyed random numbers, since what is captured is a constant. How attention is cut
up belongs to the row, so a piece is compiled anew for a row of another shape; rows are padded to a multiple of `BUCKET`
tokens, so that plain sequences come in few shapes.

What this leaves out: `shapeless` compilation, since attention's pieces depend on the length.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from attrs import evolve

from mortice.batch import Span
from mortice.context import SpanContext
from mortice.model import Model

BUCKET = 64
"""Tokens to whose multiples rows are padded."""
MOST = 512
"""Compiled pieces that a model keeps; the oldest goes first."""

Tree: TypeAlias = "dict[str, mx.array]"


def padded(ctx: SpanContext) -> SpanContext:
    """The same row with padding behind it, which nothing attends to and nothing scores."""
    row = ctx.row
    spare = -row.length % BUCKET
    if not spare:
        return ctx
    last = row.spans[-1]
    span = Span(row.length, row.length + spare, len(row.spans) - 1, last.position + last.length, "padding")
    return ctx.on(evolve(row, tokens=[*row.tokens.tolist(), *[0] * spare], spans=[*row.spans, span]))


def plain(ctx: SpanContext) -> bool:
    """Whether a row is one sequence. Rows that branch seldom come twice in one shape; compiling each would cost more
    than it saves."""
    return len(ctx.runs) == 1


def compiled(model: Model, name: Hashable, piece: Callable[..., Any], ctx: SpanContext, *trees: Tree) -> Any:
    """`piece(ctx, *trees)`, compiled once for each shape of row. `name` tells this piece of the model from others.

    The piece must use nothing that changes but its trees, and the context's random numbers and constants.
    """
    cache = model.compiled
    key = (name, ctx.shape, tuple(tuple(tree) for tree in trees))
    if key not in cache:
        if len(cache) >= MOST:
            cache.pop(next(iter(cache)))
        cache[key] = _Compiled(piece, ctx, trees)
    return cache[key](ctx, trees)


class _Compiled:
    """One piece for one shape of row."""

    def __init__(self, piece: Callable[..., Any], ctx: SpanContext, trees: Sequence[Tree]) -> None:
        own = ctx.on(ctx.row)  # captured for good: it must hold nothing of this step
        with own.noting_draws() as draws, own.given(None, ctx.constants):
            piece(own, *trees)  # builds a graph that is never run
        names = self._draws = tuple(draws)

        def function(draws: list[mx.array], constants: Tree, *trees: Tree) -> Any:
            with own.given(dict(zip(names, draws)), constants):
                return piece(own, *trees)

        self._function: Any = mx.compile(function)

    def __call__(self, ctx: SpanContext, trees: Sequence[Tree]) -> Any:
        draws = [ctx.uniform(module, width) for module, width in self._draws]
        return self._function(draws, ctx.constants, *trees)

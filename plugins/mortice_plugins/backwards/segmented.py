"""Backward a few blocks at a time.

The forward keeps the carry at every cut and nothing else; the objective runs between the two passes, outside every
transform; then each segment is run again and differentiated by itself. The whole carry is detached and seeded, so
that what later layers share (donor K/V) gets its cotangents across segments with no code of its own.

Costs one extra forward. Memory: the cuts, and the activations of one segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx
from attrs import evolve, frozen

from mortice import staging
from mortice.batch import Gradients
from mortice.context import SpanContext
from mortice.errors import ConfigError
from mortice.linear import on_cpu
from mortice.model import Carry, Model
from mortice.objective import Objective, ObjectiveResult
from mortice.options import ge, option
from mortice.protocols import Params
from mortice.staging import Tape


def _rising(instance: Any, attribute: Any, value: tuple[int, ...]) -> None:
    if any(cut < 1 for cut in value) or any(a >= b for a, b in itertools.pairwise(value)):
        raise ValueError(f"must be rising numbers of blocks from 1 on, found {list(value)}")


@frozen
class Segmented:
    """Backward through a few blocks at a time: memory of one segment, at the price of one extra forward."""

    segment_size: int = option(
        2, help="blocks a segment; a decoder layer is two blocks (attention, MLP)", validator=ge(1)
    )
    cuts: tuple[int, ...] = option(
        (),
        help="blocks at which segments begin, instead of a fixed size: [8, 12, 14] makes four segments",
        validator=_rising,
    )
    eager: bool = option(
        True,
        help="where MLX runs on the CPU, run attention and activations in numpy between the traces; false: in MLX, "
        "inside them",
    )

    leaner: ClassVar = {"segment_size": (8, 4, 2, 1)}

    @property
    def stride(self) -> int | None:
        return None if self.cuts else self.segment_size

    def segments(self, blocks: int) -> list[tuple[int, int]]:
        """(start, stop) of each segment of a model of so many blocks. Raises ConfigError for a cut beyond them."""
        if not self.cuts:
            return [(start, min(start + self.segment_size, blocks)) for start in range(0, blocks, self.segment_size)]
        if self.cuts[-1] >= blocks:
            raise ConfigError(f"backward.cuts: {self.cuts[-1]} lies behind the last of the model's {blocks} blocks")
        bounds = (0, *self.cuts, blocks)
        return list(itertools.pairwise(bounds))

    def __call__(
        self, model: Model, params: Params, contexts: Sequence[SpanContext], objective: Objective, /
    ) -> tuple[ObjectiveResult, Gradients]:
        model.bind(params)
        end = len(model.blocks)
        segments = self.segments(end)
        own = {start: model.names_of(model.blocks[start:stop], params) for start, stop in segments}
        before, after = model.parts_around()
        embedding, final = model.names_of(before, params), model.names_of(after, params)
        # Nothing before the first segment that trains needs a gradient.
        first = 0 if embedding else min((start for start in own if own[start]), default=end)

        eager = self.eager and on_cpu()

        kept: list[dict[int, Carry]] = []
        hiddens = []
        for ctx in contexts:
            carry = model.begin(ctx, ctx.tokens)
            held: dict[int, Carry] = {}
            for start, stop in segments:
                if start >= first:
                    held[start] = carry
                with staging.eagerly() if eager else nullcontext():
                    carry = model.run(carry, ctx, start, stop)
                mx.eval(carry)
            held[end] = carry
            kept.append(held)
            hiddens.append(model.finish(carry))
            mx.eval(hiddens[-1])

        result = objective(hiddens)
        gradients = dict(result.gradients)
        final = [name for name in final if name not in gradients]
        assert result.dhidden is not None
        del hiddens

        for ctx, held, dhidden in zip(contexts, kept, result.dhidden):
            pull = partial(_pull, model, params, gradients)
            seed = pull(lambda carry: {"hidden": model.finish(carry)}, final, held.pop(end), {"hidden": dhidden})
            for start, stop in reversed(segments):
                if start < first:
                    break
                run = partial(model.run, ctx=ctx)
                if not eager:
                    seed = pull(partial(run, start=start, stop=stop), own[start], held.pop(start), seed)
                    continue
                for block, carry, tape in reversed(_recorded(model, ctx, start, stop, held.pop(start))):
                    names = model.names_of([model.blocks[block]], params)
                    seed = pull(partial(run, start=block, stop=block + 1), names, carry, seed, tape)
            if embedding:
                pull(partial(_embed, model, ctx), embedding, {}, seed)
        zeros = {name: mx.zeros(value.shape) for name, value in params.items() if name not in gradients}
        return evolve(result, dhidden=None, gradients={}), gradients | zeros


def _recorded(model: Model, ctx: SpanContext, start: int, stop: int, carry: Carry) -> list[tuple[int, Carry, Tape]]:
    """(block, the carry before it, the operations in it) of a segment that is run again."""
    found = []
    for block in range(start, stop):
        with staging.eagerly(keep=True) as tape:
            after = model.run(carry, ctx, block, block + 1)
        found.append((block, carry, tape))
        if block + 1 < stop:
            mx.eval(after)
        carry = after
    return found


def _embed(model: Model, ctx: SpanContext, _: Carry) -> Carry:
    return model.begin(ctx, ctx.tokens)


def _pull(
    model: Model,
    params: Params,
    gradients: Gradients,
    forward: Callable[[Carry], Carry],
    names: Sequence[str],
    carry: Carry,
    seed: Carry,
    tape: Tape | None = None,
) -> Carry:
    """Cotangents of a piece's outputs to those of its inputs; the gradients of `names` are added to `gradients`.

    With the tape of a piece's eager run, in stages around what is on it.
    """
    inputs, outputs = list(carry), list(seed)

    def piece(*arrays: mx.array) -> list[mx.array]:
        model.bind(dict(zip(names, arrays)))
        found = forward(dict(zip(inputs, arrays[len(names) :])))
        return [found[key] for key in outputs]

    primals = [params[name] for name in names] + [carry[key] for key in inputs]
    seeds = [seed[key] for key in outputs]
    try:
        pulled = mx.vjp(piece, primals, seeds)[1] if tape is None else staging.vjp(piece, primals, seeds, tape)
    finally:
        model.bind({name: params[name] for name in names})
    for name, value in zip(names, pulled):
        gradients[name] = gradients[name] + value if name in gradients else value
    cotangents = dict(zip(inputs, pulled[len(names) :]))
    mx.eval(cotangents, [gradients[name] for name in names])
    return cotangents

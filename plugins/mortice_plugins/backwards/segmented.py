"""Backward a few blocks at a time.

The forward keeps the carry at every cut; the objective runs between the two passes, outside every transform; then each
segment is run again and differentiated by itself. The whole carry is detached and seeded, so that what later layers
share (donor K/V) gets its cotangents across segments with no code of its own.

Costs up to one extra forward. Memory: the cuts, and the activations of one segment. Where MLX runs on the CPU, the
blocks of a segment are differentiated in stages around attention and activations (`mortice.staging`), and more than the
cuts may be kept, so that less is run again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx
from attrs import define, evolve, field, frozen

from mortice import staging
from mortice.batch import Gradients
from mortice.context import SpanContext
from mortice.errors import ConfigError
from mortice.linear import on_cpu
from mortice.model import Carry, Model
from mortice.objective import Objective, ObjectiveResult
from mortice.options import ge, in_, option
from mortice.protocols import Params
from mortice.staging import Kept, Tape

KEEP = ("everything", "attention", "cuts")
"""What may stay between the two passes, most memory first."""


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
    keep: str = option(
        "auto",
        help='what stays between the two passes: "cuts", "attention" (and its outputs, so that it runs once) or '
        '"everything" (nothing runs twice); more than cuts only where eager is in force; "auto": attention there',
        validator=in_(("auto", *KEEP)),
    )

    leaner: ClassVar = {"keep": ("everything", "auto", "cuts"), "segment_size": (8, 4, 2, 1)}

    def __attrs_post_init__(self) -> None:
        if not self.eager and self.keep in ("attention", "everything"):
            raise ValueError(f"keep is {self.keep!r}, which needs eager = true: a trace keeps cuts only")

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

    def _kept(self) -> str:
        """What is kept in force. Raises ConfigError where a GPU cannot."""
        eager = self.eager and on_cpu()
        if self.keep == "auto":
            return "attention" if eager else "cuts"
        if self.keep != "cuts" and not eager:
            raise ConfigError(f'backward.keep: {self.keep!r} is for MLX on the CPU; on a GPU "cuts" are kept')
        return self.keep

    def __call__(
        self, model: Model, params: Params, contexts: Sequence[SpanContext], objective: Objective, /
    ) -> tuple[ObjectiveResult, Gradients]:
        model.bind(params)
        bounds = self.segments(len(model.blocks))
        before, after = model.parts_around()
        embedding, final = model.names_of(before, params), model.names_of(after, params)
        # Nothing before the first segment that trains needs a gradient.
        trains = [start for start, stop in bounds if model.names_of(model.blocks[start:stop], params)]
        first = 0 if embedding else min(trains, default=len(model.blocks))
        keep, eager = self._kept(), self.eager and on_cpu()

        gradients: Gradients = {}
        rows: list[tuple[list[_Segment], Carry]] = []
        for ctx in contexts:
            carry = model.begin(ctx, ctx.tokens)
            segments: list[_Segment] = []
            for start, stop in bounds:
                kind = _EagerSegment if eager else _Segment
                segment = kind(model, params, gradients, ctx, start, stop, keep)
                carry = segment.forward(carry, held=start >= first)
                if start >= first:
                    segments.append(segment)
            rows.append((segments, carry))
        hiddens = [model.finish(carry) for _, carry in rows]
        mx.eval(hiddens)
        result = objective(hiddens)
        gradients |= result.gradients
        final = [name for name in final if name not in gradients]
        assert result.dhidden is not None
        del hiddens

        for ctx, dhidden in zip(contexts, result.dhidden):
            segments, carry = rows.pop(0)
            pull = partial(_pull, model, params, gradients)
            seed = pull(lambda carry: {"hidden": model.finish(carry)}, final, carry, {"hidden": dhidden})
            del carry
            while segments:
                seed = segments.pop().backward(seed)
            if embedding:
                pull(partial(_embed, model, ctx), embedding, {}, seed)
        zeros = {name: mx.zeros(value.shape) for name, value in params.items() if name not in gradients}
        return evolve(result, dhidden=None, gradients={}), gradients | zeros


@define(eq=False)
class _Segment:
    """The blocks between two cuts on one row, run again in the backward and differentiated in one trace."""

    model: Model
    params: Params
    gradients: Gradients
    """Of the whole model; added to."""
    ctx: SpanContext
    start: int
    stop: int
    keep: str
    carry: Carry = field(factory=dict)
    """At the first cut."""

    def forward(self, carry: Carry, *, held: bool) -> Carry:
        """The carry at the second cut. `held`: a backward will follow."""
        if held:
            self.carry = carry
        return self._run(carry)

    def backward(self, seed: Carry) -> Carry:
        """Cotangents of the second cut to those of the first."""
        run = partial(self.model.run, ctx=self.ctx, start=self.start, stop=self.stop)
        names = self.model.names_of(self.model.blocks[self.start : self.stop], self.params)
        return _pull(self.model, self.params, self.gradients, run, names, self.carry, seed)

    def _run(self, carry: Carry) -> Carry:
        carry = self.model.run(carry, self.ctx, self.start, self.stop)
        mx.eval(carry)
        return carry


@define(eq=False)
class _EagerSegment(_Segment):
    """The same in stages around what runs eagerly, block by block."""

    _records: list[_Record] = field(factory=list)
    _earlier: Kept = field(factory=list)

    def forward(self, carry: Carry, *, held: bool) -> Carry:
        if held and self.keep == "everything":
            return self._record(carry, ())
        with staging.eagerly() as tape:
            if held:
                self.carry = carry
            carry = self._run(carry)
        if held and self.keep == "attention":
            self._earlier = tape.kept
        return carry

    def backward(self, seed: Carry) -> Carry:
        if not self._records:
            self._record(self.carry, self._earlier, needed=False)
        while self._records:
            record = self._records.pop()
            run = partial(self.model.run, ctx=self.ctx, start=record.block, stop=record.block + 1)
            names = self.model.names_of([self.model.blocks[record.block]], self.params)
            seed = _pull(self.model, self.params, self.gradients, run, names, record.carry, seed, record.tape)
        return seed

    def _record(self, carry: Carry, earlier: Kept | tuple[()], *, needed: bool = True) -> Carry:
        """Run the blocks and remember what runs in each. The last carry is evaluated where it is `needed`."""
        rest = iter(earlier)
        for block in range(self.start, self.stop):
            with staging.eagerly(keep=True, earlier=rest) as tape:
                after = self.model.run(carry, self.ctx, block, block + 1)
            self._records.append(_Record(block, carry, tape))
            if needed or block + 1 < self.stop:
                mx.eval(after)
            carry = after
        return carry


@frozen(eq=False)
class _Record:
    block: int
    carry: Carry
    """Before the block."""
    tape: Tape


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

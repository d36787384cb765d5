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

import attrs
import mlx.core as mx
from attrs import define, evolve, field, frozen

from mortice import staging
from mortice.batch import Gradients
from mortice.compiling import compiled, padded, plain
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

    compile: bool = option(
        False,
        help="compile segments (mx.compile) of rows that do not branch, padded to a multiple of 64 tokens; for a GPU: "
        "on the CPU it takes the place of eager and is slower",
    )

    head_outside_traces: ClassVar = True
    leaner: ClassVar = {"keep": ("everything", "auto", "cuts"), "segment_size": (8, 4, 2, 1)}

    def __attrs_post_init__(self) -> None:
        if self.keep in ("attention", "everything") and (self.compile or not self.eager):
            raise ValueError(
                f"keep is {self.keep!r}, which needs eager = true and compile = false: a trace keeps cuts only"
            )
        if self.keep in ("attention", "everything") and not on_cpu():
            raise ValueError(
                f"keep is {self.keep!r}, which is for MLX on the CPU; a GPU keeps cuts only ('auto', 'cuts')"
            )
        if self.cuts and self.segment_size != attrs.fields(type(self)).segment_size.default:
            raise ValueError("cuts and segment_size both say where segments begin; give one of them")

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

    @property
    def _eager(self) -> bool:
        return self.eager and not self.compile and on_cpu()

    @property
    def _kept(self) -> str:
        """What is kept in force."""
        return self.keep if self.keep != "auto" else "attention" if self._eager else "cuts"

    def __call__(
        self, model: Model, params: Params, contexts: Sequence[SpanContext], objective: Objective, /
    ) -> tuple[ObjectiveResult, Gradients]:
        model.bind(params)
        bounds = self.segments(len(model.blocks))
        contexts = self._prepared(contexts)
        before, after = model.parts_around()
        embedding, final = model.names_of(before, params), model.names_of(after, params)
        # Nothing before the first segment that trains needs a gradient.
        trains = [start for start, stop in bounds if model.names_of(model.blocks[start:stop], params)]
        first = 0 if embedding else min(trains, default=len(model.blocks))

        gradients: Gradients = {}
        rows: list[tuple[list[_Segment], Carry]] = []
        for ctx in contexts:
            carry = model.begin(ctx, ctx.tokens)
            segments: list[_Segment] = []
            for start, stop in bounds:
                segment = self._segment(model, params, gradients, ctx, start, stop)
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

        dhiddens = list(result.dhidden)
        result = evolve(result, dhidden=None, gradients={})
        for ctx in contexts:
            (segments, carry), dhidden = rows.pop(0), dhiddens.pop(0)
            pull = partial(_pull, model, params, gradients)
            seed = pull(lambda carry: {"hidden": model.finish(carry)}, final, carry, {"hidden": dhidden})
            del carry, dhidden
            while segments:
                seed = segments.pop().backward(seed)
            if embedding:
                pull(partial(_embed, model, ctx), embedding, {}, seed)
        zeros = {name: mx.zeros(value.shape) for name, value in params.items() if name not in gradients}
        return result, gradients | zeros

    def score(
        self, model: Model, params: Params, contexts: Sequence[SpanContext], objective: Objective, /
    ) -> ObjectiveResult:
        model.bind(params)
        hiddens = []
        for ctx in self._prepared(contexts):
            carry = model.begin(ctx, ctx.tokens)
            for start, stop in self.segments(len(model.blocks)):
                carry = self._segment(model, params, {}, ctx, start, stop).forward(carry, held=False)
            hiddens.append(model.finish(carry))
            mx.eval(hiddens[-1])
        return objective.scored(hiddens, traced=False)

    def _prepared(self, contexts: Sequence[SpanContext]) -> Sequence[SpanContext]:
        return [padded(ctx) if plain(ctx) else ctx for ctx in contexts] if self.compile else contexts

    def _segment(
        self, model: Model, params: Params, gradients: Gradients, ctx: SpanContext, start: int, stop: int
    ) -> _Segment:  # fmt: skip
        kind = _CompiledSegment if self.compile and plain(ctx) else _EagerSegment if self._eager else _Segment
        return kind(model, params, gradients, ctx, start, stop, self._kept)


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
class _CompiledSegment(_Segment):
    """The same, forward and backward each compiled. The pieces capture nothing of the step."""

    def backward(self, seed: Carry) -> Carry:
        names = self.model.names_of(self.model.blocks[self.start : self.stop], self.params)
        piece = partial(_backward_piece, self.model, self.start, self.stop, tuple(names))
        found, cotangents = self._compiled(("backward", *names), piece, self.carry, seed)
        mx.eval(found, cotangents)
        for name, value in found.items():
            self.gradients[name] = self.gradients[name] + value if name in self.gradients else value
        return cotangents

    def _run(self, carry: Carry) -> Carry:
        piece = partial(_forward_piece, self.model, self.start, self.stop)
        found: Carry = self._compiled(("forward",), piece, carry)
        mx.eval(found)
        return found

    def _compiled(self, name: tuple[str, ...], piece: Callable[..., Any], *trees: Carry) -> Any:
        """The piece with all weights of the segment as its arguments, frozen ones too: what is captured is kept."""
        named = self.model.named_parameters()
        weights = {name: named[name] for name in self.model.names_of(self.model.blocks[self.start : self.stop], named)}
        weights |= {name: value for name, value in self.params.items() if name in weights}
        try:
            return compiled(self.model, (*name, self.start, self.stop), piece, self.ctx, weights, *trees)
        finally:
            self.model.bind(weights)


def _forward_piece(model: Model, start: int, stop: int, ctx: SpanContext, weights: Params, carry: Carry) -> Carry:
    model.bind(weights)
    return model.run(carry, ctx, start, stop)


def _backward_piece(
    model: Model, start: int, stop: int, names: Sequence[str],
    ctx: SpanContext, weights: Params, carry: Carry, seed: Carry,
) -> tuple[Gradients, Carry]:  # fmt: skip
    def piece(*arrays: mx.array) -> list[mx.array]:
        found = _forward_piece(
            model, start, stop, ctx, weights | dict(zip(names, arrays)), dict(zip(carry, arrays[len(names) :]))
        )
        return [found[key] for key in seed]

    primals = [*(weights[name] for name in names), *carry.values()]
    pulled = staging.pull(piece, primals, list(seed.values()))
    return dict(zip(names, pulled)), dict(zip(carry, pulled[len(names) :]))


@define(eq=False)
class _EagerSegment(_Segment):
    """The same in stages around what runs eagerly, block by block."""

    _records: list[_Record] = field(factory=list)
    _earlier: Kept = field(factory=list)

    def forward(self, carry: Carry, *, held: bool) -> Carry:
        if held and self.keep == "everything":
            return self._record(carry, ())
        with staging.eagerly(keep_outputs=held and self.keep == "attention") as tape:
            if held:
                self.carry = carry
            carry = self._run(carry)
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
        pulled = staging.pull(piece, primals, seeds) if tape is None else staging.vjp(piece, primals, seeds, tape)
    finally:
        model.bind({name: params[name] for name in names})
    for name, value in zip(names, pulled):
        gradients[name] = gradients[name] + value if name in gradients else value
    cotangents = dict(zip(inputs, pulled[len(names) :]))
    mx.eval(cotangents, [gradients[name] for name in names])
    return cotangents

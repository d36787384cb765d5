"""Vector-Jacobian products in stages, between which some operations run eagerly, outside every trace.

Inside a trace everything must be MLX, and on MLX's CPU backend `exp` and `where` are ten times slower than numpy's. So
a piece of a model may hand such an operation to the tape that is active: it runs at once, on evaluated arrays, and
brings its own backward. `vjp` then differentiates what lies between the operations, last stage first, each in a trace
of its own:

    primals ─ stage 0 → inputs of operation 1 → its output ─ stage 1 → … ─ last stage → outputs

Recorded outputs stand in for the operations, so that no stage runs an operation, or a stage before it, again. Where no
tape is active an operation's caller takes its traced twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

import mlx.core as mx
from attrs import define, field, frozen


class Operation(Protocol):
    """An operation on evaluated arrays with a backward of its own. Called outside every trace; may use numpy.

    `worth_keeping` (a class attribute, False where there is none): whether a strategy that runs a piece twice does well
    to keep the output of the first time.
    """

    def forward(self, *inputs: mx.array) -> tuple[mx.array, Any]:
        """The output, evaluated, and whatever the backward wants to know of the forward."""
        ...

    def backward(
        self, inputs: Sequence[mx.array], output: mx.array, saved: Any, cotangent: mx.array
    ) -> Sequence[mx.array]:
        """One cotangent for each input, in its type."""
        ...


@frozen(eq=False)
class Entry:
    """An operation that ran."""

    operation: Operation
    inputs: tuple[mx.array, ...]
    output: mx.array
    saved: Any


class _Reached(BaseException):
    """The stage has got to the inputs of the operation behind it. No error, so that nobody's `except` holds it up."""


Kept: TypeAlias = "list[tuple[mx.array, Any]]"
"""(output, saved) of the operations of a piece that are worth keeping, in order."""


@define(eq=False)
class Tape:
    """What ran in a piece of a model; in `vjp` also what stands in for it."""

    keep: bool = True
    """Whether all that runs is remembered for `vjp`."""
    keep_outputs: bool = False
    """Whether outputs that are worth keeping are remembered, in `kept`."""
    earlier: Iterator[tuple[mx.array, Any]] = field(factory=lambda: iter(()))
    """What was kept of an earlier run of the same piece, to be taken instead of running it again."""
    entries: list[Entry] = field(factory=list)
    kept: Kept = field(factory=list)
    _stand_ins: Sequence[mx.array] | None = None
    _at: int = 0
    _reached: tuple[mx.array, ...] = ()

    def perform(self, operation: Operation, *inputs: mx.array) -> mx.array:
        """Run an operation now, or give what stands in for it."""
        if self._stand_ins is not None:
            self._at += 1
            if self._at <= len(self._stand_ins):
                return self._stand_ins[self._at - 1]
            self._reached = inputs
            raise _Reached
        try:
            mx.eval(inputs)
        except ValueError as error:
            raise RuntimeError(
                f"{type(operation).__name__} runs eagerly here and cannot stand inside a transform of its own "
                "(mx.compile, mx.grad, mx.vmap) in a block; use mx.checkpoint, or no transform"
            ) from error
        worth_keeping = getattr(operation, "worth_keeping", False)
        known = next(self.earlier, None) if worth_keeping else None
        output, saved = operation.forward(*inputs) if known is None else known
        if worth_keeping and self.keep_outputs:
            self.kept.append((output, saved))
        if self.keep:
            self.entries.append(Entry(operation, inputs, output, saved))
        return output

    def stage(
        self, function: Callable[..., Sequence[mx.array]], primals: Sequence[mx.array], outputs: Sequence[mx.array]
    ) -> Sequence[mx.array]:
        """The function up to the operation behind `outputs`: that one's inputs, or what the function returns."""
        self._stand_ins, self._at = outputs, 0
        try:
            with _active(self):
                return function(*primals)
        except _Reached:
            return self._reached
        finally:
            self._stand_ins, self._reached = None, ()


_tape: ContextVar[Tape | None] = ContextVar("mortice_tape", default=None)


def current() -> Tape | None:
    """The tape that operations of the running piece go to; None in a trace and on a GPU."""
    return _tape.get()


@contextmanager
def _active(tape: Tape | None) -> Iterator[Tape | None]:
    token = _tape.set(tape)
    try:
        yield tape
    finally:
        _tape.reset(token)


@contextmanager
def eagerly(
    *, keep: bool = False, keep_outputs: bool = False, earlier: Iterable[tuple[mx.array, Any]] = ()
) -> Iterator[Tape]:
    """Let operations run at once. With `keep` the tape remembers them for `vjp`, with `keep_outputs` the outputs that
    are worth keeping; `earlier` are such outputs of the same piece, which then do not run again."""
    tape = Tape(keep, keep_outputs, iter(earlier))
    with _active(tape):
        yield tape


def pull(
    function: Callable[..., Sequence[mx.array]], primals: Sequence[mx.array], cotangents: Sequence[mx.array]
) -> list[mx.array]:
    """`mx.vjp(function, primals, cotangents)[1]`, right also where two outputs are one array.

    `mx.vjp` itself (0.32) drops all cotangents of such an array but one. Here every output is a node of its own.
    """

    def apart(*arrays: mx.array) -> list[mx.array]:
        return [mx.expand_dims(output, 0) for output in function(*arrays)]

    return list(mx.vjp(apart, list(primals), [mx.expand_dims(c, 0) for c in cotangents])[1])


def vjp(
    function: Callable[..., Sequence[mx.array]],
    primals: Sequence[mx.array],
    cotangents: Sequence[mx.array],
    tape: Tape,
) -> list[mx.array]:
    """What `mx.vjp(function, primals, cotangents)[1]` gives, from the tape of one eager call of the function.

    The tape is used up. The function must perform the same operations in the same order each time.
    """
    primals = list(primals)
    outputs = [entry.output for entry in tape.entries]
    pulled: list[mx.array | None] = [None] * (len(primals) + len(outputs))

    def pull_stage(stage: int, seeds: Sequence[mx.array]) -> None:
        def piece(*arrays: mx.array) -> Sequence[mx.array]:
            return tape.stage(function, arrays[: len(primals)], arrays[len(primals) :])

        found: list[Any] = pull(piece, [*primals, *outputs[:stage]], seeds)
        for i in range(len(found)):
            held, value = pulled[i], found[i]
            pulled[i] = value if held is None else held + value
            # One after the other: what the stage does not use comes as zeros, of a whole weight maybe.
            found[i] = held = value = None
            mx.eval(pulled[i])

    pull_stage(len(outputs), cotangents)
    while tape.entries:
        entry = tape.entries.pop()
        outputs.pop()
        cotangent = pulled.pop()
        assert cotangent is not None
        seeds = entry.operation.backward(entry.inputs, entry.output, entry.saved, cotangent)
        del entry, cotangent
        pull_stage(len(outputs), seeds)
    return [p for p in pulled if p is not None]


@frozen(eq=False)
class Chunked:
    """A function of rows, in chunks of them: one chunk's operations and activations at a time, in both directions.

    Inputs are `x [T, …]` and then the arrays that the function also depends on.
    """

    function: Callable[..., mx.array]
    """`(which rows, x [t, …], *others) → [t, …]`."""
    size: int

    def forward(self, *inputs: mx.array) -> tuple[mx.array, Any]:
        x, *others = inputs
        parts = []
        for rows in _rows(x, self.size):
            with eagerly():
                parts.append(self.function(rows, x[rows], *others))
            mx.eval(parts[-1])
        out = mx.concatenate(parts)
        mx.eval(out)
        return out, None

    def backward(
        self, inputs: Sequence[mx.array], output: mx.array, saved: Any, cotangent: mx.array
    ) -> Sequence[mx.array]:
        x, *others = inputs
        parts = []
        total: list[mx.array] = [mx.zeros_like(other) for other in others]
        for rows in _rows(x, self.size):

            def function(*arrays: mx.array, rows: slice = rows) -> list[mx.array]:
                return [self.function(rows, *arrays)]

            primals = [x[rows], *others]
            with eagerly(keep=True) as tape:
                function(*primals)
            dx, *found = vjp(function, primals, [cotangent[rows]], tape)
            parts.append(dx)
            total = [a + b for a, b in zip(total, found)]
            mx.eval(total)
        return [mx.concatenate(parts), *total]


def _rows(x: mx.array, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, x.shape[0], size)]

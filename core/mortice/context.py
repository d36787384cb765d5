"""Attention, recurrence, positions and keyed randomness of a forward pass: they belong to a context, not to the model.

A model adapter is written once, for plain sequences: it calls `ctx.rope(x, …)`, `ctx.attend(q, k, v, …)` on
`[T, H, d]` and `ctx.scan(…)`. `SpanContext` trains on any forest of spans; `CacheContext` decodes.

No `[T, T]` mask is ever built. A span attends to `[its ancestors' keys ; its own keys]`, causal and aligned to the
lower right. Sliding windows go in blocks of queries against the keys they can reach, and long attention in chunks of
queries; both are recomputed in the backward, so their memory is that of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import mlx.core as mx
import numpy as np
from attrs import define, frozen

from mortice import staging
from mortice.attention import auto_chunk, causal_attention, pieces_of
from mortice.eager_attention import RowAttention, Stretch
from mortice.modules import slots
from mortice.randomness import stable_key
from mortice.staging import Chunked

if TYPE_CHECKING:
    import mlx.nn as nn

    from mortice.batch import Row, Span

CACHE_STEP = 256
"""Tokens by which a K/V cache grows."""

State: TypeAlias = "tuple[mx.array, ...]"
"""What a recurrence carries from token to token."""
Recurrence: TypeAlias = "Callable[[tuple[mx.array, ...], State | None], tuple[mx.array, State]]"
"""(arrays `[T, …]` of consecutive tokens, state before them, None at a beginning) → (`[T, …]`, state behind them)."""

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
        self.trainable: frozenset[tuple[int, Any]] = frozenset()
        """(id of module, attribute) of every parameter that trains; set by the model when it runs."""

    def rope(
        self, x: mx.array, dims: int, *, base: float | None = None, scale: float = 1.0, freqs: mx.array | None = None,
        traditional: bool = False,
    ) -> mx.array:  # fmt: skip
        """Rotary positions on `x [T, H, d]`, arguments as `mx.fast.rope`."""
        raise NotImplementedError

    def rotated(self, rotate: Callable[[mx.array, int], mx.array], x: mx.array) -> mx.array:
        """Positions by a function of one's own: `rotate(x, offset)` on `x [T, H, d]` whose tokens follow each other."""
        raise NotImplementedError

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, window: int | None = None, layer: int = 0
    ) -> mx.array:
        """Causal attention: `q [T, H, d]`, `k, v [T, Hk, d]` → `[T, H, d]`. A `window` hides keys with i − j ≥ window.

        On the CPU it may run at once (`mortice.staging`), so a block must not call it inside a transform of its own
        (`mx.compile`, `mx.grad`); `mx.checkpoint` is no hindrance.

        `layer` names the K/V cache entry when decoding: a layer that attends to another one's keys and values passes
        that one's index."""
        raise NotImplementedError

    def scan(self, recurrence: Recurrence, *inputs: mx.array, layer: int = 0) -> mx.array:
        """A recurrence over the tokens of each sequence: `inputs [T, …]` → `[T, …]`. A sequence goes on from the state
        of the one that it branches from. `layer` names the state when decoding."""
        raise NotImplementedError

    def tokenwise(self, module: nn.Module, x: mx.array) -> mx.array:
        """`module(x)` for what acts on each token alone, in chunks of tokens where that saves memory."""
        return module(x)

    def uniform(self, module: str, width: int) -> mx.array | None:
        """Keyed uniform numbers `[T, width]` for dropout in `module`, or None where nothing is random (evaluation)."""
        return None


@frozen
class Run:
    """Spans that follow each other in the row and on one path, attended to as one: `[start, stop)` and the ranges
    of its ancestors' tokens, root first, adjacent ones merged."""

    start: int
    stop: int
    ancestors: tuple[tuple[int, int], ...]


def runs(spans: Sequence[Span]) -> list[Run]:
    """The fewest attention calls that cover the row: a span that starts where its parent ends joins its run."""
    found: list[Run] = []
    last: int | None = None
    for index, span in enumerate(spans):
        if found and span.parent == last and spans[index - 1].stop == span.start:
            found[-1] = Run(found[-1].start, span.stop, found[-1].ancestors)
        else:
            path: list[tuple[int, int]] = []
            parent = span.parent
            while parent is not None:
                start, stop = spans[parent].start, spans[parent].stop
                path.append((start, path.pop()[1]) if path and path[-1][0] == stop else (start, stop))
                parent = spans[parent].parent
            found.append(Run(span.start, span.stop, tuple(reversed(path))))
        last = index
    return found


@frozen
class Piece:
    """Tokens `[start, stop)` that a recurrence goes through at once, from the state behind token `after` − 1 (None: a
    beginning)."""

    start: int
    stop: int
    after: int | None


def pieces(runs: Sequence[Run]) -> list[Piece]:
    """The fewest pieces: a run is cut where another one branches off."""
    branches = {run.ancestors[-1][1] for run in runs if run.ancestors}
    found: list[Piece] = []
    for run in runs:
        cuts = [run.start, *sorted(b for b in branches if run.start < b < run.stop), run.stop]
        after = run.ancestors[-1][1] if run.ancestors else None
        for start, stop in pairwise(cuts):
            found.append(Piece(start, stop, after))
            after = stop
    return found


@define
class Randomness:
    """Names that key every draw of one forward and backward: the run's seed, the optimizer step, the pass."""

    seed: int
    step: int
    turn: int = 0


class SpanContext(Context):
    """Training on one row. A span sees its ancestors and causally itself; positions come from the spans.

    `attention_chunk`: queries a chunk in full attention, 0 for never, None to choose by size where the backend's
    attention keeps the scores for its backward (the CPU). `mlp_chunk`: tokens a chunk in `tokenwise`, 0 for whole.
    `randomness`: None in evaluation.
    """

    def __init__(
        self, row: Row, *, attention_chunk: int | None = None, mlp_chunk: int = 0, randomness: Randomness | None = None
    ) -> None:
        super().__init__()
        self.row = row
        self.tokens = mx.array(row.tokens)  # [T]
        self.runs = runs(row.spans)
        self._attention_chunk = attention_chunk
        self._mlp_chunk = mlp_chunk
        self._randomness = randomness
        self._part = slice(None)
        """Tokens of the row that `tokenwise` or `scan` is at."""
        self._drawn: dict[tuple[str, int], None] | None = None
        self._given: Mapping[tuple[str, int], mx.array] | None = None
        positions = np.concatenate([s.position + np.arange(s.length) for s in row.spans])
        self._positions = mx.array(positions.astype(np.int32))  # [T]
        self._positions_key = positions.astype(np.int32).tobytes()
        self._plain = bool(np.array_equal(positions, np.arange(len(positions))))

    def rope(
        self, x: mx.array, dims: int, *, base: float | None = None, scale: float = 1.0, freqs: mx.array | None = None,
        traditional: bool = False,
    ) -> mx.array:  # fmt: skip
        kwargs: dict[str, Any] = {"traditional": traditional, "base": base, "scale": scale, "freqs": freqs}
        if self._plain:
            x = x.swapaxes(0, 1)[None]  # [1, H, T, d]
            return mx.fast.rope(x, dims, offset=0, **kwargs)[0].swapaxes(0, 1)
        # One call with T on the batch axis: each token has an offset of its own.
        return mx.fast.rope(x[:, :, None], dims, offset=self._positions, **kwargs)[:, :, 0]

    def rotated(self, rotate: Callable[[mx.array, int], mx.array], x: mx.array) -> mx.array:
        if self._plain:
            return rotate(x, 0)
        spans = [span for span in self.row.spans if span.length]
        return mx.concatenate([rotate(x[span.start : span.stop], span.position) for span in spans])

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, window: int | None = None, layer: int = 0
    ) -> mx.array:
        tape = staging.current()
        if tape is not None:
            stretches = [self._stretch(run, q.shape[1], window) for run in self.runs]
            return tape.perform(RowAttention(stretches, scale), q, k, v)
        q, k, v = (x.swapaxes(0, 1)[None] for x in (q, k, v))  # [1, H, T, d]
        if len(self.runs) == 1:
            out = causal_attention(q, k, v, scale, window=window, chunk=self._attention_chunk)
            return out[0].swapaxes(0, 1)
        cuts = [run.stop for run in self.runs[:-1]]
        parts = []
        for run, queries in zip(self.runs, mx.split(q, cuts, axis=2)):
            ranges = _reachable((*run.ancestors, (run.start, run.stop)), run.stop - run.start, window)
            own_k, own_v = (_gather(x, ranges) for x in (k, v))
            parts.append(causal_attention(queries, own_k, own_v, scale, window=window, chunk=self._attention_chunk))
        return mx.concatenate(parts, axis=2)[0].swapaxes(0, 1)

    def scan(self, recurrence: Recurrence, *inputs: mx.array, layer: int = 0) -> mx.array:
        states: dict[int | None, State | None] = {None: None}
        outs = []
        for piece in pieces(self.runs):
            self._part = slice(piece.start, piece.stop)
            try:
                out, states[piece.stop] = recurrence(tuple(x[self._part] for x in inputs), states[piece.after])
            finally:
                self._part = slice(None)
            outs.append(out)
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    def _stretch(self, run: Run, heads: int, window: int | None) -> Stretch:
        length = run.stop - run.start
        ranges = _reachable((*run.ancestors, (run.start, run.stop)), length, window)
        keys = sum(stop - start for start, stop in ranges)
        chunk = auto_chunk(heads, keys) if self._attention_chunk is None else self._attention_chunk
        return Stretch(run.start, tuple(ranges), pieces_of(length, keys, window, chunk))

    def tokenwise(self, module: nn.Module, x: mx.array) -> mx.array:
        size = self._mlp_chunk
        if not size or x.shape[0] <= size:
            return module(x)
        places = [(owner, key) for _, owner, key in slots("", module) if (id(owner), key) in self.trainable]

        def chunk(part: slice, x: mx.array, *values: mx.array) -> mx.array:
            # What trains is passed in and put in place inside: a captured array would be a constant.
            held = [owner[key] for owner, key in places]
            _put(places, values)
            self._part = part
            try:
                with activate(self):  # a recomputation comes after the forward has left its context
                    return module(x)
            finally:
                self._part = slice(None)
                _put(places, held)

        inputs = (x, *(owner[key] for owner, key in places))
        tape = staging.current()
        if tape is not None:
            return tape.perform(Chunked(chunk, size), *inputs)
        parts: list[Any] = []
        for start in range(0, x.shape[0], size):
            part = slice(start, start + size)
            parts.append(mx.checkpoint(partial(chunk, part))(x[part], *inputs[1:]))
        return mx.concatenate(parts)

    def on(self, row: Row) -> SpanContext:
        """The same way to go through another row."""
        return SpanContext(
            row, attention_chunk=self._attention_chunk, mlp_chunk=self._mlp_chunk, randomness=self._randomness
        )

    @property
    def shape(self) -> Hashable:
        """Equal for rows on which blocks do the same work, up to the values of arrays."""
        places = None if self._plain else self._positions_key
        options = self._attention_chunk, self._mlp_chunk, self._randomness is None
        return self.row.length, tuple(self.runs), places, options

    @contextmanager
    def noting_draws(self) -> Iterator[list[tuple[str, int]]]:
        """(module, width) of the random numbers that are drawn meanwhile, each once."""
        self._drawn = {}
        try:
            drawn: list[tuple[str, int]] = []
            yield drawn
            drawn += self._drawn
        finally:
            self._drawn = None

    @contextmanager
    def given(
        self, draws: Mapping[tuple[str, int], mx.array] | None, constants: Mapping[str, mx.array]
    ) -> Iterator[None]:
        """Take these random numbers and constants instead of the own ones: inside a compiled function, own ones would
        be those of the first call for ever."""
        held = self.constants
        self._given, self.constants = draws, dict(constants)
        try:
            yield
        finally:
            self._given, self.constants = None, held

    def uniform(self, module: str, width: int) -> mx.array | None:
        if self._randomness is None:
            return None
        if self._given is not None:
            return self._given[module, width][self._part]
        if self._drawn is not None:
            self._drawn[module, width] = None
        r = self._randomness
        draws = [
            mx.random.uniform(shape=(span.length, width), key=stable_key(r.seed, r.step, r.turn, span.key, module))
            for span in self.row.spans
        ]
        return mx.concatenate(draws)[self._part]


def _put(places: Sequence[tuple[Any, Any]], values: Sequence[mx.array]) -> None:
    for (owner, key), value in zip(places, values):
        owner[key] = value


def _reachable(ranges: Sequence[tuple[int, int]], queries: int, window: int | None) -> list[tuple[int, int]]:
    """The last token ranges of a path that a window can reach from its last `queries` tokens; all without a window."""
    if window is None:
        return list(ranges)
    left = queries + window - 1
    kept: list[tuple[int, int]] = []
    for start, stop in reversed(ranges):
        if left <= 0:
            break
        start = max(start, stop - left)
        kept.append((start, stop))
        left -= stop - start
    return kept[::-1]


def _gather(x: mx.array, ranges: Sequence[tuple[int, int]]) -> mx.array:
    parts = [x[:, :, start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


class CacheContext(Context):
    """Decoding one sequence: keys and values of earlier tokens, and states of recurrences, are kept by layer.

    Each forward takes the tokens that come next; `advance(n)` says that they are done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.offset = 0
        self._cache: dict[int, tuple[mx.array, mx.array]] = {}
        self._length: dict[int, int] = {}
        self._states: dict[int, State] = {}
        self._next: dict[int, State] = {}
        """States behind the tokens that are not done yet."""

    def rope(
        self, x: mx.array, dims: int, *, base: float | None = None, scale: float = 1.0, freqs: mx.array | None = None,
        traditional: bool = False,
    ) -> mx.array:  # fmt: skip
        x = x.swapaxes(0, 1)[None]  # [1, H, T, d]
        x = mx.fast.rope(x, dims, traditional=traditional, base=base, scale=scale, freqs=freqs, offset=self.offset)
        return x[0].swapaxes(0, 1)

    def rotated(self, rotate: Callable[[mx.array, int], mx.array], x: mx.array) -> mx.array:
        return rotate(x, self.offset)

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, window: int | None = None, layer: int = 0
    ) -> mx.array:
        q, k, v = (x.swapaxes(0, 1)[None] for x in (q, k, v))  # [1, H, T, d]
        end = self.offset + q.shape[2]
        if self._length.get(layer, 0) < end:  # else this forward has written the layer already
            self._write(layer, k, v, end)
        keys, values = (x[:, :, :end] for x in self._cache[layer])
        return causal_attention(q, keys, values, scale, window=window)[0].swapaxes(0, 1)

    def scan(self, recurrence: Recurrence, *inputs: mx.array, layer: int = 0) -> mx.array:
        out, self._next[layer] = recurrence(inputs, self._states.get(layer))
        return out

    def advance(self, tokens: int) -> None:
        self.offset += tokens
        self._states |= self._next
        self._next = {}

    def branch(self) -> CacheContext:
        """A context of its own behind the tokens that are done: several continuations of one prompt."""
        other = CacheContext()
        other.offset, other._length, other._states = self.offset, dict(self._length), dict(self._states)
        other._cache = {layer: (k[:], v[:]) for layer, (k, v) in self._cache.items()}  # written in place
        return other

    def arrays(self) -> list[mx.array]:
        """What the cache holds, to be evaluated."""
        return [x for held in (self._cache, self._states) for kept in held.values() for x in kept]

    def _write(self, layer: int, k: mx.array, v: mx.array, end: int) -> None:
        held = self._cache.get(layer)
        if held is None or held[0].shape[2] < end:
            room = -(-end // CACHE_STEP) * CACHE_STEP
            new = [mx.zeros((1, x.shape[1], room, x.shape[3]), x.dtype) for x in (k, v)]
            if held is not None:
                for fresh, old in zip(new, held):
                    fresh[:, :, : self.offset] = old[:, :, : self.offset]
            held = (new[0], new[1])
        for cache, x in zip(held, (k, v)):
            cache[:, :, self.offset : end] = x
        self._cache[layer] = held
        self._length[layer] = end

"""Decoding many sequences at once: what a context keeps of their tokens, and one forward over all of them.

A forward takes whole prompts that come in and one token of every row that is under way, flat `[T, D]` as in training:
the model sees tokens, and every product is one over all of them. What a sequence sees belongs to `DecodingContext`:

- A *prompt* is run once. What it leaves in every layer (`Prompt`) serves any number of rows.
- A *bundle* is the rows that began in one step behind prompts of like lengths. Its rows have equally many tokens of
  their own, so what they attend to there needs no padding and no mask; the queries of all rows behind one prompt are
  rows of one product with its keys. The two parts are joined by their log-sum-exps.
- A layer with a sliding window keeps the last `window − 1` tokens of a prompt, and of a row a ring of `window`; once
  the window has left the prompt, its keys go.
- A layer that attends to another one's keys and values (it passes that one's index) has none of its own; the state of a
  recurrence is kept for each row.

On the CPU keys and values are written and multiplied in place by numpy, whose exp is fast and whose small products need
no dispatch, large products by MLX (the BLAS that mortice loads); elsewhere everything is MLX (`host = False`; compared
with its twin on the CPU, not run on a GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from attrs import define, frozen

from mortice import staging
from mortice.attention import MASKED
from mortice.batch import Row, Span
from mortice.context import Context, Recurrence, SpanContext, State
from mortice.linear import FEW, on_cpu
from mortice.model import Model

ROOM = 64
"""Tokens by which a cache grows at least."""
SMALL = 2**18
"""Multiplications of a product up to which numpy does it: above, its BLAS starts threads of its own, beside MLX's."""
ALIKE = 1.25
"""Prompts of one bundle are at most so many times as long as its shortest, since they are padded to one length."""
ALIKE_TOKENS = 16
"""Or at most so many tokens longer."""

Array: TypeAlias = "Any"
"""numpy on the host, else MLX: both have what is used here."""


@frozen(eq=False)
class Prompt:
    """What a prompt left behind."""

    length: int
    kept: dict[int, tuple[mx.array, mx.array]]
    """Keys and values of its last tokens by layer, `[Hk, m, d]`."""
    windows: dict[int, int | None]
    """How far back each of these layers is read, None for all the way."""
    states: dict[int, State]
    """Of recurrences, behind its last token."""


class PromptContext(SpanContext):
    """Prompts side by side, each from its beginning, and what they leave behind."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        spans, start = [], 0
        for prompt in prompts:
            spans.append(Span(start, start + len(prompt), None, 0))
            start += len(prompt)
        super().__init__(Row([token for prompt in prompts for token in prompt], spans, [], [], [], [], []))
        self.spans: Sequence[Span] = spans
        self._kept: dict[int, list[tuple[mx.array, mx.array]]] = {}
        self._windows: dict[int, int | None] = {}
        self._states: dict[int, list[State]] = {}

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, window: int | None = None, layer: int = 0
    ) -> mx.array:
        known = self._windows.get(layer, 0)
        if known is not None and (window is None or window > known):  # the first reader, or one that sees further
            self._windows[layer] = window
            self._kept[layer] = [(_last(k, span, window), _last(v, span, window)) for span in self.spans]
        return super().attend(q, k, v, scale=scale, window=window, layer=layer)

    def scan(self, recurrence: Recurrence, *inputs: mx.array, layer: int = 0) -> mx.array:
        outs, states = [], []
        for span in self.spans:
            out, state = recurrence(tuple(x[span.start : span.stop] for x in inputs), None)
            outs.append(out)
            states.append(state)
        self._states[layer] = states
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    def left(self) -> list[Prompt]:
        """What each prompt left, once the forward is through; to be evaluated."""
        return [
            Prompt(
                span.length,
                {layer: kept[i] for layer, kept in self._kept.items()},
                self._windows,
                {layer: states[i] for layer, states in self._states.items()},
            )
            for i, span in enumerate(self.spans)
        ]


def _last(x: mx.array, span: Span, window: int | None) -> mx.array:
    """The tokens of a span that one behind it can see: `[T, Hk, d]` → `[Hk, m, d]`, a copy."""
    start = span.start if window is None else max(span.start, span.stop - window + 1)
    return mx.contiguous(x[start : span.stop].swapaxes(0, 1))


class Store:
    """Keys or values `[n, Hk, room, d]` that are written in place; on the host through numpy."""

    def __init__(self, array: mx.array, host: bool) -> None:
        self.array = array.astype(mx.float32) if host else array
        if host:
            mx.eval(self.array)
        self.view: np.ndarray | None = np.array(self.array, copy=False) if host else None

    @property
    def raw(self) -> Any:
        """What is read and written."""
        return self.array if self.view is None else self.view

    def times(self, x: Array, at: tuple[Any, ...], *, transpose: bool) -> Array:
        """`x [n, Hk, r, ·]` times a part of the store, or its transpose."""
        if self.view is None:
            part = self.array[at]
            return x @ (part.swapaxes(-1, -2) if transpose else part)
        seen = self.view[at]
        if x.shape[-2] * seen.shape[-2] * seen.shape[-1] <= SMALL:
            return x @ (seen.swapaxes(-1, -2) if transpose else seen)
        part = self.array[at]
        out = mx.array(x) @ (part.swapaxes(-1, -2) if transpose else part)
        mx.eval(out)
        return np.array(out, copy=False)

    def grown(self, room: int) -> Store:
        """With more room for tokens."""
        count, heads, held, width = self.array.shape
        larger = Store(mx.zeros((count, heads, room, width), self.array.dtype), self.view is not None)
        larger.raw[:, :, :held] = self.raw
        return larger

    def moved(self, moves: Sequence[tuple[int, int]], count: int) -> Store:
        """With sequences moved (to, from), and only the first `count` of them; memory is given back by halves."""
        for to, source in moves:
            self.raw[to] = self.raw[source]
        if count > self.array.shape[0] // 2:
            return self
        return Store(mx.contiguous(self.array[:count]), self.view is not None)


def _compaction(kept: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Fill the holes that others leave with the last ones: (old places in the new order, moves (to, from))."""
    size = len(kept)
    holes = sorted(set(range(size)) - set(kept))
    moves = list(zip(holes, sorted(i for i in kept if i >= size)))
    taken = dict(moves)
    return [taken.get(i, i) for i in range(size)], moves


Part: TypeAlias = "tuple[Array, Array, Array]"
"""(Σ exp(score − peak) · value `[R, Hk, each, d]`, peak, Σ exp(score − peak) `[R, Hk, each, 1]`)."""


def _softmax(scores: Array) -> tuple[Array, Array, Array]:
    """exp(scores − peak), the peak, and the sum, over the last axis."""
    peak = scores.max(axis=-1, keepdims=True)
    if isinstance(scores, np.ndarray):
        np.subtract(scores, peak, out=scores)
        np.exp(scores, out=scores)
    else:
        scores = mx.exp(scores - peak)
    return scores, peak, scores.sum(axis=-1, keepdims=True)


def _joined(a: Part, b: Part) -> Array:
    """The mean over both parts."""
    exp, maximum = (np.exp, np.maximum) if isinstance(a[1], np.ndarray) else (mx.exp, mx.maximum)
    peak = maximum(a[1], b[1])
    left, right = exp(a[1] - peak), exp(b[1] - peak)
    return (a[0] * left + b[0] * right) / (a[2] * left + b[2] * right)


@define(eq=False)
class _Layer:
    """Keys and values of a bundle in one layer."""

    keys: Store
    values: Store
    """The rows' own."""
    window: int | None
    room: int
    prompt_keys: Store | None
    prompt_values: Store | None
    """Of the prompts, their ends aligned: `[N, Hk, P, d]`. None once no window reaches them."""
    bias: Array | None
    """`[N, 1, 1, P]`, what hides the padding in front of shorter prompts. None where all are of one length."""


class Bundle:
    """Rows under way that began together: `counts[i]` of them behind `prompts[i]`, in this order."""

    def __init__(self, prompts: Sequence[Prompt], counts: Sequence[int], *, longest: int, host: bool) -> None:
        self.lengths = [prompt.length for prompt in prompts]
        self.owner = [i for i, count in enumerate(counts) for _ in range(count)]
        """The prompt of each row."""
        self.done = 0
        """Tokens of each row that have been run."""
        self._longest, self._host = longest, host
        self._states = [dict(prompts[i].states) for i in self.owner]
        self._written: set[int] = set()
        self._layers = {
            layer: self._layer(prompts, layer, keys.shape, values.shape, keys.dtype)
            for layer, (keys, values) in prompts[0].kept.items()
        }
        self._arrange()

    @property
    def rows(self) -> int:
        return len(self.owner)

    @property
    def positions(self) -> list[int]:
        """Of the token that each row runs next."""
        return [self.lengths[i] + self.done for i in self.owner]

    @property
    def nbytes(self) -> int:
        """What its keys, values and states take, prompts included."""
        total = sum(x.nbytes for held in self._states for state in held.values() for x in state)
        for layer in self._layers.values():
            for store in (layer.keys, layer.values, layer.prompt_keys, layer.prompt_values):
                total += 0 if store is None else store.array.nbytes
        return total

    def arrays(self) -> list[mx.array]:
        """What a forward left to be evaluated."""
        found = [x for held in self._states for state in held.values() for x in state]
        if not self._host:
            found += [store.array for layer in self._layers.values() for store in (layer.keys, layer.values)]
        return found

    def _layer(
        self, prompts: Sequence[Prompt], layer: int, keys: tuple[int, ...], values: tuple[int, ...], dtype: mx.Dtype
    ) -> _Layer:
        window = prompts[0].windows[layer]
        lengths = [prompt.kept[layer][0].shape[1] for prompt in prompts]
        width = max(lengths)
        room = min(self._limit(window), ROOM)
        stacked = [_stacked([prompt.kept[layer][part] for prompt in prompts], width) for part in (0, 1)]
        bias: Array | None = None
        if min(lengths) < width:
            hidden = np.arange(width)[None] < width - np.array(lengths)[:, None]
            bias = np.where(hidden, np.float32(MASKED), np.float32(0))[:, None, None]
            bias = bias if self._host else mx.array(bias)
        own = [Store(mx.zeros((self.rows, s[0], room, s[2]), dtype), self._host) for s in (keys, values)]
        behind = [Store(x, self._host) if width else None for x in stacked]
        return _Layer(own[0], own[1], window, room, behind[0], behind[1], bias)

    def _limit(self, window: int | None) -> int:
        """Own tokens that a layer ever has to hold."""
        return self._longest if window is None else min(self._longest, window)

    def _arrange(self) -> None:
        """Where each row's queries stand among those of its prompt."""
        seen = [0] * len(self.lengths)
        slots = []
        for owner in self.owner:
            slots.append(seen[owner])
            seen[owner] += 1
        self._each = max(seen, default=0)
        full = len(set(seen)) == 1 and self.owner == sorted(self.owner)
        places = np.array(self.owner), np.array(slots)
        self._places: Any = None if full else (places if self._host else tuple(map(mx.array, places)))

    def attend(
        self, q: Array, k: Array, v: Array, *, scale: float, window: int | None = None, layer: int = 0
    ) -> Array:  # fmt: skip
        """`q [R, H, d]`, `k, v [R, Hk, d]` of the rows' next tokens → `[R, H, d]`."""
        held = self._layers[layer]
        if layer not in self._written:
            self._write(held, k, v)
            self._written.add(layer)
        rows, heads, _ = q.shape
        q = (q * scale).reshape(rows, k.shape[1], heads // k.shape[1], -1)
        own = self._own(held, q, window)
        behind = self._behind(held, q, window)
        out = own[0] / own[2] if behind is None else _joined(own, behind)
        return out.reshape(rows, heads, -1)

    def _write(self, held: _Layer, k: Array, v: Array) -> None:
        limit = self._limit(held.window)
        if self.done >= held.room and held.room < limit:
            held.room = min(limit, held.room + max(ROOM, held.room // 2))
            held.keys, held.values = held.keys.grown(held.room), held.values.grown(held.room)
        at = self.done % held.room  # a ring, once a window is full
        held.keys.raw[: self.rows, :, at] = k
        held.values.raw[: self.rows, :, at] = v
        if held.window is not None and self.done >= held.window - 1:
            held.prompt_keys = held.prompt_values = None

    def _own(self, held: _Layer, q: Array, window: int | None) -> Part:
        """What the rows' own tokens give."""
        there = min(self.done + 1, held.room)
        at: Any = slice(0, there)
        if window is not None and window < there:  # a reader that sees less than the layer keeps
            last = (np.arange(self.done - window + 1, self.done + 1)) % held.room
            at = last if self._host else mx.array(last)
        rows = slice(0, self.rows)
        if not isinstance(at, slice):
            keys, values = (Store(_taken(s.array[rows], at), self._host) for s in (held.keys, held.values))
            at = slice(None)
        else:
            keys, values = held.keys, held.values
        weights, peak, total = _softmax(self._floats(keys.times(q, (rows, slice(None), at), transpose=True)))
        return values.times(self._stored(weights, q), (rows, slice(None), at), transpose=False), peak, total

    def _behind(self, held: _Layer, q: Array, window: int | None) -> Part | None:
        """What the prompts give: the queries of all rows behind one as rows of one product."""
        if held.prompt_keys is None or held.prompt_values is None:
            return None
        width = held.prompt_keys.array.shape[2]
        seen = width if window is None else min(width, max(0, window - 1 - self.done))
        if not seen:
            return None
        count, each = len(self.lengths), self._each
        rows, kv_heads, shared, dims = q.shape
        if self._places is None:
            x = q.reshape(count, each, kv_heads, shared, dims)
        else:
            x = (np.zeros if self._host else mx.zeros)((count, each, kv_heads, shared, dims), dtype=q.dtype)
            x[self._places] = q
        x = x.swapaxes(1, 2).reshape(count, kv_heads, each * shared, dims)
        at = (slice(0, count), slice(None), slice(width - seen, None))
        scores = self._floats(held.prompt_keys.times(x, at, transpose=True))
        if held.bias is not None:
            scores = scores + held.bias[:count, :, :, width - seen :]
        weights, peak, total = _softmax(scores)
        out = held.prompt_values.times(self._stored(weights, q), at, transpose=False)

        def back(y: Array) -> Array:
            y = y.reshape(count, kv_heads, each, shared, -1).swapaxes(1, 2)
            return y.reshape(rows, kv_heads, shared, -1) if self._places is None else y[self._places]

        return back(out), back(peak), back(total)

    def _floats(self, x: Array) -> Array:
        return x if self._host else x.astype(mx.float32)

    def _stored(self, x: Array, like: Array) -> Array:
        return x if self._host else x.astype(like.dtype)

    def scan(self, recurrence: Recurrence, inputs: Sequence[mx.array], layer: int) -> list[mx.array]:
        """One token of each row, from its state: `inputs [R, …]` → `[1, …]` each."""
        outs = []
        for i, states in enumerate(self._states):
            out, states[layer] = recurrence(tuple(x[i : i + 1] for x in inputs), states.get(layer))
            outs.append(out)
        return outs

    def advance(self) -> None:
        """The rows' next tokens have been run."""
        self.done += 1
        self._written = set()

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Let all other rows go, and prompts that nobody needs. Returns the rows' old places in their new order."""
        order, moves = _compaction(rows)
        for layer in self._layers.values():
            layer.keys, layer.values = (s.moved(moves, len(order)) for s in (layer.keys, layer.values))
        self._states = [self._states[i] for i in order]
        owners = [self.owner[i] for i in order]
        prompts, moves = _compaction(sorted(set(owners)))
        for layer in self._layers.values():
            if layer.bias is not None:
                layer.bias = layer.bias[np.array(prompts) if self._host else mx.array(prompts)]
            if layer.prompt_keys is not None and layer.prompt_values is not None:
                layer.prompt_keys = layer.prompt_keys.moved(moves, len(prompts))
                layer.prompt_values = layer.prompt_values.moved(moves, len(prompts))
        self.lengths = [self.lengths[i] for i in prompts]
        place = {old: new for new, old in enumerate(prompts)}
        self.owner = [place[i] for i in owners]
        self._arrange()
        return order


def _stacked(parts: Sequence[mx.array], width: int) -> mx.array:
    """`[Hk, m, d]` each, zeros in front of shorter ones: `[N, Hk, width, d]`."""
    if len(parts) == 1:
        return parts[0][None]
    return mx.stack([mx.pad(x, [(0, 0), (width - x.shape[1], 0), (0, 0)]) for x in parts])


def _taken(x: mx.array, at: Any) -> mx.array:
    return mx.contiguous(mx.take(x, mx.array(at), axis=2))


def bundled(lengths: Sequence[int]) -> list[list[int]]:
    """Which prompts go into one bundle: shortest first, each with those that are little longer."""
    found: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        shortest = lengths[found[-1][0]] if found else 0
        if found and lengths[i] <= max(shortest * ALIKE, shortest + ALIKE_TOKENS):
            found[-1].append(i)
        else:
            found.append([i])
    return found


class DecodingContext(Context):
    """One forward: `prompts` that come in, each whole, then the next token of every row of `bundles`."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], bundles: Sequence[Bundle], tokens: Sequence[int], *, host: bool
    ) -> None:  # fmt: skip
        super().__init__()
        self._prompts = PromptContext(prompts) if prompts else None
        self._bundles = bundles
        self._host = host
        self.before = self._prompts.row.length if self._prompts else 0
        """Tokens of prompts."""
        own = [token for prompt in prompts for token in prompt]
        self.tokens = mx.array([*own, *tokens])  # [T]
        after = [place for bundle in bundles for place in bundle.positions]
        self._starts = [(span.start, 0) for span in self._prompts.spans] if self._prompts else []
        self._starts += [(self.before + i, place) for i, place in enumerate(after)]
        inside = [np.arange(len(prompt)) for prompt in prompts]
        self._positions = mx.array(np.concatenate([*inside, np.array(after, int)]).astype(np.int32))  # [T]
        ends = [span.stop - 1 for span in self._prompts.spans] if self._prompts else []
        self.last = mx.array([*ends, *range(self.before, self.before + len(tokens))])
        """The tokens behind which one is wanted: of each prompt, then of each row."""

    def rope(
        self, x: mx.array, dims: int, *, base: float | None = None, scale: float = 1.0, freqs: mx.array | None = None,
        traditional: bool = False,
    ) -> mx.array:  # fmt: skip
        kwargs: dict[str, Any] = {"traditional": traditional, "base": base, "scale": scale, "freqs": freqs}
        return mx.fast.rope(x[:, :, None], dims, offset=self._positions, **kwargs)[:, :, 0]

    def rotated(self, rotate: Callable[[mx.array, int], mx.array], x: mx.array) -> mx.array:
        stops = [start for start, _ in self._starts[1:]] + [x.shape[0]]
        return mx.concatenate([rotate(x[start:stop], at) for (start, at), stop in zip(self._starts, stops)])

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, window: int | None = None, layer: int = 0
    ) -> mx.array:
        given: dict[str, Any] = {"scale": scale, "window": window, "layer": layer}
        cut, parts = self.before, []
        if self._prompts is not None:
            parts.append(self._prompts.attend(q[:cut], k[:cut], v[:cut], **given))
        if self._bundles:
            parts.append(self._attend_rows(*(x[cut:] for x in (q, k, v)), **given))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _attend_rows(self, q: mx.array, k: mx.array, v: mx.array, **given: Any) -> mx.array:
        arrays: list[Any] = [q, k, v]
        if self._host:
            arrays = [x.astype(mx.float32) for x in arrays]
            mx.eval(arrays)
            arrays = [np.array(x, copy=False) for x in arrays]
        start = 0
        outs: list[Any] = []
        for bundle in self._bundles:
            outs.append(bundle.attend(*(x[start : start + bundle.rows] for x in arrays), **given))
            start += bundle.rows
        if len(outs) > 1:
            outs = [np.concatenate(outs) if self._host else mx.concatenate(outs)]
        out = mx.array(outs[0]) if self._host else outs[0]
        return out.astype(q.dtype)

    def scan(self, recurrence: Recurrence, *inputs: mx.array, layer: int = 0) -> mx.array:
        outs, start = [], self.before
        if self._prompts is not None:
            outs.append(self._prompts.scan(recurrence, *(x[:start] for x in inputs), layer=layer))
        for bundle in self._bundles:
            outs += bundle.scan(recurrence, [x[start : start + bundle.rows] for x in inputs], layer)
            start += bundle.rows
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    def left(self) -> list[Prompt]:
        """What each prompt left, once the forward is through."""
        return [] if self._prompts is None else self._prompts.left()


def forward(
    model: Model, prompts: Sequence[Sequence[int]], bundles: Sequence[Bundle], tokens: Sequence[int], *,
    host: bool | None = None,
) -> tuple[Array, list[Prompt]]:  # fmt: skip
    """Run prompts, and the next token of every row of the bundles, in order.

    Returns the logits `[N + R, V]` behind each prompt and then behind each row, soft-capped and float32 (numpy on the
    host, to be used up), and what the prompts left.
    """
    host = on_cpu() if host is None else host
    ctx = DecodingContext(prompts, bundles, tokens, host=host)
    eager = on_cpu() and len(ctx.tokens) > FEW
    with staging.eagerly() if eager else nullcontext():
        hidden = model.hidden(ctx, ctx.tokens)[ctx.last]
    logits = model.output.project(hidden)
    left = ctx.left()
    kept = [x for prompt in left for each in (*prompt.kept.values(), *prompt.states.values()) for x in each]
    mx.eval(logits, kept, [bundle.arrays() for bundle in bundles])
    for bundle in bundles:
        bundle.advance()
    cap = model.output.softcap
    if not host:
        return (logits if cap is None else cap * mx.tanh(logits / cap)), left
    numbers = np.array(logits, copy=False)
    if cap is not None:  # MLX's tanh takes the CPU thirty times as long
        numbers /= cap
        np.tanh(numbers, out=numbers)
        numbers *= cap
    return numbers, left

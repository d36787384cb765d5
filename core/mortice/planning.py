"""What a run will need, measured on two small slices of it: peak memory by part, and seconds a step.

A formula for every strategy, model and backend would be wrong for most of them. So the strategies of the run themselves
go forward and backward over its longest rows, on the first few layers of its model and on a few more; what a layer
adds is then known, and the rest of the layers is extrapolated. Weights, optimizer and gradients are counted from
their shapes. A model whose layers do not repeat is run whole.

What this leaves out: what the allocator caches (`train.cache_limit`), Python's own memory, data held in RAM.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from attrs import evolve, frozen
from mlx.utils import tree_flatten

from mortice.batch import Completion, Gradients, Group, MicroBatch
from mortice.context import Randomness, SpanContext
from mortice.linear import on_cpu
from mortice.model import Model
from mortice.protocols import LiveOptimizer, Params
from mortice.step import Engine

PARTS = ("weights", "adapter", "optimizer", "gradients", "kept", "working")
"""Parts of the peak, in the order in which they are shown."""
MEANING = {
    "weights": "of the model, as they are held",
    "adapter": "trainable parameters beside the weights",
    "optimizer": "its state",
    "gradients": "of earlier micro-batches of the step",
    "kept": "what the layers leave behind for the backward",
    "working": "the largest of what runs at once: a segment, attention, a head tile",
}

STEADY, MORE = 6, 3
"""Layers from which on another one adds what every other adds (with fewer, MLX orders a trace in other ways), and how
many more of them are run to see how much that is."""
ROUGH = (3, 2)
"""The same for a first look, which may err by a tenth."""
STEPS = 8
"""Steps that are laid out to find the largest micro-batch, from the longest groups to the shortest."""
WARM = 0.5
"""Seconds of a run from which on it needs no second one to be timed."""


@frozen
class Estimate:
    """What a run is predicted to need. Bytes and seconds."""

    parts: Mapping[str, int]
    """Of `PARTS`; they add up to the peak of a forward and backward."""
    update: int
    """The peak while the optimizer steps."""
    elsewhere: int
    """Arrays that the process holds beside the run, which its peak stands on: of the caller, of models before."""
    seconds: float
    """One optimizer step on the longest rows of the data."""
    head: int
    """Working memory of the head alone on the scored tokens of these rows."""
    attention: int
    """Working memory of one attention call alone, forward and backward."""
    tokens: int
    """Tokens of the largest micro-batch."""
    longest: int
    """Tokens of its longest row."""
    scored: int
    micro_batches: int
    """In the step that was looked at."""
    layers: tuple[int, ...]
    """Layers that were run: two numbers where the rest was extrapolated."""
    all_layers: int

    @property
    def peak(self) -> int:
        return max(sum(self.parts.values()), self.update) + self.elsewhere


@frozen(eq=False)
class Workload:
    """What a run has to get through: its largest micro-batch, and its longest step."""

    largest: tuple[Group, ...]
    """Groups of the largest micro-batch."""
    micro_batches: int
    """Of the step of the longest groups."""
    tokens: int
    """Of that step."""


def workload(engine: Engine, groups: Sequence[Group], batch_size: int) -> Workload:
    """What these groups come to in steps of `batch_size`. Vectors that a run fills in later are zeros.

    The largest micro-batch is in the step of the longest groups, but for a layout that packs: where two long groups do
    not fit one row, four shorter ones may fill it. So steps of shorter groups are laid out too.
    """
    longest = sorted(groups, key=lambda group: -group.tokens)
    last = max(0, len(longest) - batch_size)
    starts = sorted({round(last * i / (STEPS - 1)) for i in range(STEPS)})
    steps = [_laid_out(engine, longest[start : start + batch_size]) for start in starts]
    largest = max((micro for micros in steps for micro in micros), key=lambda micro: micro.tokens)
    return Workload(largest.given, len(steps[0]), sum(micro.tokens for micro in steps[0]))


def _laid_out(engine: Engine, groups: Sequence[Group]) -> Sequence[MicroBatch]:
    filled = [_filled(group) for group in groups]
    return engine.lay_out(filled)


def _filled(group: Group) -> Group:
    def fill(c: Completion) -> Completion:
        zeros = (0.0,) * len(c.ids)
        advantage = 0.0 if c.advantage is None else c.advantage
        names = ("ref_logprobs", "old_logprobs", "sampler_logprobs")
        vectors: dict[str, Any] = {name: getattr(c, name) or zeros for name in names}
        return evolve(c, advantage=advantage, **vectors)

    unrelated = None if group.unrelated is None else _filled(group.unrelated)
    return evolve(group, completions=[fill(c) for c in group.completions], unrelated=unrelated)


def estimate(
    engine: Engine,
    params: Params,
    optimizer: LiveOptimizer,
    work: Workload,
    *,
    rough: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Estimate:
    """Predict a run's peak and its time. Runs a few layers of the model; changes nothing.

    `rough`: fewer layers, once, and no look at head and attention alone.
    """
    model = engine.model
    layers = model.num_layers
    elsewhere = _held_elsewhere(model, params)
    counts = _layer_counts(engine, work, *(ROUGH if rough else (STEADY, MORE)))
    more = counts[-1] - counts[0]
    probes = []
    for count in counts:
        tell(f"running {count} of {layers} layers")
        probes.append(_probe(engine, params, optimizer, work.largest, count, once=rough))

    first, last = probes[0], probes[-1]
    gradients = sum(p.nbytes for p in params.values())
    beyond = layers - counts[0]

    def grown(of: Callable[[_Probe], float]) -> tuple[float, float]:
        """(what another layer adds, what all layers come to)."""
        slope = (of(last) - of(first)) / more if len(probes) == 2 else 0.0
        return slope, of(first) + slope * beyond

    growth, top = grown(lambda probe: probe.peak)
    # The peak is at the top of the backward, or at its end, when all gradients are there.
    extra = max(top, first.peak - first.gradients - growth * counts[0] + gradients)
    kept = max(0, round(growth * layers)) if len(probes) == 2 else 0
    update = max(0.0, grown(lambda probe: probe.update)[1])
    # Bounded, since another process on the machine makes the slope of two timings anything.
    pace, _ = grown(lambda probe: probe.seconds)
    pace = min(max(0.0, pace), *(probe.seconds / count for probe, count in zip(probes, counts)))
    seconds = last.seconds + pace * (layers - counts[-1])

    named = model.named_parameters()
    weights = sum(p.nbytes for name, p in named.items() if name not in params)
    own = sum(p.nbytes for p in params.values())
    optimizer.init(dict(params))
    state = sum(a.nbytes for _, a in tree_flatten(optimizer.state) if isinstance(a, mx.array))
    held = gradients if work.micro_batches > 1 else 0
    micro = engine.arrange(work.largest).micros[0]
    return Estimate(
        parts={
            "weights": weights,
            "adapter": own,
            "optimizer": state,
            "gradients": held,
            "kept": min(kept, round(extra)),
            "working": max(0, round(extra) - min(kept, round(extra))),
        },
        update=weights + own + state + 2 * gradients + round(update),
        elsewhere=elsewhere,
        seconds=seconds * work.tokens / micro.tokens,
        head=0 if rough else _head_memory(engine, micro.rows),
        attention=0 if rough else _attention_memory(engine, work),
        tokens=micro.tokens,
        longest=max(row.length for row in micro.rows),
        scored=sum(row.scored for row in micro.rows),
        micro_batches=work.micro_batches,
        layers=counts,
        all_layers=layers,
    )


def least_peak(engine: Engine, params: Params, optimizer: LiveOptimizer, work: Workload) -> int:
    """Peak of the few layers that a rough estimate begins with: what the work takes at least."""
    count = _layer_counts(engine, work, *ROUGH)[0]
    return _probe(engine, params, optimizer, work.largest, count, once=True).peak


def _held_elsewhere(model: Model, params: Params) -> int:
    """Bytes of arrays that are neither weights nor parameters. Reads the weights."""
    model.read()
    own = {id(array): array for array in (*model.named_parameters().values(), *params.values())}
    mx.eval(list(own.values()))
    gc.collect()  # what is garbage now must not be freed amid a measurement
    return max(0, mx.get_active_memory() - sum(array.nbytes for array in own.values()))


def _layer_counts(engine: Engine, work: Workload, few: int, more: int) -> tuple[int, ...]:
    """How many layers to run, smaller number first; one number, all of them, where no smaller one tells enough."""
    repeats = _repeats(engine, work)
    first, further = (repeats * math.ceil(count / repeats) for count in (few, more))
    layers = engine.model.num_layers
    return (first, first + further) if first + further < layers else (layers,)


@frozen
class _Probe:
    peak: int
    """Above what was held before."""
    gradients: int
    seconds: float
    update: int
    """Peak of the optimizer above parameters, state and gradients, these both before and after clipping."""


def _probe(
    engine: Engine, params: Params, optimizer: LiveOptimizer, groups: Sequence[Group], layers: int, *, once: bool
) -> _Probe:  # fmt: skip
    """One forward and backward of the first layers; a short one twice unless `once`, since the first run warms up."""
    model = engine.model if layers == engine.model.num_layers else engine.model.first_layers(layers)
    own = {name: params[name] for name in model.names_of(model.parts, params)}
    small = evolve(engine, model=model)
    model.read()
    mx.eval(list(model.named_parameters().values()), own)
    peaks: list[int] = []
    seconds: list[float] = []
    gradients: Gradients = {}
    while len(seconds) < (1 if once else 2) and sum(seconds) < WARM:
        gradients.clear()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        start = time.perf_counter()
        _, gradients = small.gradients(own, groups, Randomness(0, 0))
        seconds.append(time.perf_counter() - start)
        peaks.append(mx.get_peak_memory() - before)
    engine.model.bind(own)
    size = sum(g.nbytes for g in gradients.values())
    return _Probe(max(peaks), size, min(seconds), _update(optimizer, own, gradients))


def _update(optimizer: LiveOptimizer, params: Params, gradients: Gradients) -> int:
    """Peak of one update, above what is held before it. Its result is dropped."""
    optimizer.init(dict(params))
    clipped = {name: 0.5 * g for name, g in gradients.items()}
    mx.eval(clipped, optimizer.state)

    def step() -> None:
        new = optimizer.apply_gradients(clipped, dict(params))
        mx.eval(new, optimizer.state)

    return _peak_of(step)


class _Recording(SpanContext):
    """Notes what attention is asked for; computes nothing."""

    def __init__(self, row: Any) -> None:
        super().__init__(row)
        self.calls: list[tuple[Any, ...]] = []

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, window: int | None = None, layer: int = 0
    ) -> mx.array:
        self.calls.append((q.shape[1:], k.shape[1:], v.shape[1:], scale, window))
        return mx.zeros((*q.shape[:2], v.shape[2]), q.dtype)


def _signatures(engine: Engine, work: Workload) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """(what each layer looks like, every distinct attention call). A graph is built and never run."""
    model = engine.model
    ctx = _Recording(engine.arrange(work.largest[:1]).micros[0].rows[0])
    carry = model.begin(ctx, ctx.tokens)
    found: dict[int, list[Any]] = {}
    calls: list[tuple[Any, ...]] = []
    for place, block in enumerate(model.blocks):
        ctx.calls = []
        carry = model.run(carry, ctx, place, place + 1)
        shapes = [(n, p.shape, p.dtype) for n, p in _own_parameters(block).items()]
        found.setdefault(block.layer, []).append((type(block), str(shapes), tuple(ctx.calls), tuple(carry)))
        calls += [call for call in ctx.calls if call not in calls]
    return [found[layer] for layer in sorted(found)], calls


def _own_parameters(block: Any) -> dict[str, mx.array]:
    from mortice.modules import slots

    return {name: owner[key] for name, owner, key in slots("", block)}


def _repeats(engine: Engine, work: Workload) -> int:
    """The fewest layers after which both the model and the backward's work repeat; all where they do not."""
    layers, _ = _signatures(engine, work)
    count = len(layers)
    period = next(
        p for p in range(1, count + 1) if all(layers[i] == layers[i + p] for i in range(count - p))
    )  # fmt: skip
    stride = getattr(engine.backward, "stride", 1)
    if stride is None:
        return count
    blocks = len(engine.model.blocks) // count
    stride = stride // math.gcd(stride, blocks)
    return min(count, math.lcm(period, stride))


def _head_memory(engine: Engine, rows: Sequence[Any]) -> int:
    """Peak of the head on random hidden states of these rows."""
    output = engine.model.output
    width = output.take(mx.array([0])).shape[1]
    scored = sum(row.scored for row in rows)
    hidden = mx.random.normal((scored, width), key=mx.random.key(0)).astype(engine.model.dtype)
    targets = mx.zeros((scored,), mx.int32)

    def run() -> None:
        scores = engine.head.score(hidden, targets, output, grad=True)
        mx.eval(scores.logprobs, scores.dhidden)

    mx.eval(hidden, targets)
    return 0 if getattr(engine.head, "output_for", None) else _peak_of(run)


def _attention_memory(engine: Engine, work: Workload) -> int:
    """The largest peak of one attention call on the longest row, forward and backward."""
    _, calls = _signatures(engine, work)
    micro = engine.arrange(work.largest).micros[0]
    row = max(micro.rows, key=lambda row: row.length)
    peaks = [0]
    for q, k, v, scale, window in calls:
        ctx = SpanContext(row, attention_chunk=engine.attention_chunk)
        arrays = [mx.zeros((row.length, *shape), engine.model.dtype) for shape in (q, k, v)]
        seed = mx.zeros((row.length, q[0], v[1]), engine.model.dtype)
        mx.eval(arrays, seed)

        attend = partial(ctx.attend, scale=scale, window=window)
        peaks.append(_peak_of(partial(_backward, attend, arrays, seed)))
    return max(peaks)


def _backward(attend: Callable[..., mx.array], arrays: list[mx.array], seed: mx.array) -> None:
    mx.eval(mx.vjp(lambda *x: [attend(*x)], arrays, [seed])[1])


def _peak_of(run: Callable[[], None]) -> int:
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return mx.get_peak_memory() - before


def machine_memory() -> int:
    """Bytes that arrays may take on this machine: the GPU's working set, or the memory of the machine."""
    if not on_cpu():
        info: Mapping[str, Any] = mx.device_info()
        told = info.get("max_recommended_working_set_size") or info.get("total_memory") or info.get("memory_size")
        if told:
            return int(told)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

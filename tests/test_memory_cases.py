"""What memory is held, and that nothing which saves it changes a result."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from attrs import evolve, frozen
from test_combinations import choices, norm, variants
from tiny_llama import CONFIG, checkpoint, tiny
from tiny_run import RUN_FILE, adapter, apart, configure, metrics, plugin, run, tiny_run, write_lines
from toy_model import D, ToyModel, toy

from mortice import trainer
from mortice.batch import Completion, Group, Limits, Row, Span
from mortice.context import Randomness, SpanContext, current
from mortice.eager_attention import RowAttention
from mortice.launch import cache_bytes, prepare
from mortice.linear import on_cpu
from mortice.model import Block
from mortice.objective import WeightedLoss
from mortice.plugins import load_plugins
from mortice.step import Engine
from mortice.structure import fields
from mortice.tables import ContextOptions
from mortice.trainer import memory, resident
from mortice_plugins.adapters.lora import LoRA
from mortice_plugins.backwards.full import Full
from mortice_plugins.backwards.segmented import Segmented
from mortice_plugins.heads.dense import Dense
from mortice_plugins.layouts.separate import Separate
from mortice_plugins.losses.sft import SFT

INSTALLED = load_plugins()
BACKWARDS = choices(INSTALLED, "backward")


def peak(compute: Callable[[], object]) -> int:
    """Bytes that evaluating what `compute` returns adds at most to what was held."""
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(compute())
    return mx.get_peak_memory() - held


# The counters


def test_memory_says_what_is_held_cached_and_resident():
    held = mx.zeros((25_000_000,))
    mx.eval(held)
    found = memory()
    assert set(found) == {"memory_peak_gb", "memory_active_gb", "memory_cache_gb", "memory_rss_gb"}
    assert 0.1 <= found["memory_active_gb"] <= found["memory_peak_gb"]
    assert found["memory_rss_gb"] >= 0.1
    assert found["memory_rss_gb"] == pytest.approx(resident() / 1e9, abs=0.02)


def test_resident_memory_follows_what_is_touched():
    before = resident()
    touched = np.ones(100_000_000, dtype=np.uint8)
    assert 90e6 < resident() - before < 130e6
    del touched
    if Path("/proc/self/statm").exists():
        assert resident() - before < 30e6


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd", 1024)])
def test_without_proc_the_most_that_was_resident(platform, unit, monkeypatch):
    monkeypatch.setattr(trainer, "Path", lambda _: SimpleNamespace(exists=lambda: False))
    monkeypatch.setattr(trainer.sys, "platform", platform)
    monkeypatch.setattr(trainer.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=7))
    assert resident() == 7 * unit


# B46: rows of many lengths

TEXT_RUN = (
    RUN_FILE.replace('"preference"', '"text"')
    .replace('"orpo"', '"sft"')
    .replace('valid = "valid.jsonl"\n', "")
    .replace("max_length = 64", "max_length = 2048")
    .replace("batch_size = 4", "batch_size = 1")
)


def run_over_lengths(home: Path, lengths: list[int], steps: int, *settings: str) -> list[dict]:
    """The metrics of a run, a row a step, each length once an epoch in a new order. The cache is empty before it."""
    file = tiny_run(home, TEXT_RUN)
    write_lines(home / "train.jsonl", [{"text": "a" * (n - 1)} for n in lengths])
    mx.clear_cache()
    lines = metrics(run(file, f"train.steps={steps}", "train.save_every=100000", *settings))
    mx.clear_cache()
    assert {line["tokens"] for line in lines} == {n - 1 for n in lengths}
    return lines


def check_bounded(lines: list[dict], early: int, late: int, limit: float) -> None:
    """What is held does not grow from step `early` to step `late`, and the cache keeps to its limit in GB."""
    first, last = lines[early - 1], lines[late - 1]
    assert last["memory_active_gb"] == pytest.approx(first["memory_active_gb"], rel=0.01)
    assert max(line["memory_cache_gb"] for line in lines) <= limit
    for line in lines:
        assert line["memory_peak_gb"] >= line["memory_active_gb"] > 0


def test_case_b46_rows_of_many_lengths_keep_memory_bounded(tmp_path):
    lengths = [64 + 64 * i for i in range(8)]
    default = run_over_lengths(tmp_path / "default", lengths, 16)
    check_bounded(default, 8, 16, cache_bytes(None) / 1e9)
    tight = run_over_lengths(tmp_path / "tight", lengths, 16, "train.cache_limit=0.004")
    check_bounded(tight, 8, 16, 0.004)
    free = run_over_lengths(tmp_path / "free", lengths, 16, "train.cache_limit=1000")
    check_bounded(free, 8, 16, 1000)
    assert max(line["memory_cache_gb"] for line in free) > max(0.004, cache_bytes(None) / 1e9 if on_cpu() else 0)
    assert [line["loss"] for line in free] == pytest.approx([line["loss"] for line in default], rel=1e-6)


@pytest.mark.slow
def test_case_b46_200_steps_of_64_to_2048_tokens(tmp_path):
    lengths = [64 + (2048 - 64) * i // 19 for i in range(20)]
    limit = cache_bytes(None) / 1e9
    default = run_over_lengths(tmp_path / "default", lengths, 200)
    check_bounded(default, 50, 200, limit)
    free = run_over_lengths(tmp_path / "free", lengths, 200, "train.cache_limit=1000")
    check_bounded(free, 50, 200, 1000)
    cached = max(line["memory_cache_gb"] for line in free)
    assert cached > 10 * max(line["memory_peak_gb"] for line in default)  # what a peak alone would hide
    # Resident memory stays where it is with a limit. Without one it carries the cache.
    growth = default[199]["memory_rss_gb"] - default[49]["memory_rss_gb"]
    assert abs(growth) < 0.1
    if on_cpu():
        assert cached > limit
        assert free[199]["memory_rss_gb"] - default[199]["memory_rss_gb"] > cached / 2


def test_case_b46_the_limit_is_in_force_during_a_run_and_given_back(tmp_path):
    file, seen = tiny_run(tmp_path), []

    def on_step_end(step, metrics):
        seen.append(mx.set_cache_limit(0))
        mx.set_cache_limit(seen[-1])

    watch = [plugin("loss", "watched", SFT, on_step_end=on_step_end)]
    before = mx.set_cache_limit(123_456_789)
    try:
        run(file, "train.steps=1", plugins=watch)
        run(file, "train.steps=1", "train.cache_limit=0.005", plugins=watch)
    finally:
        after = mx.set_cache_limit(before)
    assert seen == [cache_bytes(None), 5_000_000]
    assert after == 123_456_789
    assert cache_bytes(None) == (32_000_000 if on_cpu() else 2_000_000_000)


# B47: what is recomputed or compiled still trains


@pytest.fixture(scope="module")
def pairs_home(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("b47"))


def compiled(choices):
    """(backward, whether it compiles): each by itself, and again compiled where it can be."""
    return [(c, False) for c in choices] + [(c, True) for c in choices if "compile" in fields(type(c.value))]


def label(case) -> str:
    return f"{case[0].label}{'-compiled' if case[1] else ''}"


def five_steps(file: Path, backward: str, *settings: str) -> dict[str, mx.array]:
    outcome = run(file, "train.steps=5", "optimizer.learning_rate=1e-3", *settings, backward=backward)
    return adapter(outcome.path / "adapter")


@pytest.fixture(scope="module")
def plain_weights(pairs_home):
    return five_steps(pairs_home, "full")


@pytest.mark.parametrize("case", compiled([c for c in BACKWARDS if c.plain]), ids=label)
def test_case_b47_every_backward_trains_the_same_weights(pairs_home, plain_weights, case):
    backward, compiles = case
    found = five_steps(pairs_home, backward.label, *(["backward.compile=true"] if compiles else []))
    assert apart(found, plain_weights) < 1e-5
    assert all(mx.abs(value).max().item() > 1e-3 for name, value in found.items() if name.endswith("lora_b"))


def engine(model, backward, layout=None, **options) -> Engine:
    return Engine(model, Dense(), backward, layout or Separate(), (WeightedLoss("sft", SFT()),), **options)


def with_lora(**changes):
    """A model with a LoRA adapter whose B is not zero."""
    model = tiny(**changes).model
    params = LoRA(rank=4).attach(model, 0)
    params = {name: value + 0.01 for name, value in params.items()}
    model.mark_trainable(params)
    mx.eval(params, model.named_parameters())
    return model, params


def text(length: int) -> list[Group]:
    ids = np.random.default_rng(length).integers(0, CONFIG["vocab_size"], length).tolist()
    return [Group("g", ids[:1], [Completion(ids[1:])])]


THRIFTY = [c for c in BACKWARDS if c.plain and not isinstance(c.value, Full)]


def gradients_at_2048(backward, **options) -> tuple[int, dict[str, mx.array]]:
    """Peak and gradient of a model of 8 layers."""
    model, params = with_lora(num_hidden_layers=8, intermediate_size=256)
    found: dict[str, mx.array] = {}
    held = peak(lambda: found.update(engine(model, backward, **options).gradients(params, text(2048))[1]))
    return held, found


@pytest.fixture(scope="module")
def whole_at_2048():
    return gradients_at_2048(Full())


@pytest.mark.parametrize("case", compiled(THRIFTY), ids=label)
def test_case_b47_peak_at_2048_tokens_is_lower(case, whole_at_2048):
    """Every backward that recomputes holds less than `full`, and finds the same gradient."""
    backward, compiles = case
    held, found = gradients_at_2048(evolve(backward.value, compile=True) if compiles else backward.value)
    whole, expected = whole_at_2048
    assert relative(found, expected) < 1e-4
    assert held < 0.7 * whole


def relative(found: dict[str, mx.array], expected: dict[str, mx.array]) -> float:
    assert set(found) == set(expected)
    apart = math.hypot(*(norm(found[name] - value) for name, value in expected.items()))
    return apart / math.hypot(*map(norm, expected.values()))


class Dropping(nn.Module):
    """A linear layer on inputs half of which a keyed mask drops, as an adapter with dropout does."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.proj = nn.Linear(D, D, bias=False)

    def __call__(self, x):
        ctx = current()
        assert ctx is not None, "a module runs outside every context"
        drawn = ctx.uniform(self._name, D)
        return self.proj(x if drawn is None else mx.where(drawn < 0.5, x, 0.0))


class DroppingBlock(Block):
    def __init__(self, layer: int) -> None:
        super().__init__(f"model.extra.{layer}", layer)
        self.inner = Dropping(f"model.extra.{layer}")

    def __call__(self, carry, ctx):
        return carry | {"h": carry["h"] + ctx.tokenwise(self.inner, carry["h"])}


def dropping() -> tuple[ToyModel, dict[str, mx.array]]:
    """The toy model with a block that drops behind each of its layers."""
    model = toy()
    for layer in range(3):
        block = DroppingBlock(layer)
        block.inner.proj.weight = 0.5 * mx.random.normal((D, D), key=mx.random.key(layer))
        model.blocks.insert(3 * layer + 2, block)
    model.parts = [model.parts[0], *model.blocks, *(p for p in model.parts[1:] if not isinstance(p, Block))]
    params = model.named_parameters()
    model.mark_trainable(params)
    return model, params


DROPPED = [
    Group("a", [1, 2, 3, 4], [Completion([5, 6, 7, 8]), Completion([9])]),
    Group("b", [9, 3], [Completion([2, 2, 11]), Completion([1, 12], prompt_ids=(4, 4, 4))]),
]


@pytest.mark.parametrize("mlp_chunk", [0, 2])
@pytest.mark.parametrize("layout", choices(INSTALLED, "layout"), ids=lambda c: c.label)
@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda c: c.label)
def test_case_b47_masks_are_the_same_when_recomputed(backward, layout, mlp_chunk):
    model, params = dropping()
    randomness = Randomness(seed=0, step=3)
    plain, expected = engine(model, Full()).gradients(params, DROPPED, randomness)
    tally, found = engine(model, backward.value, layout.value, mlp_chunk=mlp_chunk, limits=Limits(groups=2)).gradients(
        params, DROPPED, randomness
    )
    assert tally.loss == pytest.approx(plain.loss, abs=1e-5)
    assert relative(found, expected) < 1e-5
    for other in (None, Randomness(seed=0, step=4)):  # the masks do something
        tally, without = engine(model, Full()).gradients(params, DROPPED, other)
        assert abs(tally.loss - plain.loss) > 1e-3
        assert relative(without, expected) > 1e-2


# No option changes a result, each changes something else

CONTEXT = {"attention_chunk": ({"attention_chunk": 0}, {"attention_chunk": 64}), "mlp_chunk": ({}, {"mlp_chunk": 64})}
"""Settings between which an option of `[context]` makes a difference; others: its default and each other value."""


def settings() -> list[tuple[str, dict, dict]]:
    """(option, settings without it, settings with it) for every option of `[context]`."""
    changed = [(name, {}, change) for change in variants(ContextOptions) for name in change]
    found = [(name, *pair) for name, pair in CONTEXT.items()] + [c for c in changed if c[0] not in CONTEXT]
    assert {name for name, _, _ in found} == set(fields(ContextOptions))
    return found


@frozen(eq=False)
class Seen:
    """What strategies made of a step, and how: the pieces of the model that ran, the rows, the peak."""

    loss: float
    gradients: dict[str, mx.array]
    calls: list[tuple]
    rows: list[list[int]]
    peak: int

    def differs(self, other: Seen) -> bool:
        """In anything but the result."""
        larger = max(self.peak, other.peak)
        return self.calls != other.calls or self.rows != other.rows or abs(self.peak - other.peak) > 0.2 * larger


def watch(engine: Engine, params, groups: list[Group], monkeypatch) -> Seen:
    """Two steps of an engine whose model has an MLP in every second block: a compiled piece runs once in Python."""
    calls: list[tuple] = []
    model, mlp = engine.model, type(engine.model.blocks[1].mlp)
    run, finish, through = model.run, model.finish, mlp.__call__

    def noted_run(carry, ctx, start=0, stop=None):
        calls.append(("run", start, stop))
        return run(carry, ctx, start, stop)

    def noted_finish(carry):
        calls.append(("finish",))
        return finish(carry)

    def noted_mlp(module, x):
        calls.append(("mlp", x.shape[0]))
        return through(module, x)

    attend = RowAttention.forward

    def noted_attention(attention, *inputs):
        calls.append(("attention", inputs[0].shape[0]))
        return attend(attention, *inputs)

    with monkeypatch.context() as patch:
        patch.setattr(RowAttention, "forward", noted_attention)
        patch.setattr(model, "run", noted_run)
        patch.setattr(model, "finish", noted_finish)
        patch.setattr(mlp, "__call__", noted_mlp)
        for _ in range(2):
            tally, gradients = engine.gradients(params, groups)
    rows = [[row.length for row in micro.rows] for micro in engine.arrange(groups).micros]
    return Seen(tally.loss, gradients, calls, rows, peak(lambda: engine.gradients(params, groups)[1]))


def same_result(one: Seen, other: Seen) -> None:
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert relative(one.gradients, other.gradients) < 1e-4


@pytest.fixture(scope="module")
def wide_home(tmp_path_factory):
    """A run file whose model has a wide MLP, so that chunks of it show."""
    file = tiny_run(tmp_path_factory.mktemp("wide"), TEXT_RUN)
    checkpoint(file.parent / "model", vocab_size=272, intermediate_size=512)
    write_lines(file.parent / "train.jsonl", [{"text": "abc"}])
    return file


@pytest.mark.parametrize(("name", "without", "with_it"), settings(), ids=lambda v: v if isinstance(v, str) else "")
def test_every_option_of_the_context_changes_something_and_no_result(name, without, with_it, wide_home, monkeypatch):
    def seen(values: dict) -> Seen:
        given = [f"context.{key}={json.dumps(value)}" for key, value in values.items()]
        prepared = prepare(configure(wide_home, *given))
        params = {n: v + 0.01 for n, v in prepared.policy.params.items()}
        return watch(prepared.engine, params, text(768), monkeypatch)

    plain, changed = seen(without), seen(with_it)
    same_result(changed, plain)
    assert changed.differs(plain), f"{name} does nothing"


WHAT_AUTO_MEANS = [("segmented", {"keep": "attention"})]
"""On the CPU: the same as the default."""
STRATEGIES = [
    (kind, strategy, change)
    for kind in ("backward", "layout")
    for strategy in INSTALLED.registry.all(kind)
    for change in variants(strategy.load())
    if (strategy.name, change) not in WHAT_AUTO_MEANS
]


@pytest.mark.parametrize(("kind", "strategy", "change"), STRATEGIES, ids=lambda v: getattr(v, "name", str(v)))
def test_every_option_of_a_strategy_changes_something_and_no_result(kind, strategy, change, monkeypatch):
    model, params = with_lora(num_hidden_layers=3)
    cls = strategy.load()
    groups = [*text(96), *(Group(str(i), [1, 2], [Completion([3, 4, 5, 6]), Completion([7])]) for i in range(4))]

    def seen(strategy: object) -> Seen:
        chosen = {"backward": Full(), "layout": Separate()} | {kind: strategy}
        return watch(engine(model, **chosen, limits=Limits(groups=3)), params, groups, monkeypatch)

    plain, changed = seen(cls()), seen(cls(**change))
    same_result(changed, plain)
    assert changed.differs(plain), f"{strategy.name} {change} does nothing"


def test_an_option_that_does_nothing_is_found(monkeypatch):
    """Twice the same is no difference, one block less in a segment is."""
    model, params = with_lora()
    one, same, other = (
        watch(engine(model, Segmented(segment_size=size)), params, text(64), monkeypatch) for size in (2, 2, 1)
    )
    assert not one.differs(same)
    assert one.differs(other)


# Attention: peak against length

LENGTHS = (512, 1024, 2048)


def attention_peak(length: int, *, window: int | None = None, chunk: int | None = None) -> int:
    """Of value and gradient of one attention on a plain row, above its inputs."""
    keys = mx.random.split(mx.random.key(length), 3)
    q, k, v = (mx.random.normal((length, heads, 32), key=key) for heads, key in zip((4, 2, 2), keys))
    mx.eval(q, k, v)
    row = Row(np.zeros(length), [Span(0, length, None, 0)], [], [], [], [], [])

    def loss(q, k, v):
        return mx.square(SpanContext(row, attention_chunk=chunk).attend(q, k, v, scale=0.2, window=window)).sum()

    return peak(lambda: mx.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v))


@pytest.mark.parametrize("options", [{"window": 256}, {"chunk": 128}], ids=["window", "chunks"])
@pytest.mark.parametrize("twin", ["products", "fused"])
def test_peak_of_attention_is_linear_in_length(twin, options, monkeypatch):
    monkeypatch.setattr("mortice.attention.on_cpu", lambda: twin == "products")
    peaks = [attention_peak(length, **options) for length in LENGTHS]
    for short, long in itertools.pairwise(peaks):
        assert long < 2.3 * short


@pytest.mark.skipif(not on_cpu(), reason="a GPU's fused attention keeps no scores")
def test_peak_of_whole_attention_is_not_linear():
    """What the test of linear growth would not let pass."""
    peaks = [attention_peak(length, chunk=0) for length in LENGTHS]
    for short, long in itertools.pairwise(peaks):
        assert long > 3 * short


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_peak_of_a_layer_is_linear_in_length(kind):
    """One decoder layer of a model, value and gradient: windows, and full attention in chunks."""
    windowed = {"model_type": "mistral", "sliding_window": 256, "layer_types": [kind]}
    model, params = with_lora(num_hidden_layers=1, **windowed)

    def layer_peak(length: int) -> int:
        found = engine(model, Segmented(segment_size=2), attention_chunk=128)
        groups = text(length)
        return peak(lambda: found.gradients(params, groups)[1])

    peaks = [layer_peak(length) for length in LENGTHS]
    for short, long in itertools.pairwise(peaks):
        assert long < 2.3 * short

"""Compiled pieces: one for each shape of row, with nothing that changes baked in."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from toy_model import toy

from mortice.batch import Completion, Group
from mortice.compiling import BUCKET, padded
from mortice.context import Randomness, SpanContext
from mortice.model import Block
from mortice.objective import WeightedLoss
from mortice.rows import separate_rows, shared_row
from mortice.step import Engine
from mortice_plugins.backwards.segmented import Segmented, _Segment
from mortice_plugins.heads.dense import Dense
from mortice_plugins.layouts.prefix_shared import PrefixShared
from mortice_plugins.layouts.separate import Separate
from mortice_plugins.losses.sft import SFT


def group(prompt: int, answer: int) -> Group:
    ids = [(7 * i) % 13 for i in range(prompt + answer)]
    return Group("g", ids[:prompt], [Completion(ids[prompt:])])


def engine(model, **options) -> Engine:
    return Engine(model, Dense(), Segmented(**options), Separate(), (WeightedLoss("sft", SFT()),))


def test_rows_are_padded_behind_their_last_span():
    ctx = SpanContext(separate_rows(group(5, 6), 0, prompt_targets=False)[0])
    wide = padded(ctx)
    assert wide.row.length == BUCKET and wide.tokens.tolist() == ctx.tokens.tolist() + [0] * (BUCKET - 10)
    assert len(wide.runs) == 1 and wide.row.index.tolist() == ctx.row.index.tolist()
    assert padded(wide) is wide


def test_plain_rows_of_one_bucket_share_what_is_compiled():
    model = toy()
    params = model.named_parameters()
    compiled, plain = engine(model, segment_size=9, compile=True), engine(model, segment_size=9)
    for lengths in [(5, 6), (9, 30), (20, 44)]:
        _, found = compiled.gradients(params, [group(*lengths)])
        _, expected = plain.gradients(params, [group(*lengths)])
        assert all(mx.allclose(found[n], expected[n], rtol=1e-4, atol=1e-6).item() for n in params)
    assert len(model.compiled) == 2  # forward and backward
    compiled.gradients(params, [group(20, 46)])
    assert len(model.compiled) == 4


def test_nothing_of_a_step_stays_behind():
    model = toy()
    params = model.named_parameters()
    compiled = engine(model, segment_size=2, compile=True)
    compiled.gradients(params, [group(5, 6)])
    gc.collect()
    held = mx.get_active_memory()
    for length in range(7, 30, 4):
        compiled.gradients(params, [group(5, length)])
    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, _Segment)]
    assert mx.get_active_memory() - held < 2000  # ids and positions of a row; one carry is 2 kB


def test_rows_that_branch_are_not_compiled():
    model = toy()
    pair = Group("g", [1, 2, 3], [Completion([4, 5, 6]), Completion([7, 8])])
    shared = Engine(model, Dense(), Segmented(compile=True), PrefixShared(), (WeightedLoss("sft", SFT()),))
    shared.gradients(model.named_parameters(), [pair])
    assert not model.compiled


def test_a_branching_row_is_another_shape():
    pair = Group("g", [1, 2, 3], [Completion([4, 5, 6]), Completion([7, 8])])
    shared = SpanContext(shared_row(pair, 0, prompt_targets=False))
    plain = SpanContext(separate_rows(group(3, 4), 0, prompt_targets=False)[0])
    assert shared.row.length == plain.row.length == 6 and shared.shape != plain.shape
    assert shared.shape == SpanContext(shared.row).shape != SpanContext(shared.row, attention_chunk=2).shape


class Noisy(Block):
    """Scales by keyed random numbers and by a constant of the context."""

    def __init__(self) -> None:
        super().__init__("model.layers.3", 3)
        self.weight = mx.ones((8,))

    def __call__(self, carry, ctx):
        draws = ctx.uniform("noise", 8)
        noise = 1.0 if draws is None else draws
        return carry | {"h": carry["h"] * noise * self.weight * ctx.constants["scale"][:, None]}


def noisy():
    model = toy()
    model.blocks = [*model.blocks, Noisy()]
    model.parts = [*model.parts[:-2], model.blocks[-1], *model.parts[-2:]]
    model.invalidate()
    embed = model.embed

    def with_constant(tokens, ctx):
        ctx.constants["scale"] = 1.0 + tokens.astype(mx.float32) / 13
        return embed(tokens, ctx)

    model.embed = with_constant
    return model


@pytest.mark.parametrize("size", [1, 9])
def test_random_numbers_and_constants_of_each_call_are_used(size):
    model = noisy()
    params = model.named_parameters()
    model.mark_trainable(params)
    losses = []
    for step, first in [(0, 3), (1, 3), (1, 4)]:
        groups = [Group("g", [first, 2, 7], [Completion([5, 6, 1, 0])])]
        draws = Randomness(0, step)
        tally, found = engine(model, segment_size=size, compile=True).gradients(params, groups, draws)
        plain, expected = engine(model, segment_size=size).gradients(params, groups, draws)
        assert tally.loss == pytest.approx(plain.loss, rel=1e-5)
        for name in params:
            far = mx.abs(found[name] - expected[name]).max() / mx.abs(expected[name]).max()
            assert far.item() < 1e-4, name
        losses.append(tally.loss)
    assert len(set(losses)) == 3


def test_new_weights_are_used():
    model = toy()
    params = model.named_parameters()
    first = engine(model, compile=True).gradients(params, [group(4, 5)])[0].loss
    name = "model.layers.1.up_proj.weight"
    changed = params | {name: params[name] * 2}
    second = engine(model, compile=True).gradients(changed, [group(4, 5)])[0].loss
    assert second != first and second == pytest.approx(
        engine(model).gradients(changed, [group(4, 5)])[0].loss, rel=1e-5
    )


def test_keep_and_compile_exclude_each_other():
    with pytest.raises(ValueError, match="compile = false"):
        Segmented(compile=True, keep="everything")

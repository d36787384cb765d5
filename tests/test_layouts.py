"""The layouts that ship with mortice, against the plain sequences."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from toy_model import toy

from mortice.batch import Completion, Group, Limits
from mortice.step import Engine
from mortice.testing import LayoutSuite
from mortice_plugins.backwards.full import Full
from mortice_plugins.heads.dense import Dense
from mortice_plugins.layouts.packed import Packed, first_fit_decreasing
from mortice_plugins.layouts.prefix_shared import PrefixShared
from mortice_plugins.layouts.separate import Separate


class TestSeparate(LayoutSuite):
    layout = Separate()


class TestPrefixShared(LayoutSuite):
    layout = PrefixShared()


class TestPacked(LayoutSuite):
    layout = Packed()


class TestPackedTightly(LayoutSuite):
    layout = Packed(row_tokens=9)


class TestPackedWithoutSharing(LayoutSuite):
    layout = Packed(row_tokens=12, share_prefix=False)


def test_first_fit_decreasing_by_hand():
    #                             7 opens a row, 6 another; 4 fits beside 6; 3 beside 7; 2 and 2 open a third
    assert first_fit_decreasing([2, 7, 4, 6, 3, 2], 10) == [[1, 4], [3, 2], [0, 5]]
    assert first_fit_decreasing([5, 30, 5], 10) == [[1], [0, 2]]  # too long for the budget: alone, whole
    assert first_fit_decreasing([], 10) == []


MIXED = [
    Group("sft", [1, 2, 3], [Completion([4, 5, 6, 7])]),
    Group("pair", [8, 9], [Completion([1, 2, 3]), Completion([4, 11])], ((0, 1),)),
    Group("samples", [5, 5, 1], [Completion([2, 3]), Completion([7]), Completion([9, 9, 9]), Completion([0, 12])]),
    Group("prompts", [1, 2], [Completion([5, 6]), Completion([8, 9], prompt_ids=(1, 3, 2))]),
]


def logprobs(layout, groups) -> list[list[tuple[float, ...]]]:
    model = toy()
    return Engine(model, Dense(), Full(), layout).logprobs(model.named_parameters(), groups)


@pytest.mark.parametrize("layout", [Packed(), Packed(row_tokens=16), Packed(share_prefix=False)])
def test_groups_of_every_kind_share_a_row_and_score_as_alone(layout):
    assert len(Packed()(MIXED, Limits())) == 1
    for found, alone in zip(logprobs(layout, MIXED), logprobs(Separate(), MIXED)):
        for a, b in zip(found, alone):
            assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.parametrize("changed", range(len(MIXED)))
def test_no_cross_talk_between_groups_of_a_row(changed):
    """Another group's tokens move no log-probability of a group, and its own move."""
    groups = list(MIXED)
    old = groups[changed]
    groups[changed] = Group(
        old.id,
        [(i + 1) % 13 for i in old.prompt_ids],
        [Completion([(i + 3) % 13 for i in c.ids], prompt_ids=c.prompt_ids) for c in old.completions],
        old.pairs,
    )
    before, after = logprobs(Packed(), MIXED), logprobs(Packed(), groups)
    for i, (a, b) in enumerate(zip(before, after)):
        moved = max(np.abs(np.subtract(x, y)).max() for x, y in zip(a, b))
        assert moved > 1e-3 if i == changed else moved == 0.0


def test_a_row_keeps_to_its_budget_and_sharing_makes_it_shorter():
    shared, apart = (Packed(row_tokens=100, share_prefix=s)(MIXED, Limits())[0] for s in (True, False))
    # sft 3 + 3; pair 2 + 2 + 1; samples 3 + 1 + 0 + 2 + 1; prompts 2 + 1 and 3 + 1
    assert (shared.tokens, apart.tokens) == (6 + 5 + 7 + 7, 6 + 7 + 16 + 7)
    for budget in (8, 12, 20):
        assert all(m.tokens <= budget or len(m.groups) == 1 for m in Packed(row_tokens=budget)(MIXED, Limits()))
    rows = [[group.id for group in m.groups] for m in Packed(row_tokens=13)(MIXED, Limits())]
    assert rows == [["samples", "sft"], ["prompts", "pair"]]


def test_a_packed_row_is_one_product_of_all_its_tokens():
    """The point of packing: one forward for all groups."""
    seen = []
    model = toy()
    embed = model.embed
    model.embed = lambda tokens, ctx: (seen.append(tokens.size), embed(tokens, ctx))[1]
    mx.eval(Engine(model, Dense(), Full(), Packed()).logprobs(model.named_parameters(), MIXED))
    assert seen == [25]

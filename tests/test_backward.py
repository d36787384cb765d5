"""Every backward, layout and head against `full` × `separate` × `dense` on a toy model with a shared carry."""

from __future__ import annotations

import mlx.core as mx
import pytest
from toy_model import toy

from mortice.batch import Completion, Group, Limits
from mortice.context import SpanContext
from mortice.errors import ConfigError, TrainingError
from mortice.objective import WeightedLoss, count_terms, make_batch
from mortice.step import Engine, clip, global_norm
from mortice_plugins.backwards.checkpoint import Checkpoint
from mortice_plugins.backwards.full import Full
from mortice_plugins.backwards.segmented import KEEP, Segmented
from mortice_plugins.heads.dense import Dense
from mortice_plugins.heads.flash_cce import FlashCCE
from mortice_plugins.layouts.packed import Packed
from mortice_plugins.layouts.prefix_shared import PrefixShared
from mortice_plugins.layouts.separate import Separate
from mortice_plugins.losses.orpo import ORPO
from mortice_plugins.losses.sft import SFT

PAIRS = [
    Group("a", [1, 2, 3, 4], [Completion([5, 6, 7]), Completion([8])], ((0, 1),)),
    Group("b", [9, 3], [Completion([2, 2, 11, 4]), Completion([1, 12])], ((0, 1),)),
    Group("c", [7, 7, 7], [Completion([3, 4, 5], [True, False, True]), Completion([6, 0, 1, 2, 12])], ((0, 1),)),
]
ODD_PROMPT = Group("d", [1, 2], [Completion([5, 6]), Completion([8, 9], prompt_ids=(1, 3, 2))], ((0, 1),))

LOSSES = (ORPO(),)


def engine(model, *, head=None, backward=None, layout=None, losses=LOSSES, **kwargs) -> Engine:
    weighted = tuple(WeightedLoss(type(loss).__name__.lower(), loss) for loss in losses)
    return Engine(model, head or Dense(), backward or Full(), layout or Separate(), weighted, **kwargs)


def relative(a: dict, b: dict) -> float:
    assert set(a) == set(b)
    top = mx.sqrt(sum(mx.square(a[n] - b[n]).sum() for n in a))
    return (top / mx.sqrt(sum(mx.square(b[n]).sum() for n in b))).item()


BACKWARDS = {
    "full": Full(),
    **{f"segmented-{n}": Segmented(segment_size=n) for n in (1, 2, 3, 4, 5, 6, 9)},
    "segmented-unequal": Segmented(cuts=(1, 4, 5)),
    **{f"segmented-{n}-{keep}": Segmented(segment_size=n, keep=keep) for n in (1, 4) for keep in KEEP},
    **{f"segmented-{n}-traced": Segmented(segment_size=n, eager=False) for n in (1, 3, 9)},
    **{f"segmented-{n}-compiled": Segmented(segment_size=n, compile=True) for n in (2, 9)},
    **{f"checkpoint-{n}": Checkpoint(segment_size=n) for n in (1, 2, 4, 9)},
}
HEADS = [Dense(), FlashCCE(token_tile=3, vocab_tile=5)]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", [Separate(), PrefixShared(), Packed()], ids=["separate", "prefix-shared", "packed"])
@pytest.mark.parametrize("head", HEADS, ids=["dense", "flash"])
@pytest.mark.parametrize("backward", BACKWARDS.values(), ids=BACKWARDS)
def test_gradients_of_every_weight_equal_the_plain_ones(head, backward, layout, tied):
    model = toy(tied=tied, softcap=4.0)
    params = model.named_parameters()
    plain, expected = engine(model).gradients(params, PAIRS)
    tally, found = engine(model, head=head, backward=backward, layout=layout).gradients(params, PAIRS)
    assert tally.loss == pytest.approx(plain.loss, abs=1e-5)
    assert tally.values() == pytest.approx(plain.values(), abs=1e-5)
    assert relative(found, expected) < 1e-4
    assert all(mx.abs(expected[name]).max().item() > 0 for name in expected)


def test_the_plain_gradient_equals_finite_differences():
    model = toy()
    params = model.named_parameters()
    _, gradients = engine(model).gradients(params, PAIRS)
    for name in ("model.layers.0.k_proj.weight", "model.layers.2.q_proj.weight", "model.embed_tokens.weight"):
        norm = mx.sqrt(mx.square(gradients[name]).sum())
        direction, step = gradients[name] / norm, 5e-3
        up, down = (
            engine(model).evaluate(params | {name: params[name] + s * step * direction}, PAIRS).loss for s in (1, -1)
        )
        assert norm.item() == pytest.approx((up - down) / (2 * step), rel=1e-3)


def test_only_what_trains_is_differentiated():
    model = toy()
    names = ["model.layers.1.up_proj.weight", "model.layers.2.q_proj.weight"]
    params = {name: model.named_parameters()[name] for name in names}
    _, expected = engine(model).gradients(params, PAIRS)
    for size in (1, 2, 4):
        _, found = engine(model, backward=Segmented(segment_size=size)).gradients(params, PAIRS)
        assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("layout", [Separate(), PrefixShared()], ids=["separate", "prefix-shared"])
def test_case_b25_accumulation_denominator(size, layout):
    """However the groups of a step are cut into micro-batches, loss and gradient are the same."""
    model = toy()
    params = model.named_parameters()
    for loss in (SFT(), SFT(scope="full"), ORPO(), ORPO(sft_scope="response")):
        plain, expected = engine(model, losses=(loss,), limits=Limits(groups=3)).gradients(params, PAIRS)
        tally, found = engine(model, losses=(loss,), layout=layout, limits=Limits(groups=size)).gradients(params, PAIRS)
        assert tally.loss == pytest.approx(plain.loss, rel=1e-6)
        assert relative(found, expected) < 1e-6


def test_losses_add_up_with_their_weights():
    model = toy()
    params = model.named_parameters()
    sft, sft_gradient = engine(model, losses=(SFT(),)).gradients(params, PAIRS)
    orpo, orpo_gradient = engine(model, losses=(ORPO(),)).gradients(params, PAIRS)
    both = Engine(
        model, Dense(), Full(), Separate(), (WeightedLoss("sft", SFT(), 0.5), WeightedLoss("orpo", ORPO(), 2.0))
    )
    tally, gradient = both.gradients(params, PAIRS)
    assert tally.loss == pytest.approx(0.5 * sft.loss + 2 * orpo.loss, rel=1e-6)
    assert {"sft/nll", "orpo/nll", "orpo/odds"} <= set(tally.values())
    assert relative(gradient, {n: 0.5 * sft_gradient[n] + 2 * orpo_gradient[n] for n in params}) < 1e-5


def test_groups_with_different_prompts_fall_back_to_separate_rows():
    model = toy()
    params = model.named_parameters()
    micro = PrefixShared()([PAIRS[0], ODD_PROMPT], Limits(groups=2))[0]
    assert [row.length for row in micro.rows] == [4 + 2, 2 + 1, 3 + 1]
    plain, expected = engine(model).gradients(params, [PAIRS[0], ODD_PROMPT])
    tally, found = engine(model, layout=PrefixShared()).gradients(params, [PAIRS[0], ODD_PROMPT])
    assert tally.loss == pytest.approx(plain.loss, abs=1e-5)
    assert relative(found, expected) < 1e-4


def test_a_shared_row_by_hand():
    row = PrefixShared()([PAIRS[0]], Limits(), prompt_targets=True)[0].rows[0]
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6]  # the last token of an answer is scored, never run
    assert [(s.start, s.stop, s.parent, s.position) for s in row.spans] == [(0, 4, None, 0), (4, 6, 0, 4)]
    assert row.index.tolist() == [0, 1, 2, 3, 4, 5, 3]
    assert row.target.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert row.owner.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert row.is_prompt.tolist() == [True, True, True, False, False, False, False]


def test_prompts_are_scored_once_a_group():
    for layout in (Separate(), PrefixShared()):
        micro = layout([PAIRS[0]], Limits(), prompt_targets=True)[0]
        assert sum(int(row.is_prompt.sum()) for row in micro.rows) == 3


def test_case_b15_the_mask_is_shifted_with_the_targets():
    """tokens [10, 11, 12, 13] with mask [0, 0, 1, 0]: the log-probability of token 12 alone counts."""
    model = toy()
    params = model.named_parameters()
    group = Group("x", [10], [Completion([11, 12, 3], [False, True, False])])
    row = Separate()([group], Limits())[0].rows[0]
    assert (row.target.tolist(), row.index.tolist()) == ([12], [1])
    tally = engine(model, losses=(SFT(),)).evaluate(params, [group])
    logits = model.output.project(model.hidden(SpanContext(row), mx.array(row.tokens)))
    expected = logits[1, 12] - mx.logsumexp(logits[1])
    assert tally.loss == pytest.approx(-expected.item(), abs=1e-5)


def test_case_b15_prompt_weights_do_not_touch_the_preference_score():
    model = toy()
    for layout in (Separate(), PrefixShared()):
        for scope in ("full", "response"):
            values = engine(model, losses=(ORPO(sft_scope=scope),), layout=layout)
            tally = values.evaluate(model.named_parameters(), PAIRS)
            assert tally.values()["odds"] == pytest.approx(engine(model).evaluate({}, PAIRS).values()["odds"], abs=1e-6)


def test_nothing_scored_is_an_error_not_a_loss_of_zero():
    model = toy()
    group = Group("x", [1], [Completion([2, 3], [False, False])])
    with pytest.raises(TrainingError, match="nothing is scored"):
        engine(model, losses=(SFT(),)).gradients(model.named_parameters(), [group])


def test_case_b05_a_row_with_nothing_scored_changes_nothing():
    model = toy()
    params = model.named_parameters()
    normal = Group("n", [1, 2], [Completion([3, 4, 5])])
    empty = Group("e", [1], [Completion([2, 3], [False, False])])
    alone, expected = engine(model, losses=(SFT(),)).gradients(params, [normal])
    both, found = engine(model, losses=(SFT(),)).gradients(params, [normal, empty])
    assert both.loss == pytest.approx(alone.loss, rel=1e-6)
    assert relative(found, expected) < 1e-6


def test_case_b04_an_identical_pair_has_no_preference_gradient():
    model = toy()
    params = model.named_parameters()
    same = Group("s", [1, 2], [Completion([3, 4]), Completion([3, 4])], ((0, 1),))
    tally, found = engine(model, losses=(ORPO(sft_scope="response"),)).gradients(params, [same])
    assert tally.values()["odds"] == pytest.approx(0.693147, abs=1e-5)
    _, nll = engine(model, losses=(ORPO(sft_scope="response", beta=0.0),)).gradients(params, [same])
    assert relative(found, nll) < 1e-6


def test_counts_are_known_without_a_forward():
    batch = make_batch(Separate()(PAIRS, Limits(groups=3), prompt_targets=True)[0])
    counts = count_terms((WeightedLoss("orpo", ORPO()),), batch)
    assert counts == {(0, "nll"): 3 + 3 + 1 + 4 + 2 + 3, (0, "odds"): 3}  # prompts and chosen answers; masked one too


def test_per_token_vectors_follow_their_tokens_in_every_layout():
    group = Group("a", [1, 2], [Completion([3, 4], old_logprobs=[-1, -2]), Completion([5], old_logprobs=[-3])])
    for layout in (Separate(), PrefixShared()):
        micro = layout([group], Limits(), prompt_targets=True)[0]
        batch = make_batch(micro)
        assert batch.old_logprobs.tolist() == [0.0, -1.0, -2.0, -3.0]
        assert batch.sum(batch.old_logprobs).tolist() == [-3.0, -3.0]
        assert batch.mean(batch.old_logprobs).tolist() == [-1.5, -3.0]
        assert batch.last(batch.old_logprobs).tolist() == [-2.0, -3.0]
    with pytest.raises(ValueError, match="completion 0 of group 'a' has no ref_logprobs"):
        make_batch(micro, frozenset({"ref_logprobs"}))


def test_clipping_scales_to_the_global_norm():
    gradients = {"a": mx.array([3.0]), "b": mx.array([4.0], dtype=mx.float32)}
    assert global_norm(gradients).item() == pytest.approx(5.0)
    clipped, norm = clip(gradients, 1.0)
    assert norm == pytest.approx(5.0)
    assert [g.item() for g in clipped.values()] == pytest.approx([0.6, 0.8])
    assert clip(gradients, 0.0)[0] is gradients
    assert clip(gradients, 9.0)[0] is gradients


@pytest.mark.parametrize("cuts", [(0, 2), (3, 2), (2, 2)])
def test_cuts_must_rise_from_one(cuts):
    with pytest.raises(ValueError, match="rising"):
        Segmented(cuts=cuts)


def test_segments_are_of_one_size_or_as_cut():
    assert Segmented(segment_size=4).segments(6) == [(0, 4), (4, 6)]
    assert Segmented(cuts=(1, 5)).segments(6) == [(0, 1), (1, 5), (5, 6)]
    with pytest.raises(ConfigError, match=r"backward\.cuts: 6 lies behind the last of the model's 6 blocks"):
        Segmented(cuts=(2, 6)).segments(6)

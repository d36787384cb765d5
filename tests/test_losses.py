"""Losses `sft` and `orpo` at the level of log-probabilities."""

from __future__ import annotations

import json
import math

import mlx.core as mx
import pytest
from attrs import evolve

from mortice.batch import Completion, Group, LossOutput, TokenLogprobs
from mortice.testing import LossSuite, loss_value, make_batch, make_group, make_scores
from mortice_plugins.losses.orpo import ORPO, log1mexp
from mortice_plugins.losses.sft import SFT


class TestSFT(LossSuite):
    loss = SFT()


class TestSFTFull(LossSuite):
    loss = SFT(scope="full")


class TestORPO(LossSuite):
    loss = ORPO()


class TestORPOResponse(LossSuite):
    loss = ORPO(sft_scope="response")


class MeanOfMeans:
    def __call__(self, scores, batch):
        return LossOutput({"nll": (-batch.mean(scores.logprobs).mean(), 1)})


class Detached:
    def __call__(self, scores, batch):
        return LossOutput({"nll": (-mx.stop_gradient(scores.logprobs).sum(), batch.lengths.sum())})


class CountsHits:
    def __call__(self, scores, batch):
        return LossOutput({"nll": (-scores.logprobs.sum(), (scores.logprobs > -1.0).sum() + 1)})


class ReadsPrompts:
    def __call__(self, scores, batch):
        return LossOutput({"nll": (-scores.logprobs.sum(), batch.lengths.sum())})


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        (MeanOfMeans(), lambda suite: suite.test_micro_batches_do_not_matter((1, 3))),
        (Detached(), LossSuite.test_gradient_reaches_the_scores),
        (CountsHits(), LossSuite.test_counts_do_not_depend_on_scores),
        (ReadsPrompts(), LossSuite.test_prompt_targets_of_other_losses_do_not_matter),
    ],
    ids=["mean-of-means", "detached", "counts-hits", "reads-prompts"],
)
def test_the_suite_finds_what_is_wrong(wrong, test):
    suite = LossSuite()
    suite.loss = wrong
    with pytest.raises(AssertionError):
        test(suite)


def value(loss, groups, logprobs, prompts=None) -> float:
    scores = make_scores(groups, logprobs, loss.requires, prompts=prompts)
    return loss_value([loss(scores, make_batch(groups, loss.requires))])


def gradient(loss, groups, logprobs, terms=None):
    """d (Σ weight · total) / d logprob, `[M]`, of these terms (all, unless named)."""
    batch = make_batch(groups, loss.requires)

    def total(x):
        output = loss(TokenLogprobs(x), batch)
        return sum(output.weights.get(n, 1.0) * t for n, (t, _) in output.terms.items() if terms is None or n in terms)

    return mx.grad(total)(make_scores(groups, logprobs, loss.requires).logprobs).tolist()


def test_case_b14_orpo_by_hand():
    """Mean log-probabilities −0.5 and −1.0, λ = 0.1: L = 0.5 + 0.1 · 0.320300."""
    loss = ORPO(sft_scope="response")
    pair = [make_group("a", 1, 1, pairs=[(0, 1)])]
    assert value(loss, pair, [[[-0.5], [-1.0]]]) == pytest.approx(0.532030, abs=1e-6)
    odds = gradient(evolve(loss, beta=1.0), pair, [[[-0.5], [-1.0]]], terms={"odds"})
    assert odds[0] == pytest.approx(-0.696544, abs=1e-6)
    assert gradient(loss, pair, [[[-0.5], [-1.0]]])[0] == pytest.approx(-1.0696544, abs=1e-6)


def test_orpo_means_over_tokens():
    """Two tokens of −0.25 and −0.75 are a mean of −0.5, and each carries half of its gradient."""
    loss = ORPO(sft_scope="response")
    pair = [make_group("a", 2, 4, pairs=[(0, 1)])]
    logprobs = [[[-0.25, -0.75], [-1.0, -1.5, -0.5, -1.0]]]
    assert value(loss, pair, logprobs) == pytest.approx(0.532030, abs=1e-6)
    assert gradient(loss, pair, logprobs)[:2] == pytest.approx([-1.0696544 / 2] * 2, abs=1e-6)


def test_orpo_metrics():
    loss = ORPO(sft_scope="response")
    pairs = [make_group("a", 1, 1, pairs=[(0, 1)]), make_group("b", 1, 1, pairs=[(0, 1)])]
    scores = make_scores(pairs, [[[-0.5], [-1.0]], [[-2.0], [-1.0]]])
    found = loss(scores, make_batch(pairs)).metrics
    means = {name: (total / count).item() for name, (total, count) in found.items()}
    assert (means["lw"], means["lr"], means["margin"], means["accuracy"]) == (-1.25, -1.0, -0.25, 0.5)
    odds = [math.log(math.exp(x) / (1 - math.exp(x))) for x in (-0.5, -1.0, -2.0, -1.0)]
    assert means["log_odds"] == pytest.approx((odds[0] - odds[1] + odds[2] - odds[3]) / 2, abs=1e-6)


def test_case_b04_identical_pair():
    """Chosen equal to rejected: the odds term is ln 2 and pulls nowhere; the NLL is unaffected."""
    loss = ORPO(sft_scope="response")
    pair = [make_group("a", 3, 3, pairs=[(0, 1)])]
    logprobs = [[[-0.5, -1.0, -2.0]] * 2]
    terms = loss(make_scores(pair, logprobs), make_batch(pair)).terms
    assert terms["odds"][0].item() == pytest.approx(0.693147, abs=1e-6)
    assert terms["nll"][0].item() == pytest.approx(3.5 / 3, abs=1e-6)
    odds = gradient(loss, pair, logprobs, terms={"odds"})
    assert odds[0] != 0.0
    assert [c + r for c, r in zip(odds[:3], odds[3:])] == [0.0, 0.0, 0.0]


def test_case_b15_mask_is_that_of_targets():
    """Tokens [10, 11, 12, 13] with mask [0, 0, 1, 0]: the only score is that of token 12."""
    masked = Group("a", [10], [Completion([11, 12, 13], [False, True, False])])
    batch = make_batch([masked])
    assert batch.lengths.tolist() == [1.0]
    loss = SFT()
    assert value(loss, [masked], [[[-5.0, -0.25, -7.0]]]) == 0.25

    full = SFT(scope="full")
    assert value(full, [masked], [[[-5.0, -0.25, -7.0]]], prompts=[[]]) == pytest.approx(12.25 / 3)


@pytest.mark.parametrize("prompt", [1, 2])
def test_case_b15_prompt_tokens_are_no_part_of_the_preference(prompt):
    """Chosen [.., 11, 12] and rejected [.., 13]: the odds term does not see the prompt's log-probabilities."""
    group = [Group("a", range(9, 9 + prompt), [Completion([11, 12]), Completion([13])], [(0, 1)])]
    loss = ORPO()
    batch = make_batch(group, loss.requires)
    assert batch.lengths.tolist() == [2.0, 1.0]
    odds = []
    for prompt_logprob in (-0.1, -8.0):
        scores = make_scores(group, [[[-1.0, -2.0], [-3.0]]], loss.requires, prompts=[[prompt_logprob] * (prompt - 1)])
        odds.append(loss(scores, batch).terms["odds"][0].item())
    assert odds[0] == odds[1]
    log_odds = math.log(math.exp(-1.5) / (1 - math.exp(-1.5))) - math.log(math.exp(-3.0) / (1 - math.exp(-3.0)))
    assert odds[0] == pytest.approx(math.log(1 + math.exp(-log_odds)), abs=1e-6)


def test_case_b25_accumulation_denominator():
    """10 tokens with an NLL of 30 and 2 with 1: (30 + 1) / 12, not the mean of means 1.75."""
    loss = SFT()
    first, second = [make_group("a", 10)], [make_group("b", 2)]
    apart = [
        loss(make_scores(first, [[[-3.0] * 10]]), make_batch(first)),
        loss(make_scores(second, [[[-0.5] * 2]]), make_batch(second)),
    ]
    assert loss_value(apart) == pytest.approx(2.583333, abs=1e-6)
    assert value(loss, first + second, [[[-3.0] * 10], [[-0.5] * 2]]) == pytest.approx(2.583333, abs=1e-6)


def test_case_b25_orpo_denominators():
    """The odds term is a mean over pairs; the NLL one over tokens (full) or over pairs (response)."""
    pairs = [make_group("a", 4, 1, prompt=3, pairs=[(0, 1)]), make_group("b", 1, 2, prompt=1, pairs=[(0, 1)])]
    logprobs = [[[-1.0] * 4, [-2.0]], [[-3.0], [-1.0, -1.0]]]
    prompts = [[-5.0, -5.0], []]

    def counts_and_nll(loss):
        found = loss(make_scores(pairs, logprobs, loss.requires, prompts=prompts), make_batch(pairs, loss.requires))
        assert found.terms["odds"][1].item() == 2.0
        total, count = found.terms["nll"]
        return count.item(), (total / count).item()

    assert counts_and_nll(ORPO()) == (7.0, pytest.approx((2 * 5.0 + 4 * 1.0 + 3.0) / 7))
    assert counts_and_nll(ORPO(sft_scope="response")) == (2.0, pytest.approx((1.0 + 3.0) / 2))


def test_sft_weights_tokens():
    """Weights 1 and 3 on completions of 2 and 1 tokens: (1·(1 + 1) + 3·4) / (1·2 + 3·1)."""
    groups = [make_group("a", 2), Group("b", [1, 2], [Completion([3], weight=3.0)])]
    assert value(SFT(), groups, [[[-1.0, -1.0]], [[-4.0]]]) == pytest.approx(14 / 5)


def test_sft_learns_only_the_chosen_of_a_pair():
    pair = [make_group("a", 2, 3, pairs=[(0, 1)])]
    assert value(SFT(), pair, [[[-1.0, -2.0], [-9.0] * 3]]) == 1.5
    both = [make_group("a", 2, 3)]
    assert value(SFT(), both, [[[-1.0, -2.0], [-9.0] * 3]]) == 6.0


def test_orpo_weights_pairs():
    """Pairs of weight 1 and 3 with −c̄ of 1 and 2: (1 + 6) / 4."""
    weighted = Group("b", [1], [Completion([2], weight=3.0), Completion([3])], [(0, 1)])
    pairs = [make_group("a", 1, 1, pairs=[(0, 1)]), weighted]
    loss = ORPO(sft_scope="response", beta=0.0)
    assert value(loss, pairs, [[[-1.0], [-1.0]], [[-2.0], [-1.0]]]) == 1.75


@pytest.mark.parametrize("x", [-1e-9, -1e-6, -1e-3, -0.1, -0.69, -0.6931472, -0.7, -5.0, -50.0])
def test_log1mexp_value_and_gradient(x):
    x = mx.array(x)
    exact = x.item()
    found, slope = mx.value_and_grad(log1mexp)(x)
    assert found.item() == pytest.approx(math.log(-math.expm1(exact)), rel=1e-5)
    assert slope.item() == pytest.approx(1.0 / -math.expm1(-exact) if exact > -30 else -math.exp(exact), rel=1e-5)


@pytest.mark.parametrize(("chosen", "rejected"), [(0.0, 0.0), (0.0, -1.0), (-1.0, 0.0), (-1e-9, -1e-9), (-80.0, 0.0)])
def test_orpo_is_finite_near_probability_one(chosen, rejected):
    loss = ORPO(sft_scope="response")
    pair = [make_group("a", 1, 1, pairs=[(0, 1)])]
    assert math.isfinite(value(loss, pair, [[[chosen], [rejected]]]))
    assert all(math.isfinite(g) for g in gradient(loss, pair, [[[chosen], [rejected]]]))


def test_requires_follows_the_options():
    assert SFT().requires == frozenset()
    assert SFT(scope="full").requires == {"prompt_logprobs"}
    assert ORPO().requires == {"pairs", "prompt_logprobs"}
    assert ORPO(sft_scope="response").requires == {"pairs"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SFT(scope="all"), "scope"),
        (lambda: ORPO(beta=-0.1), "beta"),
        (lambda: ORPO(sft_scope="x"), "sft_scope"),
    ],
)
def test_options_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "loss", "rows"),
    [
        ("sft_completion", SFT(), range(4)),
        ("sft_full", SFT(scope="full"), range(4)),
        ("orpo_response", ORPO(sft_scope="response"), range(4)),
        ("trl_orpo_full_batch4", ORPO(), range(4)),
        *[(f"trl_orpo_full_row{i}", ORPO(), [i]) for i in range(4)],
    ],
)
def test_reference_values(shared, name, loss, rows):
    expected = json.loads((shared / "losses" / "expected.json").read_text())[name]["loss"]
    recorded = json.loads((shared / "losses" / "logps.json").read_text())
    sides = [(recorded[i]["chosen"], recorded[i]["rejected"]) for i in rows]
    groups = [
        make_group(f"{i}", *(len(s["completion"]) for s in pair), prompt=1 + len(pair[0]["prompt"]), pairs=[(0, 1)])
        for i, pair in enumerate(sides)
    ]
    logprobs = [[side["completion"] for side in pair] for pair in sides]
    prompts = [pair[0]["prompt"] for pair in sides]
    assert value(loss, groups, logprobs, prompts) == pytest.approx(expected, rel=1e-5)

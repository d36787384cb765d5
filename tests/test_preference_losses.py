"""Losses of preference pairs other than ORPO, at the level of log-probabilities and through a tiny model."""

from __future__ import annotations

import json
import math
from typing import ClassVar

import mlx.core as mx
import pytest
from attrs import evolve
from test_losses import gradient, value
from test_score import PREFERENCE
from tiny_run import adapter, run, same, tiny_run

from mortice import score
from mortice.batch import Completion, Group
from mortice.config import build_strategy, config_from_dict
from mortice.errors import ConfigError
from mortice.plugins import load_plugins
from mortice.structure import fields
from mortice.testing import LossSuite, loss_value, make_batch, make_group, make_scores
from mortice_plugins.losses.apo import APODown, APOZero
from mortice_plugins.losses.bco import BCO
from mortice_plugins.losses.cpo import CPO
from mortice_plugins.losses.discopop import DiscoPOP
from mortice_plugins.losses.dpo import DPO, one_minus_exp
from mortice_plugins.losses.exo import EXO
from mortice_plugins.losses.ipo import IPO
from mortice_plugins.losses.nca import NCA
from mortice_plugins.losses.orpo import ORPO
from mortice_plugins.losses.simpo import SimPO
from mortice_plugins.losses.sppo import SPPO

LN2 = math.log(2)
CONFIGURED = {
    "dpo": DPO(),
    "dpo-conservative": DPO(label_smoothing=0.1),
    "dpo-robust": DPO(variant="robust", label_smoothing=0.1),
    "dpo-hinge": DPO(variant="hinge"),
    "dpo-normalised": DPO(length_normalised=True),
    "dpo-desensitised": DPO(length_alpha=0.3),
    "dpo-forward-kl": DPO(divergence="forward-kl"),
    "dpo-js": DPO(divergence="js"),
    "dpo-alpha": DPO(divergence="alpha", alpha=0.5),
    "ipo": IPO(),
    "exo": EXO(),
    "nca": NCA(),
    "bco": BCO(),
    "sppo": SPPO(),
    "apo-zero": APOZero(),
    "apo-down": APODown(),
    "discopop": DiscoPOP(),
    "simpo": SimPO(),
    "simpo-nll": SimPO(nll_weight=0.5, label_smoothing=0.1),
    "cpo": CPO(),
    "cpo-hinge": CPO(variant="hinge"),
    "orpo-hinge": ORPO(variant="hinge", sft_scope="response"),
    "orpo-smoothed": ORPO(label_smoothing=0.1),
}
WITH_REFERENCE = {name: loss for name, loss in CONFIGURED.items() if "ref_logprobs" in loss.requires}


@pytest.mark.parametrize("name", CONFIGURED)
class TestConformance(LossSuite):
    configured: ClassVar = CONFIGURED

    @pytest.fixture(autouse=True)
    def _configure(self, name):
        self.loss = self.configured[name]


def pair(chosen, rejected, *, weight=1.0, id="a"):
    """A pair whose reference log-probabilities are these, behind two prompt tokens."""
    completions = [
        Completion(range(3, 3 + len(side)), ref_logprobs=side, weight=weight if k == 0 else 1.0)
        for k, side in enumerate((chosen, rejected))
    ]
    return Group(id, [1, 2], completions, [(0, 1)])


def at(loss, chosen, rejected):
    """The loss of one pair of one-token responses whose log-ratios to the reference are these."""
    return value(loss, [pair([-1.0], [-1.0])], [[[chosen - 1.0], [rejected - 1.0]]])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (DPO(), 0.598139),
        (DPO(label_smoothing=0.1), 0.618139),
        (DPO(variant="robust", label_smoothing=0.1), 0.573139),
        (DPO(label_smoothing=0.5), (0.598139 + 0.798139) / 2),
    ],
)
def test_case_b18_label_smoothing(loss, expected):
    """β 0.1, a margin of 4 under the policy and of 2 under the reference: h = 2."""
    groups = [pair([-2.0], [-4.0])]
    assert value(loss, groups, [[[-1.0], [-5.0]]]) == pytest.approx(expected, abs=1e-6)


def test_case_b18_conservative_gradient_is_zero_at_the_wanted_margin():
    loss = DPO(beta=1.0, label_smoothing=0.1)
    groups = [pair([-2.0], [-2.0])]
    wanted = math.log(0.9 / 0.1)  # 2.197225
    below, here, above = (gradient(loss, groups, [[[-2.0 + h], [-2.0]]])[0] for h in (1.0, wanted, 3.0))
    assert below < 0 < above
    assert here == pytest.approx(0.0, abs=1e-6)


def test_case_b17_ipo_on_means():
    """Sums −4 over 4 tokens and −16 over 8, the reference −6 and −16: h = 0.5, (0.5 − 5)² = 20.25; on sums 9."""
    groups = [pair([-1.5] * 4, [-2.0] * 8)]
    assert value(IPO(beta=0.1), groups, [[[-1.0] * 4, [-2.0] * 8]]) == pytest.approx(20.25, abs=1e-5)


def test_case_b17_simpo_on_means():
    groups = [make_group("a", 4, 8, pairs=[(0, 1)])]
    assert value(SimPO(beta=2.0, gamma=1.0), groups, [[[-1.0] * 4, [-2.0] * 8]]) == pytest.approx(0.313262, abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (DPO(beta=0.5), math.log(1 + math.exp(-1.5))),
        (DPO(beta=0.5, variant="hinge"), 0.0),
        (DPO(beta=0.1, variant="hinge"), 0.7),
        (EXO(beta=0.5, label_smoothing=0.1),
         sigmoid(1.5) * math.log(sigmoid(1.5) / 0.9) + sigmoid(-1.5) * math.log(sigmoid(-1.5) / 0.1)),
        (NCA(beta=0.5), -math.log(sigmoid(1)) - 0.5 * math.log(sigmoid(-1)) - 0.5 * math.log(sigmoid(0.5))),
        (BCO(beta=0.5), -math.log(sigmoid(1)) - math.log(sigmoid(0.5))),
        (SPPO(beta=0.5), (2 - 1) ** 2 + (-1 + 1) ** 2),
        (APOZero(beta=0.5), 1 - sigmoid(1) + sigmoid(-0.5)),
        (APODown(beta=0.5), sigmoid(1) + 1 - sigmoid(1.5)),
        (DiscoPOP(beta=0.5, tau=0.5),
         -math.log(sigmoid(1.5)) * (1 - sigmoid(3)) + math.exp(-1.5) * sigmoid(3)),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, float) else "",
)  # fmt: skip
def test_formulas_by_hand(loss, expected):
    """Log-ratios C = 2 and R = −1."""
    assert at(loss, 2.0, -1.0) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("divergence", "margin"),
    [
        ({"divergence": "reverse-kl"}, 3.0),
        ({"divergence": "forward-kl"}, math.exp(1) - math.exp(-2)),
        ({"divergence": "js"}, math.log(sigmoid(2)) - math.log(sigmoid(-1))),
        ({"divergence": "alpha", "alpha": 0.5}, 2 * (math.exp(0.5) - math.exp(-1))),
        ({"divergence": "alpha", "alpha": 1.0}, math.exp(1) - math.exp(-2)),
        ({"divergence": "alpha", "alpha": 1e-4}, pytest.approx(3.0, abs=1e-3)),
    ],
    ids=str,
)
def test_divergences_by_hand(divergence, margin):
    """C = 2 and R = −1; with the hinge the loss is 1 − 0.1 · margin."""
    assert 10 * (1 - at(DPO(variant="hinge", **divergence), 2.0, -1.0)) == (
        pytest.approx(margin, abs=1e-5) if isinstance(margin, float) else margin
    )


@pytest.mark.parametrize("x", [-1e4, -31.0, -29.0, -1.0, 0.0, 5.0, 1e4])
def test_one_minus_exp_neither_overflows_nor_stops(x):
    found, slope = mx.value_and_grad(one_minus_exp)(mx.array(x))
    steepest = min(-x, 30.0)
    expected = -math.expm1(-x) if x > -30 else 1 + math.exp(30) * (x + 29)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    assert slope.item() == pytest.approx(math.exp(steepest), rel=1e-5, abs=1e-30)


def test_length_normalised_takes_means():
    """Ratios (2, 4) and (−1, −1, −1): 3 + 1 instead of 6 + 3."""
    groups = [pair([-5.0] * 2, [-5.0] * 3)]
    logprobs = [[[-3.0, -1.0], [-6.0] * 3]]
    assert value(DPO(variant="hinge"), groups, logprobs) == pytest.approx(1 - 0.9, abs=1e-6)
    assert value(DPO(variant="hinge", length_normalised=True), groups, logprobs) == pytest.approx(0.6, abs=1e-6)


@pytest.mark.parametrize(("alpha", "margin"), [(1.0, 9.0), (0.5, 8.5), (0.0, 8.0)])
def test_length_alpha_weighs_the_rest_of_the_longer_response(alpha, margin):
    """Ratios (2, 4) and (−1, −1, −1): the third token of the rejected response is beyond the chosen one's length."""
    groups = [pair([-5.0] * 2, [-5.0] * 3)]
    loss = DPO(variant="hinge", length_alpha=alpha, beta=0.01)
    assert value(loss, groups, [[[-3.0, -1.0], [-6.0] * 3]]) == pytest.approx(1 - 0.01 * margin, abs=1e-6)


def test_length_alpha_counts_scored_tokens_of_each_pair():
    """One chosen response of 2 scored tokens (a masked one between) with rejected ones of 1 and 4."""
    chosen = Completion([3, 4, 5], [True, False, True], ref_logprobs=[0.0] * 3)
    others = [Completion(range(n), ref_logprobs=[0.0] * n) for n in (1, 4)]
    group = [Group("a", [1, 2], [chosen, *others], [(0, 1), (0, 2)])]
    loss = DPO(variant="hinge", length_alpha=0.0, beta=0.01)
    logprobs = [[[-1.0, -50.0, -2.0], [-4.0], [-8.0, -16.0, -32.0, -64.0]]]
    margins = (-1 + 4, -1 - 2 + 8 + 16)
    assert value(loss, group, logprobs) == pytest.approx(1 - 0.01 * sum(margins) / 2, abs=1e-6)


def test_cpo_by_hand():
    """Sums −2 and −6, β 0.5: −log σ(2), and the mean NLL of the chosen tokens of both pairs, (2 + 4) / 3."""
    groups = [make_group("a", 2, 1, pairs=[(0, 1)]), make_group("b", 1, 2, pairs=[(0, 1)])]
    logprobs = [[[-1.0, -1.0], [-6.0]], [[-4.0], [-4.0, -4.0]]]
    nothing = math.log(1 + math.exp(-2.0))
    assert value(CPO(beta=0.5, nll_weight=0.0), groups, logprobs) == pytest.approx(nothing, abs=1e-6)
    assert value(CPO(beta=0.5), groups, logprobs) == pytest.approx(nothing + 2.0, abs=1e-6)
    assert value(CPO(beta=0.125, variant="hinge", nll_weight=0.5), groups, logprobs) == pytest.approx(1.5, abs=1e-6)


def test_the_nll_counts_a_chosen_response_once_and_no_prompt():
    """One chosen response of two pairs; prompt targets are scored for another loss of the run."""
    group = [make_group("a", 2, 1, 1, prompt=3, pairs=[(0, 1), (0, 2)])]
    requires = {"pairs", "prompt_logprobs"}
    scores = make_scores(group, [[[-1.0, -3.0], [-2.0], [-2.0]]], requires, prompts=[[-9.0, -9.0]])
    total, count = CPO()(scores, make_batch(group, requires)).terms["nll"]
    assert (total.item(), count.item()) == (4.0, 2.0)


def test_simpo_options_by_hand():
    """z = 2 · (−1 + 2) − 1 = 1."""
    groups = [make_group("a", 1, 1, pairs=[(0, 1)])]
    loss = SimPO(gamma=1.0, label_smoothing=0.1, nll_weight=0.5)
    expected = -0.9 * math.log(sigmoid(1)) - 0.1 * math.log(sigmoid(-1)) + 0.5
    assert value(loss, groups, [[[-1.0], [-2.0]]]) == pytest.approx(expected, abs=1e-6)


def test_orpo_variants_by_hand():
    """Means −0.5 and −1.0: log-odds 0.974 of which −log σ is 0.320300."""
    groups = [make_group("a", 1, 1, pairs=[(0, 1)])]
    log_odds = 0.5 - math.log((1 - math.exp(-0.5)) / (1 - math.exp(-1.0)))

    def odds(**options):
        return value(ORPO(sft_scope="response", beta=1.0, **options), groups, [[[-0.5], [-1.0]]]) - 0.5

    assert odds() == pytest.approx(0.320300, abs=1e-6)
    assert odds(label_smoothing=0.1) == pytest.approx(0.320300 + 0.1 * log_odds, abs=1e-6)
    assert odds(variant="hinge") == pytest.approx(1 - log_odds, abs=1e-6)
    apart = ORPO(sft_scope="response", variant="hinge")
    assert gradient(apart, groups, [[[-0.5], [-3.0]]], terms={"odds"}) == [0.0, 0.0]


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_case_b04_identical_pair(name):
    """Chosen equal to rejected: the margin is 0, and what pulls on one side pushes as much on the other. `apo-down`
    alone still takes both down."""
    loss = WITH_REFERENCE[name]
    groups = [pair([-0.5, -2.0], [-0.5, -2.0])]
    logprobs = [[[-0.5, -2.0]] * 2]
    scores = make_scores(groups, logprobs, loss.requires)
    output = loss(scores, make_batch(groups, loss.requires))
    assert (output.metrics["margin"][0].item(), output.metrics["accuracy"][0].item()) == (0.0, 0.0)
    if isinstance(loss, DPO) and loss.variant == "sigmoid":
        assert loss_value([output]) == pytest.approx(0.693147, abs=1e-6)
    pulls = gradient(loss, groups, logprobs)
    assert any(pulls)
    together = [c + r for c, r in zip(pulls[:2], pulls[2:])]
    assert together == ([pytest.approx(0.025)] * 2 if isinstance(loss, APODown) else [0.0, 0.0])


@pytest.mark.parametrize("name", CONFIGURED)
def test_case_b25_pairs_are_the_denominator(name):
    """Pairs of 8 and of 1 token together are the mean of what each is alone, NLL over tokens apart."""
    loss = CONFIGURED[name]
    changes = {"nll_weight": 0.0} if hasattr(loss, "nll_weight") else {}
    changes |= {"sft_scope": "response"} if hasattr(loss, "sft_scope") else {}
    loss = evolve(loss, **changes)
    groups = [pair([-1.0] * 8, [-2.0] * 8, id="a"), pair([-3.0], [-1.0], id="b")]
    logprobs = [[[-0.5] * 8, [-2.5] * 8], [[-3.5], [-0.5]]]
    alone = [value(loss, [group], [own]) for group, own in zip(groups, logprobs)]
    assert value(loss, groups, logprobs) == pytest.approx(sum(alone) / 2, rel=1e-5)
    assert alone[0] != pytest.approx(alone[1], rel=1e-2)


@pytest.mark.parametrize("name", CONFIGURED)
def test_a_pair_counts_with_its_weight(name):
    """A pair of weight 3 is that pair three times."""
    loss = CONFIGURED[name]
    once, heavy = pair([-1.0, -1.0], [-2.0], id="a"), pair([-3.0, -2.0], [-1.0], id="b", weight=3.0)
    light = [pair([-3.0, -2.0], [-1.0], id=f"b{i}") for i in range(3)]
    own, other = [[-0.5, -0.25], [-2.5]], [[-3.5, -1.0], [-0.5]]
    prompts = [[-1.0]] * 4
    weighted = value(loss, [once, heavy], [own, other], prompts)
    assert weighted == pytest.approx(value(loss, [once, *light], [own, *[other] * 3], prompts), rel=1e-5)
    assert weighted != pytest.approx(value(loss, [once, light[0]], [own, other], prompts), rel=1e-3)


@pytest.mark.parametrize("name", CONFIGURED)
def test_the_loss_of_a_pair_is_clipped(name):
    """Of two pairs the one with the larger loss counts as much as `max_loss`, and has no gradient."""
    term = "odds" if isinstance(CONFIGURED[name], ORPO) else "preference"
    groups = [pair([-1.0] * 2, [-2.0] * 2, id="a"), pair([-3.0], [-1.0], id="b")]
    logprobs = [[[-0.9] * 2, [-1.2] * 2], [[-3.5], [-0.5]]]
    prompts = [[-1.0]] * 2

    def of(loss, which):
        own = [groups[i] for i in which]
        scores = make_scores(own, [logprobs[i] for i in which], loss.requires, prompts=[prompts[i] for i in which])
        return loss(scores, make_batch(own, loss.requires)).terms[term][0].item()

    alone = [of(CONFIGURED[name], [i]) for i in (0, 1)]
    limit = sum(alone) / 2
    assert min(alone) < limit < max(alone)
    loss = evolve(CONFIGURED[name], max_loss=limit)
    assert of(loss, [0, 1]) == pytest.approx(min(alone) + limit, rel=1e-5)
    scores = make_scores(groups, logprobs, loss.requires, prompts=prompts)
    total, count = loss(scores, make_batch(groups, loss.requires)).metrics["clipped"]
    assert total.item() / count.item() == 0.5
    whole = evolve(loss, sft_scope="response") if isinstance(loss, ORPO) else loss
    pulls = gradient(whole, groups, logprobs, terms={term})
    high, low = (pulls[4:], pulls[:4]) if alone[1] > alone[0] else (pulls[:4], pulls[4:])
    assert not any(high) and any(low)


def test_every_registered_loss_of_pairs_can_be_clipped():
    losses = [strategy.load() for strategy in load_plugins().registry.all("loss")]
    of_pairs = [cls for cls in losses if "pairs" in getattr(cls(), "requires", ()) or cls is ORPO]
    assert len(of_pairs) >= 13
    assert all("max_loss" in fields(cls) for cls in of_pairs)
    with pytest.raises(ValueError, match="max_loss"):
        DPO(max_loss=0.0)
    with pytest.raises(ConfigError, match=r"loss\.max_loss: unknown key"):
        build_strategy(load_plugins(), "loss", {"name": "sft", "max_loss": 1.0})


@pytest.mark.parametrize("name", CONFIGURED)
def test_metrics_of_both_sides(name):
    """Chosen gains and rejected loses against the reference in one of two pairs."""
    loss = CONFIGURED[name]
    groups = [pair([-2.0, -2.0], [-2.0], id="a"), pair([-2.0], [-2.0], id="b")]
    logprobs = [[[-1.0, -1.5], [-3.0]], [[-3.0], [-1.0]]]
    batch = make_batch(groups, loss.requires)
    found = loss(make_scores(groups, logprobs, loss.requires, prompts=[[-1.0]] * 2), batch).metrics
    means = {key: (total / count).item() for key, (total, count) in found.items()}
    assert (means["lw"], means["lr"], means["accuracy"]) == (-2.125, -2.0, 0.5)
    if not isinstance(loss, ORPO):
        assert means["reward_chosen"] - means["reward_rejected"] == pytest.approx(means["margin"], abs=1e-6)
    if name in ("dpo", "nca", "bco", "apo-zero", "exo", "sppo", "discopop"):
        assert means["reward_chosen"] == pytest.approx(0.1 * (1.5 - 1.0) / 2, abs=1e-6)
        assert means["reward_rejected"] == pytest.approx(0.1 * (-1.0 + 1.0) / 2, abs=1e-6)
    if name == "simpo":
        assert means["reward_chosen"] == pytest.approx(2.0 * (-1.25 - 3.0) / 2, abs=1e-6)


@pytest.mark.parametrize("prompt", [1, 2])
@pytest.mark.parametrize("name", CONFIGURED)
def test_case_b15_prompt_tokens_are_no_part_of_the_preference(name, prompt):
    """Chosen [.., 11, 12] and rejected [.., 13]: prompt targets, scored for another loss, change nothing."""
    loss = CONFIGURED[name]
    completions = [Completion([11, 12], ref_logprobs=[-1.5, -1.0]), Completion([13], ref_logprobs=[-2.0])]
    group = [Group("a", range(9, 9 + prompt), completions, [(0, 1)])]
    requires = loss.requires | {"prompt_logprobs"}
    batch = make_batch(group, requires)
    assert batch.lengths.tolist() == [2.0, 1.0]

    def preference(prompt_logprob):
        scores = make_scores(group, [[[-1.0, -2.0], [-3.0]]], requires, prompts=[[prompt_logprob] * (prompt - 1)])
        terms = loss(scores, batch).terms
        return terms.get("preference", terms.get("odds"))[0].item()

    plain = evolve(loss, sft_scope="response") if isinstance(loss, ORPO) else loss
    without = make_scores(group, [[[-1.0, -2.0], [-3.0]]], plain.requires)
    expected = plain(without, make_batch(group, plain.requires)).terms
    assert preference(-0.1) == preference(-8.0) == expected.get("preference", expected.get("odds"))[0].item()


def test_discopop_stays_finite_far_from_the_reference():
    """e^−z alone is infinite at z = −1,000; there the loss is logistic, and 1,000."""
    assert at(DiscoPOP(beta=1.0), -500.0, 500.0) == pytest.approx(1000.0)
    assert at(DiscoPOP(beta=1.0), 500.0, -500.0) == 0.0
    assert all(math.isfinite(g) for g in gradient(DiscoPOP(beta=1.0), [pair([-1.0], [-1.0])], [[[-501.0], [499.0]]]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DPO(variant="hinge", label_smoothing=0.1),
            "label_smoothing is 0.1, which variant 'hinge' does not use",
        ),
        (lambda: DPO(variant="robust"), "variant 'robust'.*found 0.0"),
        (lambda: DPO(variant="robust", label_smoothing=0.5), "variant 'robust'.*found 0.5"),
        (lambda: DPO(label_smoothing=0.6), "label_smoothing"),
        (lambda: DPO(alpha=0.5), "alpha is 0.5, which divergence 'reverse-kl' does not use"),
        (lambda: DPO(divergence="alpha"), "divergence 'alpha' needs alpha"),
        (lambda: DPO(divergence="alpha", alpha=0.0), "'alpha' must be > 0"),
        (lambda: DPO(length_normalised=True, length_alpha=0.5), "length_normalised.*found 0.5"),
        (lambda: DPO(length_normalised=True, divergence="js"), "length_normalised.*'js'"),
        (lambda: DPO(length_alpha=1.5), "length_alpha"),
        (lambda: DPO(beta=0.0), "beta"),
        (lambda: DPO(variant="ipo"), "variant"),
        (lambda: EXO(label_smoothing=0.0), "label_smoothing"),
        (lambda: EXO(label_smoothing=0.5), "label_smoothing"),
        (lambda: DiscoPOP(tau=1.0), "tau"),
        (lambda: CPO(variant="hinge", label_smoothing=0.1), "label_smoothing is 0.1, which variant 'hinge'"),
        (lambda: ORPO(variant="hinge", label_smoothing=0.1), "label_smoothing is 0.1, which variant 'hinge'"),
        (lambda: SimPO(gamma=-1.0), "gamma"),
    ],
)
def test_options_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_case_b18_an_option_without_effect_is_an_error_of_the_run_file():
    tables = {"model": {"path": "org/name"}, "data": {"format": "preference"}}
    with pytest.raises(ConfigError, match=r"loss: label_smoothing is 0\.1, which variant 'hinge' does not use"):
        config_from_dict({**tables, "loss": {"name": "dpo", "variant": "hinge", "label_smoothing": 0.1}})
    with pytest.raises(ConfigError, match=r"loss\.label_smoothing: unknown key"):
        config_from_dict({**tables, "loss": {"name": "ipo", "label_smoothing": 0.1}})


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo", "cpo"])
def test_case_b14_training_changes_the_adapter(home, loss):
    """The gradient reaches the weights, and the loss goes down; DPO starts at ln 2."""
    outcome = run(home, "train.steps=1", loss=loss)
    saved = adapter(outcome.path / "adapter")
    assert all(mx.abs(value).max().item() > 0 for name, value in saved.items() if name.endswith("lora_b"))
    longer = run(home, "train.steps=8", loss=loss)
    assert longer.after["loss"] < longer.before["loss"]
    assert not same(saved, adapter(longer.path / "adapter"))
    if loss == "dpo":
        assert (longer.before["loss"], longer.before["margin"]) == (pytest.approx(LN2, abs=1e-7), 0.0)
    assert longer.after["margin"] > longer.before["margin"]


@pytest.fixture(scope="module")
def pairs(shared):
    rows = json.loads((shared / "losses" / "pairs.json").read_text())
    return [{"prompt_ids": r["prompt_ids"], "completions": [r["chosen_ids"], r["rejected_ids"]]} for r in rows]


def test_case_b25_a_step_of_dpo_does_not_depend_on_its_micro_batches(shared, pairs):
    """Eight pairs at once, in twos, or one by one: one gradient."""
    groups = [*pairs, *({**pair, "prompt_ids": pair["prompt_ids"][:-1]} for pair in pairs)]
    found = [
        score(
            shared / "losses" / "base", groups, loss="dpo", adapter=shared / "losses" / "adapter", reference="base",
            gradients=True, micro_batch_size=size,
        )
        for size in (8, 2, 1)
    ]  # fmt: skip
    for other in found[1:]:
        assert other.loss == pytest.approx(found[0].loss, rel=1e-6)
        for name, expected in found[0].gradients.items():
            assert mx.abs(other.gradients[name] - expected).max().item() <= 1e-5 * mx.abs(expected).max().item()


@pytest.mark.parametrize("layout", ["separate", "prefix-shared", "packed"])
@pytest.mark.parametrize("head", ["dense", "flash-cce"])
@pytest.mark.parametrize(("backward", "gradients"), [("full", False), ("segmented", True), ("full", True)])
def test_a_policy_against_itself_is_at_ln_2(shared, pairs, head, layout, backward, gradients):
    """Exactly: the reference is scored by the forward that scores the policy."""
    found = score(
        shared / "losses" / "base", pairs, loss="dpo", adapter=shared / "losses" / "adapter", head=head, layout=layout,
        backward=backward, gradients=gradients, micro_batch_size=2,
    )  # fmt: skip
    assert found.loss == mx.array(LN2).item()
    for name in ("margin", "reward_chosen", "reward_rejected", "displacement", "kl_k1", "kl_k3"):
        assert found.metrics[name] == 0.0


@pytest.mark.parametrize("name", PREFERENCE)
def test_reference_values(shared, name):
    """The recorded log-probabilities of policy and base, without a model."""
    expected = json.loads((shared / "losses" / "expected.json").read_text())[name]["loss"]
    recorded = json.loads((shared / "losses" / "logps.json").read_text())
    loss = build_strategy(load_plugins(), "loss", PREFERENCE[name]).options
    groups = [pair(*(row[side]["ref_completion"] for side in row), id=str(i)) for i, row in enumerate(recorded)]
    logprobs = [[row[side]["completion"] for side in row] for row in recorded]
    assert value(loss, groups, logprobs) == pytest.approx(expected, rel=1e-5)

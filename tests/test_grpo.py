"""GRPO and its kin, at the level of log-probabilities and against reference values."""

from __future__ import annotations

import json
import math
from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve
from test_losses import gradient, value
from test_score import HEADS, WAYS, peft_gradients, relative

from mortice import score
from mortice.batch import Completion, Group
from mortice.config import build_strategy
from mortice.errors import ConfigError
from mortice.plugins import load_plugins
from mortice.testing import LossSuite, make_batch, make_scores
from mortice_plugins.losses.grpo import GRPO
from mortice_plugins.losses.rloo import RLOO

CONFIGURED = {
    "grpo": GRPO(beta=0.04),
    "bnpo": GRPO(variant="bnpo", entropy=False),
    "dr-grpo": GRPO(variant="dr-grpo", max_tokens=16),
    "dapo": GRPO(variant="dapo", delta=2.0),
    "cispo": GRPO(variant="cispo"),
    "gspo": GRPO(variant="gspo"),
    "corrected": GRPO(importance_cap=2.0),
    "gspo-corrected": GRPO(variant="gspo", importance_cap=2.0),
    "rloo": RLOO(),
    "rloo-kl": RLOO(beta=0.1),
}
FORMS = {
    "form_grpo": {"beta": 0.04},
    "form_dapo": {"variant": "dapo"},
    "form_dr_grpo": {"variant": "dr-grpo", "max_tokens": 16},
    "form_cispo": {"variant": "cispo", "clip_high": 0.1},
    "form_gspo": {"variant": "gspo"},
}


@pytest.mark.parametrize("name", CONFIGURED)
class TestConformance(LossSuite):
    configured: ClassVar = CONFIGURED

    @pytest.fixture(autouse=True)
    def _configure(self, name):
        self.loss = self.configured[name]


def group(*answers, old=-1.0, id="a", **vectors):
    """(advantage, tokens) of each answer; the policy that sampled gave each token `old`."""
    completions = [
        Completion(range(3, 3 + n), advantage=a, old_logprobs=[old] * n, **{k: [v] * n for k, v in vectors.items()})
        for a, n in answers
    ]
    return Group(id, [1, 2], completions)


def at(loss, ratio, advantage, tokens=1, **vectors):
    """The loss of answers of which the first has this advantage and all tokens this ratio, the other one none."""
    groups = [group((advantage, tokens), (0.0, tokens), **vectors)]
    logprobs = [[[math.log(ratio) - 1.0] * tokens, [-1.0] * tokens]]
    return 2 * value(loss, groups, logprobs), gradient(loss, groups, logprobs)[0]


@pytest.mark.parametrize(("head", "backward", "layout"), WAYS)
@pytest.mark.parametrize("name", FORMS)
def test_loss_and_gradients_equal_the_reference(shared, name, head, backward, layout):
    rows = json.loads((shared / "losses" / "groups.json").read_text())
    scaled = name != "form_dr_grpo"
    groups = []
    for row in rows:
        rewards = np.asarray(row["rewards"])
        advantages = rewards - rewards.mean()
        advantages = advantages / (rewards.std(ddof=1) + 1e-4) if scaled else advantages
        groups.append(
            {"prompt_ids": row["prompt_ids"], "completions": row["completions"], "advantages": advantages.tolist(),
             "old_logprobs": row["old_logps"]}
        )  # fmt: skip
    found = score(
        shared / "losses" / "base", groups, loss={"name": "grpo", **FORMS[name]}, head=head, backward=backward,
        layout=layout, adapter=shared / "losses" / "adapter", reference="base", gradients=True,
    )  # fmt: skip
    want = json.loads((shared / "losses" / "expected.json").read_text())[name]["loss"]
    assert found.loss == pytest.approx(want, abs=1e-5)
    assert relative(found.gradients, peft_gradients(shared / "losses" / f"grads_{name}.safetensors")) < 1e-4


def test_every_form_is_compared(shared):
    expected = json.loads((shared / "losses" / "expected.json").read_text())
    assert {name for name in expected if name.startswith("form_")} == set(FORMS)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves"),
    [(1.5, 1.0, -1.2, False), (1.5, -1.0, 1.5, True), (0.5, 1.0, -0.5, True), (0.5, -1.0, 0.8, False)],
)
def test_case_b22_clipping(ratio, advantage, loss, moves):
    found, slope = at(GRPO(), ratio, advantage)
    assert found == pytest.approx(loss, abs=1e-6)
    assert slope == pytest.approx(-ratio * advantage if moves else 0.0, abs=1e-6)


def test_case_b22_bounds_are_two():
    wide = GRPO(clip_low=0.2, clip_high=0.28)
    assert at(wide, 1.5, 1.0)[0] == pytest.approx(-1.28, abs=1e-6)
    assert at(wide, 0.5, -1.0)[0] == pytest.approx(0.8, abs=1e-6)
    assert at(GRPO(clip_low=0.4), 0.5, -1.0)[0] == pytest.approx(0.6, abs=1e-6)


def test_delta_bounds_what_nothing_else_does():
    assert at(GRPO(), 5.0, -1.0)[0] == pytest.approx(5.0, abs=1e-5)
    assert at(GRPO(delta=3.0), 5.0, -1.0) == (pytest.approx(3.0, abs=1e-5), pytest.approx(0.0, abs=1e-6))
    assert at(GRPO(delta=3.0), 5.0, 1.0)[0] == at(GRPO(), 5.0, 1.0)[0]


def test_case_b23_three_means_are_three_numbers():
    """Answers of 2 and 8 tokens with a loss of −1 and +1 each token."""
    groups = [group((1.0, 2), (-1.0, 8))]
    logprobs = [[[-1.0] * 2, [-1.0] * 8]]
    assert value(GRPO(), groups, logprobs) == pytest.approx(0.0, abs=1e-6)
    for variant in ("bnpo", "dapo"):
        assert value(GRPO(variant=variant), groups, logprobs) == pytest.approx(0.6, abs=1e-6)
    assert value(GRPO(variant="dr-grpo", max_tokens=16), groups, logprobs) == pytest.approx(0.1875, abs=1e-6)


def test_without_bounds_it_is_the_plain_policy_gradient():
    """Σ over answers of the mean over their tokens of −A · r · ∇log π."""
    groups, logprobs = [group((0.7, 3), (-0.2, 2))], [[[-0.5, -1.1, -2.0], [-0.9, -1.0]]]
    found = gradient(GRPO(clip_low=0.999999, clip_high=1e9), groups, logprobs)
    ratios = [math.exp(x + 1.0) for side in logprobs[0] for x in side]
    weights = [-0.7 / 3] * 3 + [0.2 / 2] * 2
    assert found == pytest.approx([w * r for w, r in zip(weights, ratios)], abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (GRPO(), [-0.7 / 3] * 3 + [0.2 / 2] * 2),
        (GRPO(variant="gspo"), [-0.7 / 3] * 3 + [0.2 / 2] * 2),
        (GRPO(variant="cispo"), [-0.7] * 3 + [0.2] * 2),
        (RLOO(), [-0.7] * 3 + [0.2] * 2),
    ],
)
def test_on_the_first_pass_the_gradient_is_that_of_advantage_times_logprob(loss, expected):
    groups, logprobs = [group((0.7, 3), (-0.2, 2))], [[[-1.0] * 3, [-1.0] * 2]]
    assert gradient(loss, groups, logprobs) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss", [loss for loss in CONFIGURED.values() if "ref_logprobs" not in loss.requires])
def test_groups_without_signal_give_nothing(loss):
    vectors = {"sampler_logprobs": -1.0}
    found = gradient(loss, [group((0.0, 3), (0.0, 2), **vectors)], [[[-0.5] * 3, [-2.0] * 2]])
    assert all(x == 0.0 for x in found)


def test_k3_and_its_weight():
    groups = [group((0.0, 2), (0.0, 2), ref_logprobs=-1.5)]
    logprobs = [[[-1.0] * 2, [-1.0] * 2]]
    k3 = math.exp(-0.5) - 1 + 0.5
    assert value(GRPO(beta=0.1), groups, logprobs) == pytest.approx(0.1 * k3, abs=1e-6)
    assert value(RLOO(beta=0.1), groups, logprobs) == pytest.approx(0.2 * k3, abs=1e-6)


def test_a_sampler_that_differs_is_corrected_up_to_a_cap():
    near, far = ({"sampler_logprobs": -1.0 - math.log(w)} for w in (1.5, 5.0))
    loss = GRPO(importance_cap=2.0)
    assert at(loss, 1.0, 1.0, **near)[0] == pytest.approx(-1.5, abs=1e-5)
    assert at(loss, 1.0, 1.0, **far)[0] == pytest.approx(-2.0, abs=1e-5)
    whole = GRPO(variant="gspo", importance_cap=10.0)
    groups = [
        Group("a", [1], [Completion([3, 4], advantage=1.0, old_logprobs=[-1.0, -1.0], sampler_logprobs=[-2.0, -3.0]),
                         Completion([3], advantage=0.0, old_logprobs=[-1.0], sampler_logprobs=[-1.0])])
    ]  # fmt: skip
    assert 2 * value(whole, groups, [[[-1.0, -1.0], [-1.0]]]) == pytest.approx(-math.exp(1.5), abs=1e-5)


@pytest.mark.parametrize("loss", CONFIGURED.values(), ids=CONFIGURED)
def test_masked_answers_count_for_nothing(loss):
    vectors = {"ref_logprobs": -1.2, "sampler_logprobs": -1.1}
    some = group((1.0, 2), (1.0, 2), **vectors)
    cut = group((-3.0, 6), **vectors).completions[0]
    every = some.with_completions([*some.completions, evolve(cut, weight=0.0)])
    logprobs = [[-0.8] * 2, [-1.3] * 2]
    assert value(loss, [every], [[*logprobs, [-2.0] * 6]]) == pytest.approx(value(loss, [some], [logprobs]), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "dr-grpo"}, "needs max_tokens"),
        ({"max_tokens": 5}, "max_tokens is 5, which variant 'grpo' does not use"),
        ({"variant": "cispo", "clip_low": 0.1}, "clip_low is 0.1, which variant 'cispo' does not use"),
        ({"variant": "cispo", "delta": 9.0}, "delta is 9.0, which variant 'cispo' does not use"),
        ({"clip_low": 1.5}, "clip_low must be below 1"),
        ({"delta": 1.1}, "delta must be above 1 \\+ clip_high = 1.2"),
        ({"variant": "grop"}, "grpo"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ConfigError, match=message):
        build_strategy(load_plugins(), "loss", {"name": "grpo", **options})


def test_what_it_needs():
    assert GRPO(entropy=False).requires == {"groups", "advantages", "old_logprobs"}
    assert GRPO(beta=0.1).requires == {"groups", "advantages", "old_logprobs", "ref_logprobs", "entropy"}
    assert "sampler_logprobs" in GRPO(importance_cap=2.0).requires


def test_metrics_say_how_often_the_ratio_was_out_of_bounds():
    groups = [group((1.0, 2), (-1.0, 2))]
    loss = GRPO(entropy=False)
    logprobs = [[[math.log(1.5) - 1.0, -1.0], [math.log(0.5) - 1.0, math.log(1.5) - 1.0]]]
    output = loss(make_scores(groups, logprobs, loss.requires), make_batch(groups, loss.requires))
    found = {name: (total / count).item() for name, (total, count) in output.metrics.items()}
    assert found["clip_high"] == pytest.approx(0.25) and found["clip_low"] == pytest.approx(0.25)
    assert found["ratio"] == pytest.approx((1.5 + 1 + 0.5 + 1.5) / 4)
    assert isinstance(output.terms["policy"][0], mx.array) and len(HEADS) == 2

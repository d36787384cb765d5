"""Faults that users met in other trainers, for every loss of pairs that is registered, and the metrics of all."""

from __future__ import annotations

import json
import math

import mlx.core as mx
import pytest
from attrs import evolve, fields_dict
from test_losses import gradient, value
from test_preference_losses import CONFIGURED, pair
from tiny_run import RUN_FILE, adapter, configure, metrics, pairs, run, tiny_run, validations, write_lines

from mortice.batch import Limits
from mortice.errors import ConfigError, DataError
from mortice.launch import prepare
from mortice.objective import WeightedLoss
from mortice.plugins import load_plugins
from mortice.reference import Reference
from mortice.testing import make_batch, make_scores

LN2 = math.log(2)


def instance(cls):
    """With its defaults, or where it has required options the first of its `examples`."""
    try:
        return cls()
    except TypeError:
        return next(iter(cls.examples() if callable(cls.examples) else cls.examples))


REGISTERED = {
    strategy.name: loss
    for strategy in load_plugins().registry.all("loss")
    if "pairs" in getattr(loss := instance(strategy.load()), "requires", ()) and "values" not in loss.requires
}
every = pytest.mark.parametrize("name", REGISTERED)
MEANS = {"ipo", "simpo", "orpo"}
"""Losses that go by mean log-probabilities a token; all others go by sums."""


def test_every_one_is_tested_by_hand():
    assert set(map(type, REGISTERED.values())) <= set(map(type, CONFIGURED.values()))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """10 pairs to train on and 3 held out."""
    text = RUN_FILE.replace("[train]", "[train]\nvalidate_every = 99\nmicro_batch_size = 4")
    return tiny_run(tmp_path_factory.mktemp("cases"), text + "\n[reference]\ncache = false\n")


@pytest.fixture(scope="module")
def ready(home):
    """The engine, moved parameters, and groups scored under the reference, which is the base."""
    prepared = prepare(configure(home, loss="dpo"))
    groups = Reference(prepared.engine, dict(prepared.policy.params)).fill(prepared.source.train)
    params = {
        name: value + 0.05 * mx.random.normal(value.shape, key=mx.random.key(i))
        for i, (name, value) in enumerate(sorted(prepared.policy.params.items()))
    }
    return prepared.engine, params, groups


def engine_of(engine, name, size=4):
    return evolve(engine, losses=(WeightedLoss(name, REGISTERED[name]),), limits=Limits(groups=size))


@every
def test_case_b04_identical_and_empty_answers(home, tmp_path, name):
    """An empty answer is its end of sequence; identical ones are counted, and train nobody."""
    file = home.parent / f"b04-{name}.toml"
    records = [*pairs(["red", "blue"]), {"prompt": "say: ", "chosen": "", "rejected": "no"}]
    same = {"prompt": "say: ", "chosen": "yes", "rejected": "yes"}
    write_lines(tmp_path / "some.jsonl", [*records, same])
    write_lines(tmp_path / "only.jsonl", [same, same])
    file.write_text(home.read_text().replace('"train.jsonl"', f'"{tmp_path / "some.jsonl"}"'))
    outcome = run(file, "train.steps=1", loss=name)
    line = metrics(outcome)[0]
    assert math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])
    assert (line["pairs"], line["identical_pairs"], line["data_identical_pairs"]) == (4, 1, 1)
    with pytest.raises(DataError, match="chosen and rejected are identical"):
        prepare(configure(file, f"data.train={tmp_path / 'only.jsonl'}", loss=name))


@every
def test_case_b04_an_identical_pair_pulls_at_nothing(name):
    """What pulls on one side pushes as much on the other, the NLL apart. `apo-down` alone takes both down."""
    loss = evolve(REGISTERED[name], sft_scope="response") if name == "orpo" else REGISTERED[name]
    groups = [pair([-0.5, -2.0], [-0.5, -2.0])]
    term = "odds" if name == "orpo" else "preference"
    pulls = gradient(loss, groups, [[[-0.5, -2.0]] * 2], terms={term})
    assert any(pulls)
    together = [c + r for c, r in zip(pulls[:2], pulls[2:])]
    assert together == ([pytest.approx(0.025)] * 2 if name == "apo-down" else [0.0, 0.0])


@every
def test_case_b05_the_prompt_is_cut_not_the_answer(home, tmp_path, name):
    """8 prompt tokens and answers of 3: of 10 in all, 7 of the prompt stay, from the side that is asked for."""
    write_lines(tmp_path / "train.jsonl", [{"prompt": "abcdefgh", "chosen": "xy", "rejected": "z"}])
    file = tmp_path / "run.toml"
    file.write_text(home.read_text().replace('path = "model"', f'path = "{home.parent / "model"}"'))
    (tmp_path / "valid.jsonl").write_bytes((home.parent / "valid.jsonl").read_bytes())
    found = []
    for side in ("keep-start", "keep-end"):
        prepared = prepare(configure(file, "data.max_length=10", f"data.truncation={side}", loss=name))
        [group] = prepared.source.train
        assert [len(group.prompt_ids), *(len(c.ids) for c in group.completions)] == [7, 3, 2]
        params = prepared.policy.params
        tally = prepared.engine.evaluate(params, Reference(prepared.engine, params).fill([group]))
        assert math.isfinite(tally.loss)
        found.append((group.prompt_ids, tally.values()["logprobs_chosen"]))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


@every
def test_case_b14_a_step_changes_the_adapter(home, name):
    outcome = run(home, "train.steps=1", loss=name)
    saved = adapter(outcome.path / "adapter")
    assert all(mx.abs(value).max().item() > 0 for key, value in saved.items() if key.endswith("lora_b"))


@every
def test_case_b17_means_or_sums(name):
    """Answers of twice the length, each token as likely: a loss of means stays, a loss of sums does not."""
    loss = REGISTERED[name]
    loss = evolve(loss, sft_scope="response") if name == "orpo" else loss
    loss = evolve(loss, nll_weight=0.0) if hasattr(loss, "nll_weight") else loss
    once = value(loss, [pair([-1.5] * 2, [-2.0] * 3)], [[[-1.0] * 2, [-2.5] * 3]])
    twice = value(loss, [pair([-1.5] * 4, [-2.0] * 6)], [[[-1.0] * 4, [-2.5] * 6]])
    assert (twice == pytest.approx(once, rel=1e-6)) == (name in MEANS)


@every
def test_case_b18_label_smoothing_has_an_effect_or_is_an_error(home, name):
    loss = REGISTERED[name]
    if "label_smoothing" in fields_dict(type(loss)):
        groups, logprobs = [pair([-1.0], [-2.0])], [[[-0.5], [-3.5]]]
        values = [value(evolve(loss, label_smoothing=e), groups, logprobs, [[-1.0]]) for e in (0.01, 0.2)]
        assert values[0] != pytest.approx(values[1], rel=1e-4)
        with pytest.raises(ConfigError, match="label_smoothing"):
            configure(home, "loss.label_smoothing=0.6", f"loss.name={name}")
    else:
        with pytest.raises(ConfigError, match=r"loss\.label_smoothing: unknown key"):
            configure(home, "loss.label_smoothing=0.1", f"loss.name={name}")


@every
def test_case_b25_micro_batches_give_one_gradient(ready, name):
    engine, params, groups = ready
    found = [engine_of(engine, name, size).gradients(params, groups) for size in (10, 4, 1)]
    tally, expected = found[0]
    norm = math.sqrt(sum(mx.square(g).sum().item() for g in expected.values()))
    assert norm > 0
    for other, gradients in found[1:]:
        assert other.values() == pytest.approx(tally.values(), rel=1e-5, abs=1e-6)
        apart = sum(mx.square(gradients[key] - expected[key]).sum().item() for key in expected)
        assert math.sqrt(apart) <= 1e-5 * norm


@every
def test_case_b35_evaluation_is_the_same_for_every_batch_size(ready, name):
    engine, params, groups = ready
    found = [engine_of(engine, name, size).evaluate(params, groups[:7]).values() for size in (1, 2, 3, 99)]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-6, abs=1e-6)
    assert engine_of(engine, name, 3).evaluate(params, groups[:7]).values() == found[2]
    assert found[0]["pairs"] == 7
    alone = [engine_of(engine, name).evaluate(params, [group]).values()["margin"] for group in groups[:7]]
    assert found[0]["margin"] == pytest.approx(sum(alone) / 7, rel=1e-5)


# Metrics

EVERYWHERE = {
    "reward_chosen", "reward_rejected", "margin", "accuracy", "logprobs_chosen", "logprobs_rejected", "lw", "lr",
    "pairs", "identical_pairs",
}  # fmt: skip
AGAINST = {"kl_k1", "kl_k3", "displacement"}


@every
def test_metrics_of_training_and_validation(home, name):
    outcome = run(home, "train.steps=3", loss=name)
    with_reference = "ref_logprobs" in REGISTERED[name].requires
    expected = EVERYWHERE | (AGAINST if with_reference else set())
    for line in metrics(outcome):
        assert expected <= set(line)
    first, last = validations(outcome)[0], validations(outcome)[-1]
    assert {f"valid/{name}" for name in expected | {"displacement"}} <= set(first)
    assert (first["valid/displacement"], first["valid/pairs"], first["valid/identical_pairs"]) == (0.0, 3, 0)
    assert last["valid/displacement"] == pytest.approx(last["valid/lw"] - first["valid/lw"], abs=1e-5)
    assert last["valid/displacement"] != 0
    if with_reference:
        assert (first["valid/kl_k1"], first["valid/kl_k3"], first["valid/margin"]) == (0.0, 0.0, 0.0)
        assert last["valid/kl_k3"] > 0
    saved = json.loads((outcome.checkpoint / "state.json").read_text())
    assert saved["start"]["lw"] == first["valid/lw"]


@every
def test_metrics_by_hand(name):
    """Pairs of weight 1 and 3, whose tokens have log-ratios (1, 1 | −1) and (0 | 2)."""
    loss = REGISTERED[name]
    groups = [pair([-2.0, -2.0], [-2.0], id="a"), pair([-3.0], [-4.0], id="b", weight=3.0)]
    logprobs = [[[-1.0, -1.0], [-3.0]], [[-3.0], [-2.0]]]
    requires = loss.requires | {"ref_logprobs"}
    scores = make_scores(groups, logprobs, requires, prompts=[[-1.0]] * 2)
    found = loss(scores, make_batch(groups, requires)).metrics
    means = {key: (total / count).item() for key, (total, count) in found.items()}
    assert means["logprobs_chosen"] == pytest.approx((-2 - 3 * 3) / 4)
    assert means["logprobs_rejected"] == pytest.approx((-3 - 3 * 2) / 4)
    assert means["lw"] == pytest.approx((-1 - 3 * 3) / 4)
    assert means["displacement"] == pytest.approx((1 + 3 * 0) / 4)
    assert means["kl_k1"] == pytest.approx((1 + 1 - 1 + 3 * (0 + 2)) / (3 + 3 * 2))
    k3 = [math.exp(-r) - 1 + r for r in (1, 1, -1, 0, 2)]
    assert means["kl_k3"] == pytest.approx((sum(k3[:3]) + 3 * sum(k3[3:])) / (3 + 3 * 2), rel=1e-5)
    assert means["accuracy"] == 0.25


def test_one_hopeless_token_does_not_make_a_metric_infinite():
    groups = [pair([-1.0], [-1.0])]
    loss = REGISTERED["simpo"]
    requires = loss.requires | {"ref_logprobs"}
    found = loss(make_scores(groups, [[[-500.0], [-1.0]]], requires), make_batch(groups, requires)).metrics
    assert math.isfinite(found["kl_k3"][0].item()) and found["kl_k3"][0].item() > 1e12

"""KTO and the format of single labelled answers, and what losses may know of a whole step or of the steps before."""

from __future__ import annotations

import json
import math
from typing import ClassVar

import mlx.core as mx
import pytest
from attrs import evolve, frozen
from tiny_run import WORDS, configure, metrics, run, tiny_run, validations, write_lines
from tiny_tokenizers import tokenizer

from mortice import score
from mortice.batch import LABEL, Completion, Group, Limits, LossOutput
from mortice.checkpoint import load_checkpoint
from mortice.config import build_strategy, check_requirements
from mortice.data import with_unrelated
from mortice.errors import ConfigError, DataError
from mortice.launch import Notices, prepare
from mortice.plugins import load_plugins
from mortice.step import added, restored_statistics, saved_statistics
from mortice.testing import LossSuite, loss_value, make_batch, make_scores
from mortice_plugins.formats.unpaired import Unpaired
from mortice_plugins.losses.bco import BCO
from mortice_plugins.losses.kto import KTO
from mortice_plugins.losses.pairs import log_ratios


@pytest.mark.parametrize("name", ["mismatched", "batch", "none"])
class TestKTO(LossSuite):
    @pytest.fixture(autouse=True)
    def _configure(self, name):
        self.loss = KTO(kl=name, desirable_weight=1.5)


class TestRunningShift(LossSuite):
    loss: ClassVar = BCO(shift="running")


# The loss


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def labelled(label: float | None, *, id: str = "a", weight: float = 1.0, reference: float = -1.0) -> Group:
    extras = {} if label is None else {LABEL: label}
    return Group(id, [1, 2], [Completion([3], ref_logprobs=[reference], weight=weight, extras=extras)])


def found(loss, groups, logprobs, kl: float = 0.0) -> LossOutput:
    batch = evolve(make_batch(groups, loss.requires), statistics={"kl": mx.array(kl)})
    return loss(make_scores(groups, logprobs, loss.requires), batch)


@pytest.mark.parametrize(
    ("label", "kl", "expected"),
    [
        (1.0, 0.0, 1.5 * (1 - sigmoid(0.5 * 2))),
        (1.0, 3.0, 1.5 * (1 - sigmoid(0.5 * (2 - 3)))),
        (1.0, -3.0, 1.5 * (1 - sigmoid(0.5 * 2))),
        (0.0, 0.0, 0.8 * (1 - sigmoid(-0.5 * 2))),
        (0.0, 3.0, 0.8 * (1 - sigmoid(0.5 * (3 - 2)))),
    ],
)
def test_the_loss_by_hand(label, kl, expected):
    """A log-ratio of 2; a divergence below 0 counts as 0."""
    loss = KTO(beta=0.5, desirable_weight=1.5, undesirable_weight=0.8)
    assert loss_value([found(loss, [labelled(label)], [[[1.0]]], kl)]) == pytest.approx(expected, rel=1e-6)


def test_no_reference_point():
    loss = KTO(beta=0.5, kl="none")
    assert loss_value([found(loss, [labelled(1.0)], [[[1.0]]], 3.0)]) == pytest.approx(1 - sigmoid(1.0), rel=1e-6)
    assert loss.statistics_of is None and "unrelated" not in loss.requires


def test_the_mean_is_over_answers_by_their_weights_whatever_their_kind():
    groups = [labelled(1.0), labelled(0.0, id="b", weight=3.0), labelled(None, id="c")]
    output = found(KTO(beta=1.0), groups, [[[0.0]], [[1.0]], [[9.0]]])
    assert loss_value([output]) == pytest.approx(((1 - sigmoid(1)) + 3 * sigmoid(2)) / 4, rel=1e-6)
    means = {
        name: (value[0] / value[1]).item() if isinstance(value, tuple) else value.item()
        for name, value in output.metrics.items()
    }
    assert means["reward_desirable"] == 1.0 and means["reward_undesirable"] == 2.0
    assert (means["desirable"], means["accuracy"], means["kl"]) == (0.25, 0.25, 0.0)
    assert (means["logprobs_desirable"], means["logprobs_undesirable"]) == (0.0, 1.0)


def test_pairs_are_answers_of_both_kinds():
    """Chosen is desirable, rejected is not; one that is both is left out; a record's own label goes before."""
    pairs = Group("a", [1], [Completion([k]) for k in (3, 4, 5, 6)], ((0, 1), (1, 2)))
    assert make_batch([pairs]).labels.tolist()[0] == 1.0
    assert [math.isnan(x) for x in make_batch([pairs]).labels.tolist()] == [False, True, False, True]
    told = pairs.with_completions([evolve(c, extras={LABEL: 0.0}) for c in pairs.completions])
    assert make_batch([told]).labels.tolist() == [0.0] * 4


def test_options_are_checked():
    with pytest.raises(ValueError, match="both 0"):
        KTO(desirable_weight=0.0, undesirable_weight=0.0)
    for options in ({"kl": "running"}, {"beta": 0.0}, {"desirable_weight": -1.0}):
        with pytest.raises(ValueError):
            KTO(**options)
    with pytest.raises(ValueError, match=r"shift_decay is 0\.5, which shift 'none' does not use"):
        BCO(shift_decay=0.5)


# Answers to other prompts


def test_each_prompt_gets_the_next_answer_of_another():
    prompts = [[1], [1], [2], [1]]
    groups = [Group(str(i), p, [Completion([10 + i], weight=0.0, ref_logprobs=[0.0])]) for i, p in enumerate(prompts)]
    others = [g.unrelated for g in with_unrelated(groups, 9)]
    assert [other.completions[0].ids for other in others] == [(12,), (12,), (13,), (12,)]
    assert [other.prompt_ids for other in others] == [(1,), (1,), (2,), (1,)]
    assert {(c.weight, c.ref_logprobs) for other in others for c in other.completions} == {(1.0, None)}


def test_prompt_and_other_answer_are_cut_to_length():
    groups = [Group("a", [1, 2, 3, 4], [Completion([9])]), Group("b", [5], [Completion([6, 7, 8])])]
    other = with_unrelated(groups, 5)[0].unrelated
    assert (other.prompt_ids, other.completions[0].ids) == ((3, 4), (6, 7, 8))


@pytest.mark.parametrize("count", [1, 2])
def test_one_prompt_alone_has_no_other(count):
    with pytest.raises(DataError, match="an answer to another prompt is needed"):
        with_unrelated([Group("a", [1], [Completion([2])])] * count, 9)


# The format


TOK = tokenizer()
RAW = tokenizer(None, eos="</s>")


@pytest.mark.parametrize(("label", "expected"), [(True, 1.0), (False, 0.0), (1, 1.0), (0, 0.0), (1.0, 1.0)])
def test_labels(label, expected):
    record = {"prompt": "hi", "completion": "ho", "label": label, "weight": 2}
    group = Unpaired()(record, RAW, source="x:1").group
    assert (group.completions[0].extras, group.completions[0].weight) == ({LABEL: expected}, 2.0)
    assert group.pairs == () and group.completions[0].text == "ho"


def test_conversations_as_trl_spells_them():
    record = {
        "prompt": [{"role": "user", "content": "hi"}],
        "completion": [{"role": "assistant", "content": "ho"}],
        "thumb": False,
    }
    form = Unpaired(label_key="thumb")
    assert form.matches(record) and not Unpaired().matches(record)
    group = form(record, TOK, source="x:1").group
    assert group.completions[0].extras == {LABEL: 0.0}
    assert TOK.decode(group.completions[0].ids).startswith("ho")


@pytest.mark.parametrize(
    ("label", "shown"), [("true", "'true'"), (None, "null"), (2, "the number 2"), (0.5, "the number 0.5")]
)
def test_other_labels_are_refused(label, shown):
    with pytest.raises(DataError, match=f"'label' must be true or false, or 1 or 0, found {shown}"):
        Unpaired()({"prompt": "a", "completion": "b", "label": label}, RAW, source="x:1")


# Runs

KTO_FILE = """
[model]
path = "model"

[data]
format = "unpaired"
train = "train.jsonl"
valid = "valid.jsonl"
max_length = 64

[loss]
name = "kto"
beta = 0.5

[adapter]
rank = 4

[optimizer]
learning_rate = 1e-2

[train]
steps = 4
batch_size = 8
"""


def votes(words: list[str]) -> list[dict[str, object]]:
    """Capitals are liked; answers of unequal lengths."""
    return [
        {"prompt": f"{w} or {v}?", "completion": (w if i % 2 else w.upper()) + "!" * (j % 3), "label": not i % 2}
        for i, w in enumerate(words)
        for j, v in enumerate(words[:3])
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    file = tiny_run(tmp_path_factory.mktemp("kto"), KTO_FILE)
    write_lines(file.parent / "train.jsonl", votes(WORDS))
    write_lines(file.parent / "valid.jsonl", votes(["lime", "navy", "plum"]))
    return file


@pytest.mark.parametrize("kl", ["mismatched", "batch", "none"])
def test_training_parts_what_is_liked_from_what_is_not(home, kl):
    outcome = run(home, f"loss.kl={kl}", "train.steps=12")
    assert outcome.before["loss"] == pytest.approx(0.5, abs=1e-6)
    assert outcome.after["loss"] < outcome.before["loss"]
    assert outcome.after["reward_desirable"] > outcome.after["reward_undesirable"]
    assert metrics(outcome)[0]["kl"] == 0.0
    assert any(line["kl"] != 0.0 for line in metrics(outcome)) == (kl != "none")


def test_pairs_train_as_well(tmp_path):
    file = tiny_run(tmp_path)
    outcome = run(file, "train.steps=6", loss="kto")
    assert outcome.after["reward_desirable"] > outcome.after["reward_undesirable"]
    assert outcome.before["desirable"] == 0.5


def test_answers_of_one_kind_alone_are_said(home, tmp_path):
    said = "every answer is labelled"
    assert not [m for m in prepare(configure(home)).notices.messages if said in m]
    assert not [m for m in prepare(configure(tiny_run(tmp_path), loss="kto")).notices.messages if said in m]
    liked = home.parent / "liked.jsonl"
    write_lines(liked, [vote | {"label": True} for vote in votes(WORDS)])
    (told,) = [m for m in prepare(configure(home, f'data.train="{liked}"')).notices.messages if said in m]
    assert told.startswith("liked.jsonl: every answer is labelled desirable")


def test_what_kto_needs(home):
    with pytest.raises(ConfigError, match=r"loss 'kto' needs labels.*data 'unpaired'"):
        check_requirements(configure(home, "data.format=completion"))
    one = home.parent / "one.jsonl"
    write_lines(one, votes(WORDS)[:1])
    with pytest.raises(DataError, match=r"one\.jsonl: an answer to another prompt is needed .* 1 row has one prompt"):
        prepare(configure(home, f"data.train={one}"), Notices())
    prepare(configure(home, f"data.train={one}", f"data.valid={one}", "loss.kl=batch"), Notices())


@pytest.fixture(scope="module")
def step(home):
    """A policy away from its reference, and eight groups scored under it."""
    prepared = prepare(configure(home), Notices())
    groups, _ = prepared.source.next(0)
    from mortice.reference import Reference

    params = prepared.policy.params
    groups = Reference(prepared.engine, dict(params)).fill(groups)
    moved = {
        name: value + 0.1 * mx.random.normal(value.shape, key=mx.random.key(i))
        for i, (name, value) in enumerate(params.items())
    }
    return prepared.engine, moved, groups


@pytest.mark.parametrize("loss", [KTO(), KTO(kl="batch"), KTO(kl="none")], ids=lambda loss: loss.kl)
@pytest.mark.parametrize("layout", ["separate", "prefix-shared", "packed"])
def test_case_b25_the_estimate_spans_the_step_whatever_its_micro_batches(step, loss, layout):
    """Eight groups at once, in twos, or one by one: one loss, one gradient, one estimate; the same for evaluation."""
    engine, params, groups = step
    losses = (evolve(engine.losses[0], loss=loss),)
    options = {"name": "packed", "row_tokens": 40} if layout == "packed" else layout
    arranged = evolve(engine, losses=losses, layout=build_strategy(load_plugins(), "layout", options).options)
    sizes = (8, 4, 1) if layout != "packed" else (1,)
    whole, expected = evolve(engine, losses=losses, limits=Limits(groups=8)).gradients(params, groups)
    ratio = whole.values()["kl"]
    assert (ratio != 0) == (loss.kl != "none")
    for size in sizes:
        split = evolve(arranged, limits=Limits(groups=size))
        tally, gradients = split.gradients(params, groups)
        assert tally.loss == pytest.approx(whole.loss, rel=1e-6)
        assert tally.values()["kl"] == pytest.approx(ratio, rel=1e-5)
        assert split.evaluate(params, groups).loss == pytest.approx(whole.loss, rel=1e-5)
        for name, wanted in expected.items():
            assert mx.abs(gradients[name] - wanted).max().item() <= 1e-5 * mx.abs(wanted).max().item()


def test_the_estimate_is_the_mean_over_answers_to_other_prompts(step):
    """By hand, from log-probabilities of the rows alone; and the gradient takes it for a constant."""
    engine, params, groups = step
    others = [group.unrelated for group in groups]
    ratios = [
        sum(a - b for a, b in zip(own[0], other.completions[0].ref_logprobs))
        for own, other in zip(engine.logprobs(params, others), others)
    ]
    kl = sum(ratios) / len(ratios)
    tally, gradients = engine.gradients(params, groups)
    assert tally.values()["kl"] == pytest.approx(kl, rel=1e-4)

    @frozen
    class Constant:
        """KTO with a reference point from outside."""

        requires = frozenset({"labels", "ref_logprobs"})

        def __call__(self, scores, batch):
            beyond = 0.5 * (batch.sum(log_ratios(scores, batch)) - max(kl, 0.0))
            own = mx.where(batch.labels == 1, mx.sigmoid(-beyond), mx.sigmoid(beyond))
            return LossOutput({"kto": (own.sum(), own.size)})

    other = evolve(engine, losses=(evolve(engine.losses[0], loss=Constant()),))
    again, wanted = other.gradients(params, groups)
    assert again.loss == pytest.approx(tally.loss, rel=1e-5)
    for name, value in wanted.items():
        assert mx.abs(gradients[name] - value).max().item() <= 1e-4 * mx.abs(value).max().item()


def test_score_takes_labels(shared):
    rows = json.loads((shared / "losses" / "pairs.json").read_text())
    groups = [
        {"prompt_ids": r["prompt_ids"], "completions": [r["chosen_ids"], r["rejected_ids"]], "labels": [True, False]}
        for r in rows
    ]
    bare = [{name: value for name, value in g.items() if name != "labels"} for g in groups]
    base, adapter = shared / "losses" / "base", shared / "losses" / "adapter"
    arguments = {"loss": "kto", "adapter": adapter, "reference": "base"}
    found = score(base, groups, **arguments)
    recorded = json.loads((shared / "losses" / "logps.json").read_text())
    ratios = [
        (sum(row[side]["completion"]) - sum(row[side]["ref_completion"]), side == "chosen")
        for row in recorded
        for side in ("chosen", "rejected")
    ]
    z = max(0.0, found.metrics["kl"])
    by_hand = [sigmoid(0.1 * (z - r)) if good else sigmoid(0.1 * (r - z)) for r, good in ratios]
    assert found.loss == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)
    with pytest.raises(DataError, match=r"groups\[0\]: 'labels' must be true or false, or 1 or 0, found 2"):
        score(base, [{**groups[0], "labels": [True, 2]}], **arguments)
    with pytest.raises(ConfigError, match="needs labels"):
        score(base, [{**g, "completions": g["completions"][:1]} for g in bare], **arguments)


# Running statistics


def test_the_running_shift_by_hand(tmp_path):
    """Each step is measured from the mean of all rewards of the steps before, however it is cut up."""
    file = tiny_run(tmp_path)
    runs = [
        run(file, "loss.shift=running", "train.steps=4", f"train.micro_batch_size={size}", "train.keep=0",
            "train.save_every=1", loss="bco")
        for size in (1, 4)
    ]  # fmt: skip
    for outcome in runs:
        lines = metrics(outcome)
        seen: list[float] = []
        for line in lines:
            assert line["shift"] == pytest.approx(sum(seen) / len(seen) if seen else 0.0, rel=1e-4, abs=1e-6)
            seen += [line["reward_chosen"], line["reward_rejected"]] * line["pairs"]
        assert validations(outcome)[-1]["valid/shift"] == pytest.approx(sum(seen) / len(seen), rel=1e-4, abs=1e-6)
        assert lines[-1]["shift"] != 0.0
        for step in (1, 4):
            saved = load_checkpoint(outcome.path / "checkpoints" / f"step-{step:05d}").state["statistics"]
            total, count = saved["bco"]["shift"]
            assert count == 2 * sum(line["pairs"] for line in lines[:step])
            assert total == pytest.approx(sum(seen[: int(count)]), rel=1e-4, abs=1e-5)
    for a, b in zip(*map(metrics, runs)):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_a_shift_that_forgets(tmp_path):
    file = tiny_run(tmp_path)
    outcome = run(file, "loss.shift=running", "loss.shift_decay=0.5", "train.steps=4", loss="bco")
    total = count = 0.0
    for line in metrics(outcome):
        assert line["shift"] == pytest.approx(total / count if count else 0.0, rel=1e-4, abs=1e-6)
        total = 0.5 * total + (line["reward_chosen"] + line["reward_rejected"]) * line["pairs"]
        count = 0.5 * count + 2 * line["pairs"]


def test_the_shift_moves_the_loss_and_its_gradient(step):
    from mortice.objective import WeightedLoss

    engine, params, groups = step
    paired = [
        Group(f"p{i}", a.prompt_ids, [*a.completions, *b.completions], ((0, 1),))
        for i, (a, b) in enumerate(zip(groups[::2], groups[1::2]))
    ]
    running = evolve(engine, losses=(WeightedLoss("bco", BCO(shift="running")),))
    plain = evolve(engine, losses=(WeightedLoss("bco", BCO()),))
    nothing, start = running.gradients(params, paired)
    tally, expected = plain.gradients(params, paired)
    assert nothing.loss == tally.loss
    assert all(mx.array_equal(start[name], expected[name]) for name in expected)
    moved, gradients = running.gradients(params, paired, past={(0, "shift"): (3.0, 2.0)})
    assert moved.loss != pytest.approx(nothing.loss, rel=1e-2)
    assert any(mx.abs(gradients[name] - expected[name]).max().item() > 1e-4 for name in expected)
    assert running.past_after({(0, "shift"): (3.0, 2.0)}, moved)[0, "shift"][1] == 2.0 + 2 * len(paired)
    broken = evolve(engine, losses=running.losses)
    moved.statistics[0, "shift"] = (math.nan, 2.0)
    assert broken.past_after({(0, "shift"): (3.0, 2.0)}, moved) == {(0, "shift"): (3.0, 2.0)}


def test_statistics_of_several_losses_are_told_apart_and_come_back(step):
    from mortice.objective import WeightedLoss

    losses = tuple(WeightedLoss("bco", BCO(shift="running")) for _ in range(2))
    past = {(0, "shift"): (1.0, 2.0), (1, "shift"): (3.0, 4.0)}
    saved = json.loads(json.dumps(saved_statistics(losses, past)))
    assert saved == {"bco": {"shift": [1.0, 2.0]}, "bco-2": {"shift": [3.0, 4.0]}}
    assert restored_statistics(losses, saved) == past
    assert added(past, {(1, "shift"): (1.0, 1.0)})[1, "shift"] == (4.0, 5.0)
    with pytest.raises(KeyError):
        restored_statistics(losses[:1], saved)

"""Reward models: the head `reward` and the loss `bradley-terry`, from a gradient to a trained folder in use."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
from functools import cache
from string import ascii_lowercase

import mlx.core as mx
import numpy as np
import pytest
from tiny_llama import CONFIG
from tiny_run import WORDS, configure, metrics, run, same, tiny_run, write_lines

from mortice import score
from mortice.batch import SCORE, Completion, Group, Limits, Row, Span, TokenLogprobs
from mortice.cli import main
from mortice.config import check_requirements
from mortice.context import SpanContext
from mortice.errors import CheckpointError, ConfigError, DataError
from mortice.launch import Notices, prepare
from mortice.objective import WeightedLoss
from mortice.plugins import load_plugins
from mortice.pretrained import random_model
from mortice.rating import open_rater
from mortice.rows import read_through
from mortice.step import Engine
from mortice.testing import LossSuite, make_batch
from mortice_plugins.adapters.lora import LoRA
from mortice_plugins.heads.reward import FILE, Reward
from mortice_plugins.layouts.separate import Separate
from mortice_plugins.losses.bradley_terry import BradleyTerry
from mortice_plugins.rewards.reward_model import RewardModel

INSTALLED = load_plugins()


class TestBradleyTerry(LossSuite):
    loss = BradleyTerry()


class TestBradleyTerryWithAll(LossSuite):
    loss = BradleyTerry(margin=0.5, center_weight=0.1, label_smoothing=0.1, max_loss=5.0)


# The loss


def rated_pair(chosen: float | None = None, rejected: float | None = None, *, weight: float = 1.0) -> Group:
    ratings = [{} if s is None else {SCORE: s} for s in (chosen, rejected)]
    answers = [Completion([3], weight=weight if k == 0 else 1.0, extras=e) for k, e in enumerate(ratings)]
    return Group("a", [1], answers, [(0, 1)])


def terms(loss: BradleyTerry, groups, rewards):
    values = mx.array([float(r) for pair in rewards for r in pair])
    found = loss(TokenLogprobs(mx.zeros_like(values), values=values), make_batch(groups, loss.requires))
    totals = {name: (total / count).item() for name, (total, count) in found.terms.items()}
    return totals, {name: (total / count).item() for name, (total, count) in found.metrics.items()}, found.weights


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def test_the_loss_by_hand():
    """Rewards 2 and −1: −log σ(3); centred λ · 1²; smoothed; with ratings 4 and 2 and a margin of ½ a point, σ(2)."""
    group = [rated_pair(4.0, 2.0)]
    assert terms(BradleyTerry(), group, [(2, -1)])[0] == {"preference": pytest.approx(-log_sigmoid(3))}
    found, _, weights = terms(BradleyTerry(center_weight=0.01), group, [(2, -1)])
    assert found == {"preference": pytest.approx(-log_sigmoid(3)), "center": pytest.approx(1.0)}
    assert weights == {"center": 0.01}
    smooth = terms(BradleyTerry(label_smoothing=0.1), group, [(2, -1)])[0]["preference"]
    assert smooth == pytest.approx(-0.9 * log_sigmoid(3) - 0.1 * log_sigmoid(-3), rel=1e-6)
    assert terms(BradleyTerry(margin=0.5), group, [(2, -1)])[0]["preference"] == pytest.approx(-log_sigmoid(2))
    assert terms(BradleyTerry(max_loss=1.0), group, [(-1, 2)])[0]["preference"] == 1.0


def test_metrics_and_weights():
    groups = [rated_pair(), rated_pair(weight=3.0)]
    found, means, _ = terms(BradleyTerry(), groups, [(2, -1), (0, 1)])
    assert found["preference"] == pytest.approx(-(log_sigmoid(3) + 3 * log_sigmoid(-1)) / 4)
    assert means == {
        "reward": 0.5, "reward_chosen": 0.5, "reward_rejected": 0.5, "margin": 0.0, "accuracy": 0.25,
    }  # fmt: skip


def test_a_tie_is_not_right():
    assert terms(BradleyTerry(), [rated_pair()], [(1, 1)])[1]["accuracy"] == 0.0


# What is read


def test_the_last_scored_token_is_run_and_it_alone_is_read():
    """A masked token at the end is left out, one in the middle is run; the prompt's state is never read."""
    answers = [Completion([5, 6, 7], [True, False, True]), Completion([8, 9], [True, False]), Completion([4])]
    group = Group("a", [1, 2], answers, ((0, 1), (0, 2)))
    micro = Separate()([read_through(group)], Limits())[0]
    assert [row.tokens.tolist() for row in micro.rows] == [[1, 2, 5, 6, 7], [1, 2, 8], [1, 2, 4]]
    assert [row.index.tolist() for row in micro.rows] == [[4], [2], [2]]


def test_an_answer_with_nothing_scored_is_not_read():
    group = Group("a", [1], [Completion([5], [False]), Completion([6])])
    assert [row.scored for row in Separate()([read_through(group)], Limits())[0].rows] == [0, 1]


# Gradients


def _groups() -> list[Group]:
    rng = np.random.default_rng(3)

    def answer(length, mask=None, **more):
        ids = rng.integers(0, 41, length).tolist()
        return Completion(ids, mask or [True] * length, extras={SCORE: float(rng.normal())}, **more)

    return [
        Group("pair", [1, 2, 3], [answer(3, weight=0.5), answer(1)], ((0, 1),)),
        Group("several", [5], [answer(4, [True, False, True, False]), answer(2), answer(5)], ((0, 1), (2, 1))),
        Group("prompts", [7, 8], [answer(2), answer(3, prompt_ids=(9, 10, 11))], ((1, 0),)),
    ]


GROUPS = _groups()
LOSS = BradleyTerry(margin=0.3, center_weight=0.2, label_smoothing=0.1)


@cache
def prepared():
    made = random_model(CONFIG | {"vocab_size": 41, "initializer_range": 0.3}, 0).model
    params = {**LoRA(rank=4).attach(made, 0), **Reward().attach(made, 0)}
    moved = {
        name: v + 0.05 * mx.random.normal(v.shape, key=mx.random.key(i)) for i, (name, v) in enumerate(params.items())
    }
    made.mark_trainable(moved)
    return made, moved


@cache
def plain_autodiff():
    """The whole model on each prompt and answer, one after the other, and autodiff through all of it."""
    model, params = prepared()
    pairs = [(g, c, r) for g in GROUPS for c, r in g.pairs]

    def reward(group, k, weight):
        answer = group.completions[k]
        stop = max(j for j, kept in enumerate(answer.loss_mask) if kept) + 1
        ids = [*group.prompt_of(k), *answer.ids[:stop]]
        ctx = SpanContext(Row(ids, [Span(0, len(ids), None, 0)], [], [], [], [], []))
        return (model.hidden(ctx, ctx.tokens)[-1:] @ weight.T)[0, 0]

    def loss(params):
        model.bind(params)
        total = weights = 0.0
        for group, c, r in pairs:
            w = group.completions[c].weight
            chosen, rejected = (reward(group, k, params["score.weight"]) for k in (c, r))
            gap = group.completions[c].extras[SCORE] - group.completions[r].extras[SCORE]
            m = chosen - rejected - 0.3 * gap
            own = 0.9 * mx.logaddexp(0.0, -m) + 0.1 * mx.logaddexp(0.0, m) + 0.2 * (chosen + rejected) ** 2
            total, weights = total + w * own, weights + w
        return total / weights

    value, gradients = mx.value_and_grad(loss)(params)
    model.bind(params)
    mx.eval(value, gradients)
    return value.item(), gradients


EVERYTHING = list(itertools.product(INSTALLED.registry.names("backward"), INSTALLED.registry.names("layout")))


@pytest.mark.parametrize(("backward", "layout"), EVERYTHING)
def test_every_backward_and_layout_gives_the_gradient_of_plain_autodiff(backward, layout):
    model, params = prepared()
    expected, wanted = plain_autodiff()
    strategies = (INSTALLED.get(kind, name).load()() for kind, name in (("backward", backward), ("layout", layout)))
    engine = Engine(model, Reward(), *strategies, (WeightedLoss("bradley-terry", LOSS),), Limits(groups=2))
    tally, found = engine.gradients(params, GROUPS)
    assert tally.loss == pytest.approx(expected, rel=1e-5)
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        apart = mx.linalg.norm((found[name] - gradient).reshape(-1)).item()
        assert apart <= 1e-4 * mx.linalg.norm(gradient.reshape(-1)).item(), name
    assert [[len(scores) for scores in group] for group in tally.scores(GROUPS)] == [[1, 1], [1, 1, 1], [1, 1]]


def test_initial_weights_are_keyed_by_the_seed():
    weights = [Reward().attach(random_model(CONFIG, 0).model, seed)["score.weight"] for seed in (0, 0, 1)]
    assert mx.array_equal(weights[0], weights[1]).item()
    assert not mx.array_equal(weights[0], weights[2]).item()
    assert mx.std(weights[0]).item() == pytest.approx(1 / math.sqrt(CONFIG["hidden_size"] + 1), rel=0.3)


# Runs


def shouting(count: int, seed: int) -> list[dict[str, str]]:
    """Pairs whose preferred answer is in capitals, of letters that mean nothing."""
    draw = random.Random(seed)

    def word() -> str:
        return "".join(draw.choices(ascii_lowercase, k=draw.randint(2, 6)))

    return [{"prompt": f"{word()}?", "chosen": word().upper(), "rejected": word()} for _ in range(count)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    file = tiny_run(tmp_path_factory.mktemp("reward"))
    write_lines(file.parent / "train.jsonl", shouting(480, 0))
    write_lines(file.parent / "valid.jsonl", shouting(60, 1))
    return file


TRAINING = (
    "train.steps=40",
    "train.batch_size=12",
    "optimizer.learning_rate=2e-2",
    "adapter.rank=8",
    "train.validate_every=99",
)


@pytest.fixture(scope="module")
def trained(home):
    return run(home, *TRAINING, loss="bradley-terry")


def test_a_reward_model_learns_what_is_preferred(trained):
    assert trained.before["accuracy"] < 0.9
    assert trained.after["accuracy"] >= 0.95
    assert trained.after["margin"] > trained.before["margin"]
    assert {"reward", "reward_chosen", "reward_rejected"} <= set(trained.after)
    assert "reward" in metrics(trained)[-1]


def test_centred_rewards_are_near_0(home):
    plain, centred = (
        run(home, *TRAINING, "train.steps=6", f"loss.center_weight={weight}", loss="bradley-terry")
        for weight in (0.0, 0.5)
    )
    assert abs(centred.after["reward"]) < abs(plain.after["reward"])
    assert "center" in centred.after and "center" not in plain.after


def test_the_folder_holds_both_and_mlx_lm_reads_the_adapter(home, trained):
    folder = trained.path / "adapter"
    head = mx.load(str(folder / FILE))
    assert {name: value.shape for name, value in head.items()} == {"score.weight": (1, CONFIG["hidden_size"])}
    assert not any("score" in name for name in mx.load(str(folder / "adapters.safetensors")))
    assert (trained.checkpoint / "adapter" / FILE).exists()
    utils = pytest.importorskip("mlx_lm.utils")
    model, _ = utils.load_model(home.parent / "model")
    adapted = utils.load_adapters(model, str(folder))
    assert adapted(mx.array([[1, 2, 3]])).shape == (1, 3, 272)


def test_a_loaded_reward_model_gives_the_rewards_of_training(home, trained):
    """The validation of the run's end, from the folder alone; and through `mortice.score`."""
    config = configure(home, loss="bradley-terry")
    held_out = prepare(config, Notices()).source.valid
    rater = open_rater(home.parent / "model", trained.path / "adapter")
    assert rater.gives == "rewards"
    found = rater.rate(held_out)
    right = [rewards[0] > rewards[1] for rewards in found]
    assert sum(right) / len(right) == trained.after["accuracy"]
    margins = [rewards[0] - rewards[1] for rewards in found]
    assert sum(margins) / len(margins) == pytest.approx(trained.after["margin"], rel=1e-4)
    groups = [{"prompt_ids": g.prompt_ids, "completions": [c.ids for c in g.completions]} for g in held_out]
    again = score(
        home.parent / "model", groups, loss="bradley-terry", head="reward", adapter=trained.path / "adapter",
        layout="prefix-shared",
    )  # fmt: skip
    assert again.loss == pytest.approx(trained.after["loss"], rel=1e-4)
    assert [x[0] for x in again.logprobs] == pytest.approx([r for pair in found for r in pair], abs=1e-4)


def test_a_run_that_starts_from_a_reward_model_has_its_head(home, trained):
    init = f'adapter.init="{trained.path / "adapter"}"'
    file = home.parent / "more.toml"
    file.write_text(home.read_text().replace("rank = 4\n", ""))
    more = run(file, init, "train.steps=1", "train.seed=7", loss="bradley-terry")
    assert more.before["margin"] == pytest.approx(trained.after["margin"], rel=1e-5)
    assert more.before["loss"] == pytest.approx(trained.after["loss"], rel=1e-5)


def test_two_runs_of_one_seed_are_equal(home):
    runs = [
        run(home, "train.steps=2", f"layout.name={layout}", "backward.name=segmented", loss="bradley-terry")
        for layout in ("separate", "separate", "packed")
    ]
    heads = [mx.load(str(outcome.path / "adapter" / FILE)) for outcome in runs]
    assert same(heads[0], heads[1])
    assert mx.abs(heads[0]["score.weight"] - heads[2]["score.weight"]).max().item() < 1e-3


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    return ended.value.code, *capsys.readouterr()


def test_scoring_pairs_on_the_command_line(home, trained, tmp_path, capsys):
    model, folder = str(home.parent / "model"), str(trained.path / "adapter")
    output = tmp_path / "scored.jsonl"
    code, out, err = call(
        capsys, "score", model, str(home.parent / "valid.jsonl"), str(output), "--adapter", folder, "--format",
        "preference", "--json",
    )  # fmt: skip
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["gives"], facts["rows"], facts["answers"], facts["pairs"]) == ("rewards", 60, 120, 60)
    assert facts["accuracy"] == trained.after["accuracy"]
    assert facts["margin"] == pytest.approx(trained.after["margin"], rel=1e-4)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [r["prompt"] for r in shouting(60, 1)]
    assert sum(a > b for a, b in (line["rewards"] for line in lines)) / 60 == facts["accuracy"]


@pytest.mark.parametrize("scores", [[1, 2, 3], [2, 2, 2]])
def test_scoring_rated_answers_gives_one_number_for_each(home, trained, tmp_path, capsys, scores):
    """In their order, those too that make no pair."""
    data, out = tmp_path / "rated.jsonl", tmp_path / "out.jsonl"
    answers = ["navy", "NAVY", "plum"]
    model, adapter = str(home.parent / "model"), str(trained.path / "adapter")
    write_lines(data, [{"prompt": "plum?", "completions": answers, "scores": scores, "weight": 0}])
    code, _, _ = call(capsys, "score", model, str(data), str(out), "--adapter", adapter, "--format", "rated")
    assert code == 0
    reward = RewardModel(model=home.parent / "model", adapter=trained.path / "adapter")
    expected = [reward(answer, {"prompt": "plum?"}) for answer in answers]
    assert json.loads(out.read_text())["rewards"] == pytest.approx(expected, rel=1e-4)


def test_scoring_single_answers_and_without_a_reward_head(home, trained, tmp_path, capsys):
    model, folder = str(home.parent / "model"), str(trained.path / "adapter")
    data, output = tmp_path / "answers.jsonl", tmp_path / "scored.jsonl"
    write_lines(data, [{"prompt": "plum?", "completion": "NAVY"}, {"prompt": "plum?", "completion": "navy"}])
    code, out, err = call(capsys, "score", model, str(data), str(output), "--adapter", folder)
    assert (code, "accuracy" in out) == (0, False), err
    loud, quiet = (json.loads(line)["reward"] for line in output.read_text().splitlines())
    assert loud > quiet
    code, out, err = call(capsys, "score", model, str(data), "--json")
    assert (code, json.loads(out)["gives"]) == (0, "logprobs")
    assert json.loads(out)["highest"] < 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "preference"), "'completion' or 'prompt' would read them"),
        (("--format", "prefrence"), "did you mean 'preference'"),
        (("--format", "{name = 'rated', gap = 1}"), "data.gap: unknown key"),
        (("--max-length", "1"), "--max-length 1 is out of range"),
        (("--adapter", "nowhere"), "adapter folder not found"),
    ],
)
def test_mistakes_on_the_command_line(home, tmp_path, capsys, arguments, message):
    data = tmp_path / "answers.jsonl"
    write_lines(data, [{"prompt": "a", "completion": "b"}])
    code, _, err = call(capsys, "score", str(home.parent / "model"), str(data), *arguments)
    assert code == 2
    assert message in err


def test_the_data_is_not_written_over(home, tmp_path, capsys):
    data = tmp_path / "answers.jsonl"
    write_lines(data, [{"prompt": "a", "completion": "b"}])
    code, _, err = call(capsys, "score", str(home.parent / "model"), str(data), str(data))
    assert (code, "choose another output" in err) == (2, True)


def test_a_reward_model_is_a_reward(home, trained):
    reward = RewardModel(model=home.parent / "model", adapter=trained.path / "adapter")
    assert reward("NAVY", {"prompt": "plum?"}) > reward("navy", {"prompt": "plum?"})
    with pytest.raises(DataError, match="no 'prompt', found 'question'"):
        reward("NAVY", {"question": "plum?"})
    with pytest.raises(ConfigError, match="no reward head"):
        RewardModel(model=home.parent / "model", adapter=run(home, "train.steps=1").path / "adapter")(
            "a", {"prompt": "b"}
        )


def test_a_models_own_answers_are_scored_by_a_reward_model(home, trained, tmp_path, capsys):
    """All are right here, so that no pair comes of them; another reward model under the same name is another one."""
    model, folder = str(home.parent / "model"), tmp_path / "reward"
    shutil.copytree(trained.path / "adapter", folder)
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"{word}?"} for word in WORDS[:2]])
    reward = f'{{name = "reward-model", model = "{model}", adapter = "{folder}"}}'
    files = (model, str(tmp_path / "prompts.jsonl"), str(tmp_path / "pairs.jsonl"))
    arguments = (*files, "--reward", reward, "--threshold", "-99", "-n", "3")
    code, _, err = call(capsys, "pairs", *arguments)
    assert (code, "2 had only right answers" in err) == (2, True), err
    lines = (tmp_path / "pairs.samples.jsonl").read_text().splitlines()
    answers = [answer for line in lines[1:] for answer in json.loads(line)["answers"]]
    assert len({answer["reward"] for answer in answers}) > 1
    (folder / FILE).touch()
    code, _, err = call(capsys, "pairs", *arguments)
    assert (code, "holds answers that were made otherwise (rewards" in err) == (2, True), err


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"score.weight": mx.zeros((1, 3))}, r"holds score.weight \[1, 3\]; the model needs score.weight \[1, 64\]"),
        ({"other": mx.zeros((1, 64))}, "holds other"),
    ],
)
def test_a_head_of_another_model_is_refused(tmp_path, tensors, message):
    mx.save_safetensors(str(tmp_path / FILE), tensors)
    with pytest.raises(CheckpointError, match=message):
        Reward.from_folder(tmp_path, random_model(CONFIG, 0).model)


def test_losses_and_heads_that_do_not_go_together(home):
    with pytest.raises(ConfigError, match="loss 'dpo' goes by log-probabilities, and head 'reward' gives values"):
        check_requirements(configure(home, loss="dpo", head="reward"))
    with pytest.raises(ConfigError, match=r"loss 'bradley-terry' needs values.*head 'reward'"):
        check_requirements(configure(home, loss="bradley-terry", head="dense"))
    group = [{"prompt_ids": [1], "completions": [[2], [3]]}]
    for loss, head in (("dpo", "reward"), ("bradley-terry", "dense")):
        with pytest.raises(ConfigError, match=f"loss '{loss}' goes by"):
            score(home.parent / "model", group, loss=loss, head=head)


def test_a_margin_needs_ratings(home):
    with pytest.raises(DataError, match=r"ratings of the answers, and train.jsonl:1, .* and 537 more have none"):
        prepare(configure(home, "loss.margin=1.0", loss="bradley-terry"), Notices())
    with pytest.raises(ConfigError, match="needs scores"):
        score(
            home.parent / "model", [{"prompt_ids": [1], "completions": [[2], [3]]}],
            loss={"name": "bradley-terry", "margin": 1.0}, head="reward",
        )  # fmt: skip

"""Whole runs, as a user starts them, on a tiny model."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from attrs import frozen
from tiny_run import (
    RUN_FILE,
    adapter,
    apart,
    configure,
    metrics,
    pairs,
    plugin,
    run,
    same,
    tiny_run,
    validations,
    write_lines,
)

from mortice.batch import Completion, Group, LossOutput
from mortice.checkpoint import load_checkpoint
from mortice.config import load_config
from mortice.effective import effective_toml
from mortice.errors import ConfigError, DataError, TrainingError
from mortice.launch import Notices, prepare
from mortice.step import Engine


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One folder for tests that do not change it; every run takes a folder of its own under runs/."""
    return tiny_run(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("loss", ["orpo", "sft"])
def test_case_b14_training_changes_the_adapter(home, loss):
    """The gradient reaches the weights: B leaves zero at the first step, and the loss goes down."""
    outcome = run(home, "train.steps=1", loss=loss)
    saved = adapter(outcome.path / "adapter")
    assert all(mx.abs(value).max().item() > 0 for name, value in saved.items() if name.endswith("lora_b"))
    longer = run(home, "train.steps=12", loss=loss)
    assert longer.after["loss"] < longer.before["loss"]
    assert not same(saved, adapter(longer.path / "adapter"))


def test_every_row_is_visited_once_an_epoch(home):
    source = prepare(configure(home)).source
    assert source.steps_per_epoch == 3
    epochs = [[g.id for step in range(3 * e, 3 * e + 3) for g in source.next(step)[0]] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"train.jsonl:{i}" for i in range(1, 11))
    assert epochs[0] != epochs[1] != sorted(epochs[1])
    assert [len(source.next(step)[0]) for step in range(3)] == [4, 4, 2]
    plain = prepare(configure(home, "source.shuffle=false")).source
    assert [g.id for g in plain.next(0)[0]] == [f"train.jsonl:{i}" for i in range(1, 5)]


def test_case_b25_accumulation_gives_the_same_run(home):
    """10 rows, 4 a step: 3 steps (4, 4, 2), however many groups run at once, and the last is divided by its own."""
    runs = [
        run(home, f"train.micro_batch_size={n}", *extra)
        for n, extra in ((1, ()), (2, ()), (4, ()), (4, ("backward.name=segmented", "layout.name=prefix-shared")))
    ]
    first = adapter(runs[0].path / "adapter")
    for other in runs[1:]:
        assert apart(first, adapter(other.path / "adapter")) < 2e-5
        for a, b in zip(metrics(runs[0]), metrics(other), strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


def test_case_b28_the_logged_rate_is_the_one_used(home):
    outcome = run(home, "train.steps=6", "schedule.warmup=4", "schedule.name=constant", "optimizer.learning_rate=1e-2")
    assert [line["learning_rate"] for line in metrics(outcome)] == pytest.approx(
        [2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2, 1e-2]
    )
    one = run(home, "train.steps=1", "schedule.warmup=0.1")
    assert metrics(one)[0]["learning_rate"] == pytest.approx(1e-2)
    with pytest.raises(ConfigError, match="9 steps, but the run has only 6"):
        run(home, "train.steps=6", "schedule.warmup=9")


def test_case_b28_the_first_update_is_as_long_as_its_rate(home):
    """Adam with bias correction moves every weight by the rate at the first step; without it by 3.16 times."""
    for correction, factor in (("true", 1.0), ("false", math.sqrt(10))):
        outcome = run(
            home, "train.steps=1", "schedule.name=constant", "schedule.warmup=0", "optimizer.learning_rate=1e-3",
            f"optimizer.bias_correction={correction}", "train.clip_norm=0",
        )  # fmt: skip
        b = [v for name, v in adapter(outcome.path / "adapter").items() if name.endswith("lora_b")]
        assert max(mx.abs(v).max().item() for v in b) == pytest.approx(1e-3 * factor, rel=1e-2)


@pytest.mark.parametrize(("total", "every", "kept"), [(5, 100, [5]), (4, 2, [2, 4]), (5, 2, [2, 4, 5])])
def test_case_b30_the_last_state_is_saved(home, total, every, kept):
    outcome = run(home, f"train.steps={total}", f"train.save_every={every}", "train.keep=0", "train.validate_every=99")
    steps = sorted(int(p.name.removeprefix("step-")) for p in (outcome.path / "checkpoints").iterdir())
    assert steps == kept
    assert (outcome.path / "latest").read_text().strip() == f"step-{total:05d}"
    state = load_checkpoint(outcome.checkpoint)
    assert state.step == total
    assert any(value.size > 1 for value in state.optimizer.values())
    assert same(adapter(outcome.checkpoint / "adapter"), adapter(outcome.path / "adapter"))


def interrupting(number: int, at: int):
    """An observer that sends this process a signal behind a step."""

    def on_step_end(step, metrics):
        if step == at:
            os.kill(os.getpid(), number)

    class Unused:
        """Nothing."""

    return plugin("task", "interrupting", Unused, on_step_end=on_step_end)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_case_b31_a_signal_ends_the_step_and_saves(home, number):
    before = signal.getsignal(number)
    outcome = run(home, "train.steps=50", plugins=[interrupting(number, 7)])
    assert (outcome.steps, outcome.signal) == (7, number)
    assert load_checkpoint(outcome.checkpoint).step == 7
    assert len(metrics(outcome)) == 7
    assert same(adapter(outcome.path / "adapter"), adapter(outcome.checkpoint / "adapter"))
    assert signal.getsignal(number) is before


def test_case_b31_a_signal_during_evaluation_keeps_the_last_step(home, monkeypatch):
    evaluate, seen = Engine.evaluate, []

    def interrupted(self, *arguments):
        seen.append(1)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, *arguments)

    monkeypatch.setattr(Engine, "evaluate", interrupted)
    outcome = run(home, "train.steps=50", "train.validate_every=2")
    assert outcome.signal == signal.SIGINT
    assert outcome.steps == 4
    assert load_checkpoint(outcome.checkpoint).step == 4


def start(home, path, *settings: str) -> subprocess.Popen:
    """A long run in a process of its own, once it has saved something."""
    command = [sys.executable, "-m", "mortice", "train", str(home), "--run", str(path)]
    for setting in ("train.steps=100000", "train.save_every=5", "train.validate_every=100000", *settings):
        command += ["--set", setting]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(path / "latest", process)
    return process


def test_case_b31_the_process_says_where_and_exits_130(home):
    path = home.parent / "runs" / "interrupted"
    process = start(home, path)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "stopped at step" in output
    latest = path / "checkpoints" / (path / "latest").read_text().strip()
    assert str(latest) in output
    assert load_checkpoint(latest).step > 0


def test_case_b31_the_second_signal_ends_at_once_and_harms_no_file(home):
    path = home.parent / "runs" / "twice"
    process = start(home, path)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT)
    latest = path / "checkpoints" / (path / "latest").read_text().strip()
    assert load_checkpoint(latest).step > 0
    assert adapter(latest / "adapter")


def wait_for(file, process, seconds: float = 60):
    end = time.monotonic() + seconds
    while not file.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)


def test_case_b34_the_seed_decides_and_foreign_draws_do_not(home):
    def noise(step, metrics):
        random.random()
        np.random.random()
        mx.random.uniform()

    class Unused:
        """Nothing."""

    runs = [
        run(home, f"train.seed={seed}", plugins=[plugin("task", "noise", Unused, on_step_end=noise)] if extra else None)
        for seed, extra in ((0, False), (0, True), (1, False), (1, True))
    ]
    saved = [adapter(r.path / "adapter") for r in runs]
    losses = [[line["loss"] for line in metrics(r)] for r in runs]
    assert same(saved[0], saved[1])
    assert same(saved[2], saved[3])
    assert losses[0] == losses[1] != losses[2] == losses[3]
    assert not same(saved[0], saved[2])
    starts = [prepare(configure(home, f"train.seed={seed}")) for seed in (0, 0, 1)]
    assert same(starts[0].policy.params, starts[1].policy.params)
    assert not same(starts[0].policy.params, starts[2].policy.params)
    orders = [[g.id for g in start.source.next(0)[0]] for start in starts]
    assert orders[0] == orders[1] != orders[2]


def test_case_b35_validation_is_the_same_for_every_batch_size(home):
    found = [run(home, f"train.micro_batch_size={n}", "train.steps=1").before for n in (1, 2, 3)]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-6)
    prepared = prepare(configure(home))
    first = prepared.engine.evaluate(prepared.policy.params, prepared.source.valid).values()
    again = prepared.engine.evaluate(prepared.policy.params, prepared.source.valid).values()
    assert first == again
    assert first | {"displacement": 0.0} == pytest.approx(found[0], rel=1e-6)


def test_case_b35_the_loss_is_a_token_mean_over_all_rows(home):
    prepared = prepare(configure(home, loss="sft"))
    params, groups = prepared.policy.params, prepared.source.valid
    logprobs = prepared.engine.logprobs(params, groups)
    chosen = [v for group in logprobs for v in group[0]]
    found = prepared.engine.evaluate(params, groups).values()
    assert found["loss"] == pytest.approx(-sum(chosen) / len(chosen), rel=1e-5)


def test_validation_counts_every_row_once(home):
    outcome = run(home, "train.steps=4", "train.validate_every=2")
    assert [line["step"] for line in validations(outcome)] == [0, 2, 4]


def test_case_b12_a_missing_or_empty_training_file_is_named(tmp_path):
    file = tiny_run(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(ConfigError, match=str(tmp_path / "train.jsonl")):
        run(file)
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(DataError, match=f"empty: {tmp_path / 'train.jsonl'}"):
        run(file)


def test_case_b12_without_a_validation_file_evaluation_is_off(tmp_path, capsys):
    file = tiny_run(tmp_path, RUN_FILE.replace('valid = "valid.jsonl"\n', ""))
    outcome = run(file)
    assert outcome.before == outcome.after == {}
    assert not (outcome.path / "best").exists()
    with pytest.raises(ConfigError, match=r"train.best is 'valid/loss', but there is no validation data"):
        run(file, "train.best=valid/loss")


def test_case_b12_fewer_rows_than_a_batch_train_all_the_same(tmp_path):
    file = tiny_run(tmp_path)
    write_lines(tmp_path / "train.jsonl", pairs(["one", "two", "three"]))
    write_lines(tmp_path / "valid.jsonl", pairs(["four"]))
    prepared = prepare(configure(file))
    groups, _ = prepared.source.next(0)
    assert len(groups) == 3
    assert prepared.source.steps_per_epoch == 1
    outcome = run(file)
    assert math.isfinite(outcome.after["loss"])


def test_case_b05_rows_that_do_not_fit_are_dropped_and_counted(tmp_path):
    file = tiny_run(tmp_path)
    records = [*pairs(["red"]), {"prompt": "p" * 40, "chosen": "c" * 200, "rejected": "r"}]
    write_lines(tmp_path / "train.jsonl", records)
    outcome = run(file, "data.max_length=24", "train.steps=1")
    line = metrics(outcome)[0]
    assert line["data_completions_cut"] == 1
    assert line["data_prompts_cut"] == 1
    assert math.isfinite(line["loss"])


def test_case_b05_nothing_left_is_an_error(tmp_path):
    @frozen
    class Masked:
        """{"text"}: nothing of it is scored."""

        keys = frozenset({"prompt", "chosen", "rejected"})
        provides = frozenset({"pairs"})

        def matches(self, record):
            return True

        def __call__(self, record, tokenizer, *, source):
            masked = Completion([1, 2], [False, False])
            return SimpleNamespace(group=Group(source, [1], [masked, masked], ((0, 1),)))

    file = tiny_run(tmp_path)
    with pytest.raises(DataError, match="nothing is left to train on; all 10 rows were dropped"):
        run(file, "data.format=masked", plugins=[plugin("data", "masked", Masked)])


def test_a_non_finite_gradient_skips_the_step_and_is_counted(home, monkeypatch, capsys):
    gradients = Engine.gradients

    def broken_at(*steps):
        def broken(self, params, groups, randomness, *more):
            tally, found = gradients(self, params, groups, randomness, *more)
            if randomness.step in steps:
                found = {name: value * float("nan") for name, value in found.items()}
            return tally, found

        return broken

    plain = run(home, "train.steps=1")
    monkeypatch.setattr(Engine, "gradients", broken_at(1, 2))
    outcome = run(home, "train.steps=3")
    lines = metrics(outcome)
    assert [line["nonfinite_steps"] for line in lines] == [0, 1, 2]
    assert lines[1]["grad_norm"] is None
    assert outcome.metrics["nonfinite_steps"] == 2
    skipped = run(home, "train.steps=3", "train.max_nonfinite=3")
    assert same(adapter(skipped.path / "adapter"), adapter(outcome.path / "adapter"))
    assert "the gradient is not finite" in capsys.readouterr().err
    rate = metrics(plain)[0]["learning_rate"]
    assert rate == lines[0]["learning_rate"] or apart(
        adapter(plain.path / "adapter"), adapter(outcome.path / "adapter")
    )
    with pytest.raises(TrainingError, match=r"not finite in 2 steps in a row \(up to step 3\)"):
        run(home, "train.steps=9", "train.max_nonfinite=2")


def test_clipping_changes_the_update_not_the_norm_shown(home):
    free, tight = (run(home, "train.steps=2", f"train.clip_norm={n}") for n in (0.0, 1e-3))
    assert metrics(free)[0]["grad_norm"] == metrics(tight)[0]["grad_norm"]
    assert apart(adapter(free.path / "adapter"), adapter(tight.path / "adapter")) > 0


def test_the_best_checkpoint_is_kept_and_named(home):
    outcome = run(home, "train.steps=12", "train.validate_every=1", "train.keep=2", "optimizer.learning_rate=0.05",
                  "train.best=valid/margin", "train.best_mode=max")  # fmt: skip
    found = {line["step"]: line["valid/margin"] for line in validations(outcome) if line["step"] > 0}
    best = max(found, key=lambda step: (found[step], -step))
    assert (outcome.path / "best").read_text().split()[0] == f"step-{best:05d}"
    assert (outcome.path / "checkpoints" / f"step-{best:05d}" / "adapter").is_dir()
    assert (
        json.loads((outcome.path / "checkpoints" / f"step-{best:05d}" / "state.json").read_text())["metric"]
        == found[best]
    )
    with pytest.raises(ConfigError, match=r"validation has no metric 'los'; did you mean 'loss'\?"):
        run(home, "train.best=valid/los")


def test_a_source_may_make_several_passes_over_what_it_gives(home):
    """Online methods need no change of the trainer: groups without any file, two optimizer steps on each pull."""
    pulls = []

    @frozen
    class Rolling:
        """Groups out of nothing."""

        provides = frozenset({"advantages", "old_logprobs"})

        def open(self, context):
            assert context.policy.params is not None

            def pull(step):
                pulls.append((step, dict(context.policy.params)))
                group = Group(f"g{step}", [1, 2], [Completion([3, 4], old_logprobs=[-1, -1], advantage=1.0)])
                return [group], 2

            return SimpleNamespace(
                provides=self.provides, steps_per_epoch=None, can_validate=True, next=pull, state=dict,
                validate=lambda evaluate: {"reward": 0.5},
            )  # fmt: skip

    @frozen
    class Ratio:
        """A clipped ratio."""

        requires = frozenset({"advantages", "old_logprobs"})

        def __call__(self, scores, batch):
            ratio = mx.exp(batch.mean(scores.logprobs - batch.old_logprobs))
            return LossOutput({"ratio": (-(ratio * batch.advantages).sum(), ratio.size)}, {"ratio": ratio.mean()})

    plugins = [plugin("source", "rolling", Rolling), plugin("loss", "ratio", Ratio)]
    outcome = run(home, "train.steps=5", "train.best=valid/reward", plugins=plugins, source="rolling", loss="ratio")
    assert [step for step, _ in pulls] == [0, 2, 4]
    assert not same(pulls[0][1], pulls[1][1])
    assert len(metrics(outcome)) == 5
    assert metrics(outcome)[0]["ratio"] != metrics(outcome)[1]["ratio"]
    assert outcome.after == {"reward": 0.5}
    with pytest.raises(ConfigError, match=r"this source has no epochs; set train\.steps"):
        prepare(configure(home, "train.epochs=1", plugins=plugins, source="rolling", loss="ratio"))


def test_a_controller_changes_an_option_and_its_state_is_saved(home):
    @frozen
    class Doubling:
        """Doubles λ at every validation."""

        def __call__(self, step, metrics, state):
            beta = state.get("beta", 0.1) * 2
            return {"loss.beta": beta}, {"beta": beta}

    file = home.parent / "controlled.toml"
    file.write_text(RUN_FILE + '\n[[controller]]\nname = "doubling"\n')
    outcome = run(file, "train.steps=4", "train.validate_every=2", plugins=[plugin("controller", "doubling", Doubling)])
    state = json.loads((outcome.checkpoint / "state.json").read_text())
    assert state["controllers"] == {"doubling": {"beta": pytest.approx(0.8)}}
    lines = list(map(json.loads, (outcome.path / "metrics.jsonl").read_text().splitlines()))
    assert [line["doubling/loss.beta"] for line in lines if "doubling/loss.beta" in line] == pytest.approx(
        [0.2, 0.4, 0.8]
    )
    for line in metrics(outcome):
        beta = 0.2 if line["step"] <= 2 else 0.4
        assert line["loss"] == pytest.approx(line["nll"] + beta * line["odds"], rel=1e-5)


def test_observers_see_a_run_from_start_to_end(home):
    seen = []

    class Unused:
        """Nothing."""

    watcher = plugin(
        "task", "watcher", Unused,
        on_run_start=lambda run: seen.append(("start", run.total_steps)),
        on_step_end=lambda step, metrics: seen.append(("step", step)),
        on_checkpoint=lambda step, path: seen.append(("checkpoint", step)),
        on_run_end=lambda run, error: seen.append(("end", error)),
    )  # fmt: skip
    run(home, "train.steps=2", "train.validate_every=9", plugins=[watcher])
    assert seen == [("start", 2), ("step", 1), ("step", 2), ("checkpoint", 2), ("end", None)]


def test_full_weights_train_a_model_from_nothing(home):
    file = home.parent / "scratch.toml"
    model = '[model]\nconfig = "model/config.json"\ninit = "random"'
    file.write_text(RUN_FILE.replace('[model]\npath = "model"', model).replace("rank = 4", 'name = "full"'))
    runs = [run(file, "train.steps=8", loss="sft"), run(file, "train.steps=8", "backward.name=segmented", loss="sft")]
    assert runs[0].after["loss"] < runs[0].before["loss"]
    saved = adapter(runs[0].path / "adapter")
    assert "model.embed_tokens.weight" in saved
    assert apart(saved, adapter(runs[1].path / "adapter")) < 1e-3
    other = prepare(configure(file, "train.seed=5", loss="sft"))
    assert not same(saved, other.policy.params)


def test_options_of_the_context_change_no_result(home):
    plain = run(home, "context.attention_chunk=0")
    for setting in ("context.attention_chunk=2", "context.mlp_chunk=3"):
        other = run(home, setting, "backward.name=segmented")
        assert apart(adapter(plain.path / "adapter"), adapter(other.path / "adapter")) < 2e-5


def test_a_second_run_takes_a_folder_of_its_own_and_one_folder_takes_one_run(home, tmp_path):
    file = tiny_run(tmp_path)
    first, second = run(file), run(file)
    assert (first.path.name, second.path.name) == ("run", "run-2")
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        configure(file, f"run.path={first.path}")


def test_the_effective_configuration_gives_the_same_run_again(home, tmp_path):
    first = run(home, "train.seed=3", "adapter.rank=2", loss="orpo")
    again = run(first.path / "run.toml", f"run.path={tmp_path / 'again'}")
    assert same(adapter(first.path / "adapter"), adapter(again.path / "adapter"))


def test_a_finished_run_lets_its_model_go(home, monkeypatch):
    gradients, models = Engine.gradients, []

    def seen(self, *arguments):
        models.append(weakref.ref(self.model))
        return gradients(self, *arguments)

    monkeypatch.setattr(Engine, "gradients", seen)
    gc.collect()
    gc.disable()
    try:
        outcome = run(home, "train.steps=2", "backward.name=segmented", "head.name=flash-cce")
        assert outcome.steps == 2
        assert models[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("backward", ["full", "segmented"])
def test_active_memory_does_not_grow_with_the_steps(home, backward):
    outcome = run(home, "train.steps=50", "train.validate_every=10", f"backward.name={backward}", "head.name=flash-cce")
    held = [line["memory_active_gb"] for line in metrics(outcome)]
    assert held[49] == pytest.approx(held[9], rel=0.01)


def test_ids_outside_the_vocabulary_are_refused_before_the_first_step(tmp_path):
    from tiny_llama import checkpoint

    file = tiny_run(tmp_path)
    checkpoint(tmp_path / "small", vocab_size=200)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "small" / name).write_bytes((tmp_path / "model" / name).read_bytes())
    with pytest.raises(DataError, match=r"train.jsonl:1: token id \d+, but the model's vocabulary has 200 tokens"):
        prepare(configure(file, f"model.path={tmp_path / 'small'}"))


def test_a_diverged_run_is_no_success(home):
    with pytest.raises(TrainingError, match="ended at step 4 with a validation loss of nan"):
        run(home, "train.steps=4", "optimizer.learning_rate=1e30", "train.clip_norm=0")


def test_a_misspelt_best_metric_is_found_before_the_first_step(home, monkeypatch):
    def never(*_):
        raise AssertionError("a step was made")

    monkeypatch.setattr(Engine, "gradients", never)
    with pytest.raises(ConfigError, match="validation has no metric 'foo'"):
        run(home, "train.best=valid/foo")


def test_two_controllers_keep_each_others_changes(home):
    @frozen
    class Beta:
        """Sets λ once."""

        def __call__(self, step, metrics, state):
            return ({"loss.beta": 0.7} if step == 0 else {}), {}

    @frozen
    class Scope:
        """Sets the scope later."""

        def __call__(self, step, metrics, state):
            return ({"loss.sft_scope": "response"} if step == 2 else {}), {}

    file = home.parent / "two.toml"
    file.write_text(RUN_FILE + '\n[[controller]]\nname = "beta"\n[[controller]]\nname = "scope"\n')
    plugins = [plugin("controller", "beta", Beta), plugin("controller", "scope", Scope)]
    outcome = run(file, "train.steps=4", "train.validate_every=2", plugins=plugins)
    for line in metrics(outcome):
        assert line["loss"] == pytest.approx(line["nll"] + 0.7 * line["odds"], rel=1e-5)
    state = json.loads((outcome.checkpoint / "state.json").read_text())
    assert state["overrides"] == {"loss.beta": 0.7, "loss.sft_scope": "response"}


def test_after_a_step_the_model_holds_the_new_weights(home):
    seen = []

    class Unused:
        """Nothing."""

    def on_step_end(step, metrics):
        model = captured[0]
        seen.append({name: value for name, value in model.named_parameters().items() if name.endswith("lora_b")})

    captured = []
    gradients = Engine.gradients

    def capture(self, *arguments):
        captured.append(self.model)
        return gradients(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "gradients", capture)
        outcome = run(home, "train.steps=2", plugins=[plugin("task", "look", Unused, on_step_end=on_step_end)])
    saved = adapter(outcome.path / "adapter")
    assert all(mx.array_equal(value, saved[name]) for name, value in seen[-1].items())
    assert not same(seen[0], seen[1])


def test_a_head_may_bring_weights_of_its_own(home):
    """A scalar head: its values stand in for log-probabilities, its weights train and are saved beside the adapter."""
    import mlx.nn as nn

    from mortice.batch import TokenLogprobs
    from mortice.model import Output, Part

    @frozen
    class Value:
        """One number a token."""

        provides = frozenset({"values"})

        def attach(self, model, seed):
            part = Part("")
            part.value_head = nn.Linear(model.config["hidden_size"], 1, bias=False)
            model.parts.append(part)
            model.invalidate()
            return {"value_head.weight": part.value_head.weight}

        def output_for(self, model):
            return Output(model.named_parameters()["value_head.weight"], "value_head.weight")

        def score(self, hidden, targets, output, *, grad=False, entropy=False, traced=False):
            values = (hidden @ output.weight.T)[:, 0]
            zeros = mx.zeros_like(values)
            unit = mx.broadcast_to(output.weight, hidden.shape) if grad else None
            return TokenLogprobs(zeros, lse=zeros, values=values, dhidden=unit)

        def output_gradients(self, hidden, targets, output, dlogprobs, lse, *, traced=False):
            return {"value_head.weight": (dlogprobs[:, None] * hidden).sum(axis=0, keepdims=True)}

        def save(self, params, folder):
            mx.save_safetensors(str(folder / "head.safetensors"), dict(params))

    @frozen
    class Ranking:
        """Chosen above rejected."""

        requires = frozenset({"pairs", "values"})

        def __call__(self, scores, batch):
            last = batch.last(scores.values)
            gap = last[batch.pairs[:, 0]] - last[batch.pairs[:, 1]]
            loss = mx.logaddexp(0.0, -gap)
            return LossOutput({"rank": (loss.sum(), gap.size)}, {"gap": gap.mean()})

    plugins = [plugin("head", "value", Value), plugin("loss", "ranking", Ranking)]
    runs = [
        run(home, "train.steps=10", f"backward.name={name}", plugins=plugins, head="value", loss="ranking")
        for name in ("segmented", "full")
    ]
    for outcome in runs:
        assert outcome.after["loss"] < outcome.before["loss"]
        head = mx.load(str(outcome.path / "adapter" / "head.safetensors"))
        assert set(head) == {"value_head.weight"}
        assert not any("value_head" in name for name in adapter(outcome.path / "adapter"))


def test_the_chat_template_and_what_it_is_given_shape_the_prompt(tmp_path):
    """Both are in the effective file, which makes the same run."""
    file = tiny_run(tmp_path)
    (tmp_path / "mine.jinja").write_text("{{ tag }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    turns = [{"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}] * 4
    write_lines(tmp_path / "train.jsonl", turns)
    chosen = (f'model.chat_template="{tmp_path}/mine.jinja"', 'model.template_variables={tag = "xyz"}')
    with pytest.raises(DataError, match="chat template"):
        prepare(configure(file), Notices())
    ready = prepare(configure(file, *chosen), Notices())
    assert ready.pretrained.tokenizer.decode(ready.groups()[0].prompt_ids) == "xyza"
    again = tmp_path / "again.toml"
    again.write_text(effective_toml(ready.config))
    assert prepare(load_config(again), Notices()).groups()[0].prompt_ids == ready.groups()[0].prompt_ids

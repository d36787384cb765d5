"""`mortice resume`: a run that stopped goes on as if it had not, and says what has changed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import pytest
from test_rollout_source import PLUGINS as ROLLOUT_PLUGINS
from test_rollout_source import RUN_FILE as ROLLOUT
from tiny_run import RUN_FILE, adapter, configure, same, tiny_run, write_lines

import mortice.plugins
from mortice.checkpoint import load_checkpoint
from mortice.errors import ConfigError, MorticeError
from mortice.launch import Notices, resume, train

TIMES = ("seconds", "per_second", "memory_")
"""Parts of the names of metrics that no two runs share."""
STEPS = 5
KINDS = {
    "orpo": ["adapter.dropout=0.2", "train.micro_batch_size=1"],
    "dpo": ["loss.name=dpo", "adapter.dropout=0.1", "backward.name=segmented"],
    "dpo-no-cache": ["loss.name=dpo", "reference.cache=false", "train.micro_batch_size=3"],
    "sft": ["loss.name=sft", "adapter.name=full", "backward.name=checkpoint"],
    "patterns": ["adapter.rank_pattern={v_proj=2}", "adapter.alpha=6", "adapter.rslora=true"],
    "bco": ["loss.name=bco", "loss.shift=running"],
    "adaptive": ["loss.lambda_schedule=adaptive", "train.validate_every=1"],
    "reward": ["loss.name=bradley-terry", "head.name=reward"],
}


@pytest.fixture
def installed(monkeypatch):
    """Plugins of the tests are found by whoever loads plugins."""
    from importlib import metadata

    found = metadata.entry_points

    def entry_points(**selection):
        points = found(**selection)
        return [*points, *ROLLOUT_PLUGINS] if selection.get("group") == "mortice" else points

    monkeypatch.setattr(mortice.plugins.metadata, "entry_points", entry_points)


def start(tmp_path: Path, *settings: str, run_file: str = RUN_FILE, steps: int = STEPS, name: str = "whole") -> Path:
    """A run that goes through, with a checkpoint of every step."""
    file = tiny_run(tmp_path, run_file.replace("rank = 4", "") if "adapter.name=full" in settings else run_file)
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"say {i}: "} for i in range(7)])
    write_lines(tmp_path / "held_out.jsonl", [{"prompt": f"tell {i}: "} for i in range(2)])
    kept = "train.save_every=1", "train.keep=0", f"train.steps={steps}", f"run.path={tmp_path / name}"
    return train(configure(file, *settings, *kept, plugins=ROLLOUT_PLUGINS)).path


def stopped(whole: Path, step: int, name: str = "stopped") -> Path:
    """The same folder as a kill before the next checkpoint leaves it."""
    folder = whole.with_name(f"{name}-{step}")
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "adapter")
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    names = sorted(p.name for p in (folder / "checkpoints").iterdir())
    for pointer in ("latest", "best"):
        file = folder / pointer
        if file.exists() and int(file.read_text().split()[0].removeprefix("step-")) > step:
            best = best_of(folder) if pointer == "best" else names[-1:]
            file.write_text(f"{best[0]}\n") if best else file.unlink()
    return folder


def best_of(folder: Path) -> list[str]:
    """The first of the lowest metrics among the checkpoints that are left."""
    states = [(json.loads((p / "state.json").read_text()), p.name) for p in (folder / "checkpoints").iterdir()]
    found = [(s["metric"], s["step"], name) for s, name in states if s["metric"] is not None]
    return [min(found)[2]] if found else []


def lines(folder: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if not any(part in k for part in TIMES)} for line in found]


def equal(one: Path, other: Path) -> None:
    """Weights, moments, metrics, samples, pointers."""
    for file in (one / "adapter").glob("*.safetensors"):
        assert same(mx.load(str(file)), mx.load(str(other / "adapter" / file.name))), file.name
    newest = [max((folder / "checkpoints").iterdir(), key=lambda p: int(p.name[5:])) for folder in (one, other)]
    first, second = (load_checkpoint(path) for path in newest)
    assert first.step == second.step and same(dict(first.optimizer), dict(second.optimizer))
    assert same(dict(first.weights), dict(second.weights))
    assert lines(one) == lines(other)
    for name in ("latest", "samples.jsonl"):
        if (one / name).exists():
            assert (one / name).read_text() == (other / name).read_text()
    if (one / "best").exists():
        assert (one / "best").read_text().split()[0] == (other / "best").read_text().split()[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path, kind):
    whole = start(tmp_path, *KINDS[kind])
    for step in (1, 3):
        folder = stopped(whole, step)
        outcome = resume(folder)
        assert outcome.steps == STEPS and outcome.path == folder
        equal(whole, folder)


ONLINE = ["loss.name=dpo", "source.name=rollout", "data.format=prompt", "rollout.name=sequential"]


@pytest.mark.parametrize("loss", [[], ["loss.beta=0.1"], ONLINE], ids=["grpo", "grpo-kl", "online"])
def test_a_rollout_goes_on_between_its_passes(tmp_path, installed, loss):
    whole = start(tmp_path, "source.inner_epochs=3", *loss, run_file=ROLLOUT, steps=7)
    for step in (2, 3):
        folder = stopped(whole, step)
        resume(folder)
        equal(whole, folder)


def test_twice_is_as_good_as_once(tmp_path):
    whole = start(tmp_path)
    folder = stopped(whole, 1)
    resume(folder)
    again = stopped(folder, 3, name="again")
    resume(again)
    equal(whole, again)


def test_without_a_checkpoint_it_begins_anew(tmp_path):
    whole = start(tmp_path)
    folder = stopped(whole, 0)
    notices = Notices()
    resume(folder, notices=notices)
    equal(whole, folder)
    assert "there is no whole checkpoint: the run begins anew" in notices.messages


@pytest.mark.parametrize("damage", ["optimizer", "adapter", "state"])
def test_a_truncated_checkpoint_is_set_aside(tmp_path, damage):
    whole = start(tmp_path)
    folder = stopped(whole, 3)
    newest = folder / "checkpoints" / "step-00003"
    file = {"optimizer": "optimizer.safetensors", "adapter": "adapter/adapters.safetensors", "state": "state.json"}[
        damage
    ]
    os.truncate(newest / file, (newest / file).stat().st_size // 2)
    notices = Notices()
    resume(folder, notices=notices)
    equal_but_aside(whole, folder)
    assert any("set aside as damaged-step-00003" in message for message in notices.messages)


def equal_but_aside(whole: Path, folder: Path) -> None:
    aside = folder / "checkpoints" / "damaged-step-00003"
    assert aside.is_dir()
    shutil.rmtree(aside)
    equal(whole, folder)


def test_a_complete_run_says_so(tmp_path):
    whole = start(tmp_path)
    with pytest.raises(ConfigError, match=rf"complete: it has done {STEPS} of {STEPS} steps"):
        resume(whole)


def test_more_steps_state_the_learning_rate(tmp_path):
    whole = start(tmp_path)
    notices = Notices()
    outcome = resume(whole, settings=["train.steps=8"], notices=notices)
    assert outcome.steps == 8
    assert any("train.steps: 5 → 8" in message for message in notices.messages)
    (told,) = [message for message in notices.messages if message.startswith("total steps 5 → 8")]
    assert "the learning rate of step 6 is" in told and "it was" in told
    assert "steps = 8 # --set" in (whole / "run.toml").read_text()
    assert [line["step"] for line in lines(whole) if "loss" in line] == list(range(1, 9))


def other_data(folder: Path) -> None:
    write_lines(folder / "train.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 10)


def edited(name: str, old: str, new: str):
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return edit


CHANGES = {
    "data": (other_data, "data.train: the content has changed"),
    "model": (edited("model/config.json", "{", "{ "), "model.path: the content has changed"),
    "setting": (
        edited("stopped-3/run.toml", "learning_rate = 0.01", "learning_rate = 0.02"),
        "optimizer.learning_rate: 0.01 → 0.02",
    ),
    "plugin": (edited("stopped-3/provenance.json", '"mortice 0', '"mortice 9'), "mortice 9"),
    "a space": (edited("stopped-3/run.toml", "rank = 4", "rank  = 4"), None),
}


@pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES)
def test_what_has_changed_is_listed(tmp_path, change, told):
    whole = start(tmp_path)
    folder = stopped(whole, 3)
    change(tmp_path)
    if told is None:
        resume(folder)
        return
    with pytest.raises(ConfigError) as refused:
        resume(folder)
    assert "this is not the run that stopped" in str(refused.value) and told in str(refused.value)
    assert resume(folder, force=True).steps == STEPS


def test_settings_that_change_a_step_are_refused(tmp_path):
    folder = stopped(start(tmp_path), 3)
    with pytest.raises(ConfigError, match=r"loss.beta: 0\.1 → 0\.5"):
        resume(folder, settings=["loss.beta=0.5"])


def test_folders_without_a_run(tmp_path):
    with pytest.raises(ConfigError, match="is no run folder"):
        resume(tmp_path)


def test_train_says_to_resume(tmp_path):
    whole = start(tmp_path)
    with pytest.raises(MorticeError, match="exists and is not an empty folder"):
        start(tmp_path)
    assert whole.exists()


def test_checkpoints_of_every_so_many_steps_stay(tmp_path):
    file = tiny_run(tmp_path)
    settings = "train.save_every=1", "train.keep=1", "train.keep_every=3", "train.steps=8", "train.validate_every=8"
    outcome = train(configure(file, *settings))
    found = sorted(p.name for p in (outcome.path / "checkpoints").iterdir())
    assert found == ["step-00003", "step-00006", "step-00008"]


COMMAND = [sys.executable, "-m", "mortice"]


def begin(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_instants(tmp_path, kills):
    """Whatever the instant, also inside a save: it goes on from the last whole state and ends bit by bit the same."""
    steps, draw = 12 * kills, random.Random(kills)
    file = tiny_run(tmp_path)
    settings = "loss.name=dpo", "train.save_every=2", f"train.steps={steps}", f"train.validate_every={steps // 4}"
    whole = train(configure(file, *settings, f"run.path={tmp_path / 'whole'}")).path
    killed = tmp_path / "killed"
    first = begin("train", str(file), "--run", str(killed), *(p for s in settings for p in ("--set", s)))
    while not (killed / "provenance.json").exists():
        time.sleep(0.05)
    time.sleep(0.3)
    kill(first)
    for _ in range(kills - 1):
        process = begin("resume", str(killed))
        time.sleep(draw.uniform(0.3, 2.5))
        kill(process)
    with suppress(ConfigError):  # it may be complete
        resume(killed)
    equal(whole, killed)
    assert not [p for part in ("", "checkpoints") for p in (killed / part).glob(".tmp-*")]


def test_a_second_process_is_refused(tmp_path):
    from mortice.checkpoint import RunFolder

    folder = stopped(start(tmp_path), 2)
    with RunFolder.open(folder):
        told = subprocess.run([*COMMAND, "resume", str(folder)], capture_output=True, text=True)
    assert told.returncode == 2 and f"in use by process {os.getpid()}" in told.stderr
    assert "Traceback" not in told.stderr


def test_a_full_disk_leaves_the_last_state(tmp_path, monkeypatch):
    """The write that fails names the checkpoint; what was saved before goes on once there is room."""
    whole = start(tmp_path)
    folder = stopped(whole, 2)
    real, count = mx.save_safetensors, 0

    def full(path, *rest, **more):
        nonlocal count
        count += 1
        if count > 2:
            Path(path).write_bytes(b"half")
            raise RuntimeError("[save_safetensors] No space left on device")
        return real(path, *rest, **more)

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(MorticeError, match=r"cannot write checkpoint .*No space left"):
        resume(folder)
    monkeypatch.setattr(mx, "save_safetensors", real)
    resume(folder)
    equal(whole, folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_is_read_only_is_named(tmp_path):
    folder = stopped(start(tmp_path), 2)
    folder.chmod(0o500)
    try:
        with pytest.raises(MorticeError, match="cannot write the run folder"):
            resume(folder)
    finally:
        folder.chmod(0o700)


def test_a_signal_saves_and_the_run_goes_on(tmp_path):
    """SIGTERM between two checkpoints: the step that ran is in the state, and nothing is lost."""
    settings = ["train.save_every=100", "train.steps=60"]
    file = tiny_run(tmp_path)
    whole = train(configure(file, *settings, f"run.path={tmp_path / 'whole'}")).path
    process = begin("train", str(file), "--run", str(tmp_path / "ended"), *(p for s in settings for p in ("--set", s)))
    metrics = tmp_path / "ended" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 8:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    resume(tmp_path / "ended")
    equal(whole, tmp_path / "ended")
    assert same(adapter(whole / "adapter"), adapter(tmp_path / "ended" / "adapter"))

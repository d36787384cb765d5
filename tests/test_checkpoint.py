"""The run folder: what stays, what is best, what a kill or a full disk leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from attrs import define

from mortice import atomic
from mortice.checkpoint import Checkpoint, RunFolder, load_checkpoint
from mortice.errors import CheckpointError, MorticeError, TrainingError
from mortice.protocols import Policy, RunInfo
from mortice.step import Tally
from mortice.trainer import Pace, Signals, Trainer


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(tmp_path / "run", "x = 1\n") as folder:
        yield folder


def save(folder: RunFolder, step: int, metric: float | None = None, adapter: str = "weights"):
    def write_adapter(path):
        path.mkdir()
        (path / "adapter").write_text(adapter)

    return folder.save(Checkpoint(step, {"m": mx.array([float(step)])}, {"seed": 7}), write_adapter, metric)


def steps(folder: RunFolder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in folder.checkpoints()]


def test_what_is_saved_is_loaded(folder):
    path = save(folder, 200, 1.5)
    assert path.name == "step-00200"
    assert {p.name for p in path.iterdir()} == {"adapter", "optimizer.safetensors", "state.json"}
    loaded = load_checkpoint(path)
    assert loaded.step == 200
    assert loaded.optimizer["m"].tolist() == [200.0]
    assert loaded.state["seed"] == 7
    assert (folder.path / "run.toml").read_text() == "x = 1\n"
    assert folder.latest() == folder.best() == folder.newest() == path


def test_case_b33_retention_keeps_best_and_last(folder):
    for step, loss in enumerate([3.0, 1.0, 2.0, 4.0], start=1):
        save(folder, step, loss)
    assert steps(folder) == [2, 4]
    assert folder.best().name == "step-00002"
    assert json.loads((folder.best() / "state.json").read_text())["metric"] == 1.0
    assert folder.latest().name == "step-00004"


def test_case_b33_steps_are_numbers(folder):
    for step in (9900, 10000, 100000):
        save(folder, step)
    assert steps(folder) == [10000, 100000]
    assert folder.newest().name == "step-100000"


def test_case_b33_nan_is_never_best_and_a_tie_keeps_the_earlier(folder):
    save(folder, 1, float("nan"))
    assert folder.best() is None
    save(folder, 2, 1.0)
    save(folder, 3, float("nan"))
    save(folder, 4, 1.0)
    assert folder.best().name == "step-00002"
    assert steps(folder) == [2, 4]


def test_best_may_be_the_largest(tmp_path):
    with RunFolder.create(tmp_path, "", best_mode="max", keep=0) as folder:
        for step, accuracy in enumerate([0.5, 0.9, 0.7], start=1):
            save(folder, step, accuracy)
        assert folder.best().name == "step-00002"
        assert steps(folder) == [1, 2, 3]


def test_keep_one_keeps_best_and_newest(tmp_path):
    with RunFolder.create(tmp_path, "", keep=1) as folder:
        for step, loss in enumerate([1.0, 2.0, 3.0], start=1):
            save(folder, step, loss)
        assert steps(folder) == [1, 3]


def test_a_second_process_is_refused_with_the_id_of_the_first(folder):
    code = f"""
import sys
from pathlib import Path
from mortice.checkpoint import RunFolder
try:
    RunFolder.create(Path({str(folder.path)!r}), "")
except Exception as error:
    print(type(error).__name__, error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith(f"TrainingError {folder.path} is in use by process {os.getpid()};")


def test_a_folder_can_be_held_again_once_it_is_let_go(tmp_path):
    RunFolder.create(tmp_path, "a").close()
    with RunFolder.create(tmp_path, "b"):
        assert (tmp_path / "run.toml").read_text() == "b"


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    with RunFolder.create(tmp_path, "old") as folder:
        save(folder, 20)
    with pytest.raises(TrainingError, match="holds a run already, up to step-00020"):
        RunFolder.create(tmp_path, "new")
    assert (tmp_path / "run.toml").read_text() == "old"


def test_a_failure_while_saving_leaves_the_older_ones(folder):
    old = save(folder, 1, 2.0)

    def full(path):
        path.mkdir()
        (path / "half").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(MorticeError, match=r"step-00002: .*No space left on device"):
        folder.save(Checkpoint(2, {"m": mx.array([2.0])}), full, 1.0)
    assert folder.checkpoints() == [old]
    assert folder.latest() == folder.best() == old
    assert [p.name for p in (folder.path / "checkpoints").iterdir()] == ["step-00001"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MorticeError, match=f"cannot write the run folder {tmp_path}/file/run: Not a directory"):
        RunFolder.create(tmp_path / "file" / "run", "")


KILLED = """
import os, signal, sys
from pathlib import Path
import mlx.core as mx
from mortice import atomic
from mortice.checkpoint import Checkpoint, RunFolder

path, after = Path(sys.argv[1]), int(sys.argv[2])
calls = 0

def counted(function):
    def call(*args, **kwargs):
        global calls
        if calls == after:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
        return function(*args, **kwargs)
    return call

folder = RunFolder.create(path, "")
write = lambda step: lambda part: part.mkdir() or (part / "adapter").write_text(str(step))
folder.save(Checkpoint(1, {"m": mx.array([1.0])}), write(1), 2.0)
os.replace, os.fsync = counted(os.replace), counted(os.fsync)
folder.save(Checkpoint(2, {"m": mx.array([2.0])}), write(2), 1.0)
folder.save(Checkpoint(2, {"m": mx.array([2.5])}), write(3), 1.0)
print(calls)
"""


def kill(path, after: int) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", KILLED, str(path), str(after)], capture_output=True, text=True)


def test_a_kill_at_any_write_leaves_a_whole_state(tmp_path):
    total = int(kill(tmp_path / "whole", 1000).stdout)
    assert total > 15
    for after in range(0, total, 2):
        path = tmp_path / str(after)
        assert kill(path, after).returncode == -signal.SIGKILL
        for part in (path, path / "checkpoints"):
            atomic.clean(part)
        folder = RunFolder(path)
        loaded = [load_checkpoint(p) for p in folder.checkpoints()]
        assert loaded and folder.latest() in folder.checkpoints()
        for checkpoint, found in zip(loaded, folder.checkpoints()):
            value, adapter = checkpoint.optimizer["m"].item(), (found / "adapter" / "adapter").read_text()
            assert (value, adapter) in {(1.0, "1"), (2.0, "2"), (2.5, "3")}
        assert not [p for p in path.rglob("*") if p.name.startswith((atomic.TEMPORARY, atomic.ASIDE))]


def test_a_replacement_that_was_not_finished_is_undone(tmp_path):
    aside = tmp_path / f"{atomic.ASIDE}adapter"
    aside.mkdir()
    (aside / "file").write_text("old")
    (tmp_path / f"{atomic.TEMPORARY}1-adapter").mkdir()
    (tmp_path / f"{atomic.TEMPORARY}1-latest").write_text("")
    atomic.clean(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]
    assert (tmp_path / "adapter" / "file").read_text() == "old"


@pytest.mark.parametrize("name", ["state.json", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut", "empty"])
def test_a_damaged_checkpoint_is_named(folder, name, damage):
    file = save(folder, 1) / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-3] if damage == "cut" else b"")
    with pytest.raises(CheckpointError, match="step-00001 is no complete checkpoint"):
        load_checkpoint(file.parent)


@define
class Quadratic:
    """Stands for engine, source and adapter at once: one weight pulled to zero."""

    model: object = SimpleNamespace(bind=lambda params: None)
    can_validate = False
    losses = ()

    def next(self, step):
        return ["group"], 1

    def state(self):
        return {}

    def gradients(self, params, groups, randomness, poll, past):
        return Tally((), {}, tokens=1), {"w": 2 * params["w"]}

    def past_after(self, past, tally):
        return past

    def save(self, model, params, path):
        path.mkdir(exist_ok=True)
        mx.save_safetensors(str(path / "adapters.safetensors"), params)


def train(folder: RunFolder, total: int, save_every: int) -> list[int]:
    """Run to the end; the steps of all checkpoints that were made."""
    saved = []
    part = Quadratic()
    trainer = Trainer(
        engine=part, policy=Policy(None, {"w": mx.array([1.0])}), adapter=part, optimizer=optim.Adam(0.01),
        learning_rate=lambda _: 0.01, source=part, folder=folder, pace=Pace(total, total, save_every), seed=0,
        signals=Signals(),
        hook=SimpleNamespace(
            on_run_start=lambda run: None, on_step_end=lambda step, metrics: None,
            on_checkpoint=lambda step, path: saved.append(step), on_run_end=lambda run, error: None,
        ),
    )  # fmt: skip
    outcome = trainer.run(RunInfo(folder.path, total, 1, 1))
    assert outcome.checkpoint == folder.latest()
    return saved


@pytest.mark.parametrize(
    ("total", "save_every", "saved"),
    [(81, 20, [20, 40, 60, 80, 81]), (5, 100, [5]), (80, 20, [20, 40, 60, 80])],
)
def test_case_b30_the_end_is_saved_once(folder, total, save_every, saved):
    assert train(folder, total, save_every) == saved
    assert steps(folder) == saved[-2:]
    last = load_checkpoint(folder.latest())
    assert last.step == last.optimizer["step"].item() == total
    assert {"step", "learning_rate", "w.m", "w.v"} <= set(last.optimizer)
    weights = mx.load(str(folder.latest() / "adapter" / "adapters.safetensors"))["w"]
    assert weights.item() == mx.load(str(folder.path / "adapter" / "adapters.safetensors"))["w"].item() < 1.0

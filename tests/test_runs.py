"""`mortice runs`: what folders tell, how they compare, and what may go."""

from __future__ import annotations

import json

import pytest
from tiny_run import configure, tiny_run

from mortice.checkpoint import RunFolder
from mortice.cli import main
from mortice.launch import train


@pytest.fixture
def folder(tmp_path):
    """Two runs that differ in one setting; the second has not reached its end."""
    file = tiny_run(tmp_path)
    kept = "train.save_every=1", "train.keep=0", "train.validate_every=1"
    for name, more in (("one", ()), ("two", ("optimizer.learning_rate=0.02",))):
        train(configure(file, *kept, *more, "train.steps=3", f"run.path={tmp_path / 'runs' / name}"))
    facts = json.loads((tmp_path / "runs" / "two" / "provenance.json").read_text())
    (tmp_path / "runs" / "two" / "provenance.json").write_text(json.dumps({**facts, "total_steps": 9}))
    return tmp_path / "runs"


def call(*arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return ended.value.code or 0, shown.out, shown.err


def names(folder):
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def test_runs_are_listed(folder, capsys):
    code, out, _ = call("runs", folder, capsys=capsys)
    assert code == 0 and "complete" in out and "stopped" in out and "3 of 9" in out and "orpo" in out
    code, out, _ = call("runs", folder, "--json", capsys=capsys)
    one, two = json.loads(out)
    assert (one["state"], two["state"]) == ("complete", "stopped") and one["checkpoints"] == 3
    assert one["metrics"]["valid/loss"] > 0 and one["settings"]["optimizer.learning_rate"] == 0.01
    with RunFolder.open(folder / "one"):
        assert json.loads(call("runs", folder / "one", "--json", capsys=capsys)[1])[0]["state"] == "running"


def test_runs_are_compared(folder, capsys):
    code, out, _ = call("runs", folder, "--compare", "--json", capsys=capsys)
    found = json.loads(out)
    assert code == 0 and found["settings"]["optimizer.learning_rate"] == [0.01, 0.02]
    assert "adapter.rank" not in found["settings"] and len(set(found["metrics"]["valid/loss"])) == 2
    code, out, _ = call("runs", folder / "one", folder / "two", "--compare", capsys=capsys)
    assert code == 0 and "settings that differ" in out and "valid/loss" in out
    code, _, err = call("runs", folder / "one", "--compare", capsys=capsys)
    assert code == 2 and "two runs or more" in err


def test_pruning_keeps_the_best_and_the_newest(folder, capsys, monkeypatch):
    best = (folder / "one" / "best").read_text().split()[0]
    monkeypatch.setattr("builtins.input", lambda _: "n")
    code, out, _ = call("runs", folder / "one", "--prune", capsys=capsys)
    assert code == 1 and "nothing was removed" in out and len(names(folder / "one")) == 3
    code, out, _ = call("runs", folder / "one", "--prune", "--yes", "--json", capsys=capsys)
    assert code == 0 and json.loads(out)["bytes"] > 0
    assert names(folder / "one") == sorted({best, "step-00003"}) and len(names(folder / "two")) == 3


def test_whole_runs_go_where_that_is_asked(folder, capsys):
    code, _, err = call("runs", folder / "one", "--delete", "--prune", capsys=capsys)
    assert code == 2 and "give one of them" in err
    with RunFolder.open(folder / "one"):
        code, _, err = call("runs", folder / "one", "--delete", "--yes", capsys=capsys)
    assert code == 2 and "is in use" in err and (folder / "one").exists()
    assert call("runs", folder / "one", "--delete", "--yes", capsys=capsys)[0] == 0
    assert sorted(p.name for p in folder.iterdir()) == ["two"]


def test_folders_without_runs(tmp_path, capsys):
    code, _, err = call("runs", tmp_path, capsys=capsys)
    assert code == 2 and "is no run folder and holds none" in err

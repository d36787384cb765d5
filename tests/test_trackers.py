"""What a run shows and stores."""

from __future__ import annotations

import io
import json
from io import FileIO
from pathlib import Path

import pytest
from rich.console import Console

from mortice.errors import MorticeError
from mortice.protocols import RunInfo
from mortice_plugins.trackers import progress
from mortice_plugins.trackers.jsonl import JSONLines, LiveLines
from mortice_plugins.trackers.progress import Progress

STEP = {
    "loss": 1.25, "learning_rate": 1e-5, "tokens_per_second": 250.0, "memory_peak_gb": 0.5, "memory_cache_gb": 0.03,
    "nonfinite_steps": 0,
}  # fmt: skip


def info(path: Path, start_step: int = 0) -> RunInfo:
    return RunInfo(path, total_steps=10, trainable=1, parameters=2, start_step=start_step, resumed=start_step > 0)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_line_is_on_disk_as_soon_as_its_step_is_done(tmp_path):
    with JSONLines().open(info(tmp_path)) as tracker:
        tracker.log(1, {"loss": 0.5, "grad_norm": float("nan")})
        assert lines(tmp_path) == [{"step": 1, "loss": 0.5, "grad_norm": None}]
        tracker.log(1, {"valid/loss": float("inf")})
    assert lines(tmp_path)[1] == {"step": 1, "valid/loss": None}


def test_going_on_from_a_step_drops_the_lines_after_it(tmp_path):
    with JSONLines().open(info(tmp_path)) as tracker:
        for step in (1, 2, 3, 4):
            tracker.log(step, {"loss": float(step)})
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 5, "lo')  # the line a kill cut
    with JSONLines().open(info(tmp_path, start_step=2)) as tracker:
        tracker.log(3, {"loss": 9.0})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 9.0)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_disk_that_refuses_is_named():
    with pytest.raises(MorticeError, match="cannot write /dev/full: No space left"), FileIO("/dev/full", "w") as full:
        LiveLines(full).log(1, {"loss": 1.0})


@pytest.fixture
def screen(monkeypatch):
    """What goes to the console; `screen(terminal=True)` says that it is one."""
    out = io.StringIO()

    def use(terminal: bool) -> io.StringIO:
        monkeypatch.setattr(
            progress, "Console", lambda **_: Console(file=out, force_terminal=terminal, width=200, highlight=False)
        )
        return out

    return use


def test_without_a_terminal_there_are_lines(screen, tmp_path):
    out = screen(terminal=False)
    with Progress(every=3600).open(info(tmp_path)) as tracker:
        tracker.log(1, STEP | {"nll": 2.0, "nonfinite_steps": 3})
        tracker.log(2, STEP)
        tracker.log(2, {"valid/loss": 0.75, "valid/margin": 0.125, "valid/seconds": 3.0})
        tracker.say("[2 of 3] rows were cut")
        tracker.log(10, STEP)
    first, valid, notice, last = out.getvalue().splitlines()
    assert first.startswith("step 1/10  loss 1.2500  nll 2.000")
    assert all(part in first for part in ("1.00e-05", "250 tok/s", "peak 0.50 GB", "cache 0.03 GB", "skipped 3"))
    assert valid == "step 2  held out: loss 0.7500  margin 0.1250"
    assert notice == "[2 of 3] rows were cut"
    assert last.startswith("step 10/10") and "skipped" not in last


def test_on_a_terminal_there_is_a_bar(screen, tmp_path):
    out = screen(terminal=True)
    with Progress().open(info(tmp_path, start_step=4)) as tracker:
        tracker.log(5, STEP)
        tracker.say("a notice")
        tracker.log(10, STEP)
    text = out.getvalue()
    assert "a notice\n" in text
    assert "10/10" in text
    assert "loss 1.2500" in text
    assert "left" in text

"""`mortice plan`, and `mortice check` of a run with a memory limit."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from test_budget import long_run
from tiny_run import RUN_FILE, tiny_run

from mortice.cli import main, plan
from mortice.planning import PARTS

pytestmark = pytest.mark.usefixtures("in_step")

FIELDS = {
    "peak", "parts", "update", "elsewhere", "head", "attention", "seconds_per_step", "steps", "tokens", "longest_row",
    "scored", "micro_batches", "layers_run", "layers", "memory_limit", "changes", "strategies", "notices",
}  # fmt: skip


@pytest.fixture
def call(capsys):
    """Run a command in this process: exit code, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            main(arguments)
            code = 0
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def file(tmp_path):
    return str(tiny_run(tmp_path, RUN_FILE))


def test_the_table_names_parts_peak_and_time(call, file):
    code, out, _ = call("plan", file)
    assert code == 0
    for word in ("weights", "adapter", "optimizer", "gradients", "working", "peak", "3 steps", "all layers"):
        assert word in out, word
    assert "█" in out
    assert "reference" not in out  # ORPO has none
    assert "limit" not in out


def test_what_the_process_holds_beside_the_run_is_shown(call, file):
    held = mx.zeros((4 * 10**6,), mx.uint8)
    mx.eval(held)
    assert "held beside the run" in call("plan", file)[1]
    assert json.loads(call("plan", "--json", file)[1])["elsewhere"] >= held.nbytes


def test_json_has_one_schema(call, file):
    code, out, err = call("plan", "--json", file)
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert set(found) == FIELDS
    assert tuple(found["parts"]) == PARTS
    assert found["peak"] == max(sum(found["parts"].values()), found["update"]) + found["elsewhere"]
    assert (found["steps"], found["layers"], found["layers_run"]) == (3, 2, [2])
    assert (found["memory_limit"], found["changes"]) == (None, {})
    assert found["strategies"] == {"layout": "separate", "head": "dense", "backward": "full"}
    assert found["head"] > 0 and found["attention"] > 0


def test_a_limit_that_is_kept_is_shown(call, file):
    code, out, _ = call("plan", "--set", "train.memory_limit=1GB", file)
    assert code == 0
    assert "limit" in out and "1 GB" in out
    code, out, _ = call("plan", "--json", "--set", "train.memory_limit=1GB", file)
    found = json.loads(out)
    assert (code, found["memory_limit"]) == (0, "1GB")
    assert found["peak"] <= 10**9
    assert any("predicted peak" in notice for notice in found["notices"])


def test_what_a_limit_changes_is_said(call, tmp_path):
    file = str(long_run(tmp_path))
    layout = ("--layout", "separate")
    whole = json.loads(call("plan", "--json", *layout, file)[1])["peak"]
    tight = f"train.memory_limit={round(0.8 * whole / 1000)}kB"
    code, out, err = call("plan", "--json", *layout, "--set", tight, file)
    assert code == 0, err
    found = json.loads(out)
    assert found["changes"]
    assert found["strategies"]["layout"] == "separate"
    assert found["peak"] <= 0.8 * whole
    for key in found["changes"]:
        assert any(notice.startswith("memory_limit: ") and key in notice for notice in found["notices"]), key


def test_a_run_that_cannot_fit_is_refused_with_what_would(call, file):
    code, out, err = call("plan", "--set", "train.memory_limit=100kB", file)
    assert (code, out) == (2, "")
    assert "--set: train.memory_limit: the run does not fit 100 kB" in err
    assert "what would fit:" in err and "train.memory_limit = " in err
    assert "Traceback" not in err


def test_nothing_is_written(call, file, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    call("plan", file)
    assert sorted(tmp_path.rglob("*")) == before


def test_check_knows_the_limit(call, file):
    code, out, err = call("check", "--set", "train.memory_limit=1GB", file)
    assert code == 0
    assert "all is well" in out and "predicted peak" in err
    code, _, err = call("check", "--set", "train.memory_limit=100kB", file)
    assert (code, "does not fit" in err) == (2, True)


@pytest.mark.parametrize(
    ("share", "bar"), [(0, ""), (1, plan.BAR * "█"), (0.5, plan.BAR // 2 * "█"), (1 / (8 * plan.BAR), "▏")]
)
def test_bars(share, bar):
    assert plan._bar(share, 1) == bar

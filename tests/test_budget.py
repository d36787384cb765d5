"""`[train] memory_limit`: what is changed, what is not, and what a refusal proposes.

The search is tested on needs that are written down; a few runs are real.
"""

from __future__ import annotations

import gc
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import mlx.core as mx
import pytest
from attrs import frozen
from tiny_run import RUN_FILE, adapter, apart, configure, metrics, pairs, plugin, run, same, tiny_run, write_lines

from mortice import budget
from mortice.budget import ADVICE, PROBES, Search, around
from mortice.cli import main
from mortice.config import RunConfig, load_config
from mortice.errors import ConfigError
from mortice.launch import Notices, prepare
from mortice.planning import PARTS, Estimate
from mortice.sizes import readable
from mortice.trainer import Outcome

pytestmark = pytest.mark.usefixtures("in_step")

MB = 10**6
LONG = RUN_FILE.replace("max_length = 64", "max_length = 512")
"""The tiny run on rows long enough for memory to matter."""


def long_run(folder: Path, run_file: str = LONG) -> Path:
    file = tiny_run(folder, run_file)
    write_lines(folder / "train.jsonl", [p | {"prompt": p["prompt"] * 30} for p in pairs(["red", "green", "blue"] * 4)])
    return file


# Values around one


@pytest.mark.parametrize(
    ("own", "more", "less"),
    [
        (4, [8], [2, 1]),
        (8, [], [4, 2, 1]),
        (1, [2, 4, 8], []),
        (3, [4, 8], [2, 1]),
        (100, [], [8, 4, 2, 1]),
    ],
)
def test_values_around_a_number(own, more, less):
    assert around(own, (8, 4, 2, 1)) == (more, less)


def test_values_around_whole_and_automatic():
    assert around(0, (0, 2048, 128)) == ([], [2048, 128])
    assert around(256, (0, 2048, 128)) == ([2048, 0], [128])
    assert around(64, (0, 2048, 128)) == ([128, 2048, 0], [])
    assert around(0, ("auto", 64, 32)) == ([], ["auto", 64, 32])
    assert around("auto", ("everything", "auto", "cuts")) == (["everything"], ["cuts"])
    assert around(None, (None, "4MB")) == ([], ["4MB"])


# The search, on needs that are written down


@frozen
class Leanable:
    """A backward whose `memory` stands for its need in MB; less of it takes longer."""

    memory: int = 80
    leaner: ClassVar = {"memory": (160, 80, 40, 20)}

    def __call__(self, *_):
        raise AssertionError("nothing is run")


@frozen
class Roomy:
    """A head with a tile."""

    provides: ClassVar = frozenset({"entropy"})
    leaner: ClassVar = {"tile": (16, 8, 4)}
    tile: int = 16


PLUGINS = [plugin("backward", "leanable", Leanable), plugin("head", "roomy", Roomy)]
Needs = Callable[[RunConfig], tuple[float, float]]
"""(MB, seconds) of a run."""
STANDING = 100
"""MB of weights."""


def by_memory(config: RunConfig) -> tuple[float, float]:
    return STANDING + config.backward.memory, 1 + 10 / config.backward.memory


@pytest.fixture
def search(tmp_path, monkeypatch) -> Callable[..., tuple[Search, list[str]]]:
    """A search over a run whose needs a function gives, and what it says that it measures."""

    def make(needs: Needs = by_memory, tables: str = "", machine: float = 1e12, **strategies: str) -> Any:
        def estimated(engine: RunConfig, params: Any, optimizer: Any, work: Any, *, rough: bool = False) -> Estimate:
            memory, seconds = needs(engine)
            parts = dict.fromkeys(PARTS, 0) | {"weights": STANDING * MB, "working": int((memory - STANDING) * MB)}
            return Estimate(parts, 0, 0, seconds, 0, 0, 1, 1, 1, 1, (1,), 1)

        monkeypatch.setattr(budget, "estimate", estimated)
        monkeypatch.setattr(budget, "workload", lambda engine, groups, size: SimpleNamespace(largest=()))
        monkeypatch.setattr(budget, "least_peak", lambda engine, *_: needs(engine)[0] * MB / 4)
        monkeypatch.setattr(budget, "machine_memory", lambda: machine)
        config = configure(tiny_run(tmp_path, RUN_FILE + tables), plugins=PLUGINS, **strategies)
        told: list[str] = []
        return Search(config, None, {}, (), lambda config, model: config, told.append), told

    return make


LEANABLE = '[backward]\nname = "leanable"\n'


def test_a_run_that_fits_and_gains_nothing_stays(search):
    made, told = search(lambda config: (150, 1.0), LEANABLE)
    found = made.fit(200 * MB)
    assert (found.changes, found.reasons, found.config) == ({}, (), made.config)
    assert found.spare == 50 * MB
    assert told[0] == "measuring the run as it is"
    assert len(told) == len(set(told)) <= 8  # a few richer values were looked at, each once


def test_the_least_lean_value_that_fits_is_taken(search):
    made, _ = search(tables=LEANABLE)
    found = made.fit(155 * MB)  # 5 % are left free: 147
    assert found.changes == {"backward.memory": 40}
    assert found.reasons == ("backward.memory = 40: 180 MB → 140 MB; a step takes 1.11 times as long",)


def test_a_run_that_was_fitted_stays_though_it_is_measured_a_little_larger(search):
    """It needs 180 MB: in a limit of 185 it is left as it is, in 182 it comes too near."""
    made, _ = search(tables=LEANABLE)
    assert made.fit(185 * MB).changes == {}
    made, _ = search(tables=LEANABLE)
    assert made.fit(182 * MB).changes == {"backward.memory": 40}


def test_room_is_used_where_a_step_gets_faster(search):
    made, _ = search(tables=LEANABLE)
    found = made.fit(300 * MB)
    assert found.changes == {"backward.memory": 160}
    assert found.reasons == ("room for backward.memory = 160: 180 MB → 260 MB; a step takes 0.94 times as long",)
    assert made.fit(260 * MB).changes == {}  # 247 are too few


def test_room_is_not_used_for_a_gain_that_is_not_there_twice(search):
    once = iter([1.0, 1.0, 0.5, 0.5])

    def needs(config):
        return (100 + config.backward.memory, next(once, 1.0) if config.train.micro_batch_size == 1 else 1.0)

    made, _ = search(needs, LEANABLE)
    assert made.fit(400 * MB).changes == {}


def test_what_the_user_set_stays(search):
    made, told = search(tables=LEANABLE + "memory = 80\n")
    with pytest.raises(ConfigError) as refused:
        made.fit(150 * MB)
    assert not any("memory = 40" in line for line in told)
    assert "backward.memory = 20 (set in run.toml:" in str(refused.value)
    assert made.fit(300 * MB).changes == {}


def test_what_python_set_stays(tmp_path, monkeypatch):
    from mortice.config import config_from_dict

    file = tiny_run(tmp_path)
    tables = tomllib.loads(file.read_text())
    tables["model"]["path"] = str(tmp_path / "model")
    tables["data"] |= {"train": str(tmp_path / "train.jsonl"), "valid": str(tmp_path / "valid.jsonl")}
    config = config_from_dict(tables | {"backward": {"name": "checkpoint", "segment_size": 4}})
    made = Search(config, None, {}, (), lambda config, model: config)
    assert not made._is_open("backward.segment_size")
    assert not made._is_open("train.batch_size")
    assert made._is_open("train.micro_batch_size")
    assert made._is_open("layout.name")


def test_another_strategy_stands_in_for_one_that_was_left_open(search):
    def needs(config):
        lean = type(config.backward).__name__ == "Checkpoint"
        return (130 if lean else 500, 1.3 if lean else 1.0)

    made, _ = search(needs)
    found = made.fit(140 * MB)
    assert found.changes["backward.name"] == "checkpoint"
    assert found.config.backward.segment_size == 2


def test_options_that_hold_the_peak_up_together(search):
    def needs(config):
        return (100 + max(config.backward.memory, 5 * config.head.tile), 1.0)

    made, _ = search(needs, LEANABLE + '[head]\nname = "roomy"\n')
    found = made.fit(135 * MB)
    assert found.estimate.peak == 120 * MB
    assert {"backward.memory": 20, "head.tile": 4}.items() <= found.changes.items()


def test_weights_beyond_the_limit_are_refused_at_once(search):
    made, told = search(lambda config: (180, 1.0), LEANABLE)
    with pytest.raises(ConfigError, match="the run does not fit 100 MB"):
        made.fit(100 * MB)
    assert len(told) <= 1 + ADVICE


def test_more_than_the_machine_has_is_no_room(search):
    made, _ = search(tables=LEANABLE, machine=2e9)
    assert made.fit(4 * 10**12).changes == {"backward.memory": 160}
    made, _ = search(lambda config: (5000, 1.0), LEANABLE, machine=2e9)
    with pytest.raises(ConfigError) as refused:
        made.fit(4 * 10**12)
    assert "beyond this machine (2 GB)" in str(refused.value)


def test_the_search_ends(search):
    made, told = search(lambda config: (10**6, 1.0))
    with pytest.raises(ConfigError):
        made.fit(200 * MB)
    assert len(told) == len(set(told)) <= PROBES + ADVICE


# Real runs


def peak_of(outcome: Outcome) -> float:
    """The highest of the run's own metrics, in GB."""
    return max(line["memory_peak_gb"] for line in metrics(outcome))


NAMED = """
[backward]
name = "full"
[layout]
name = "separate"
[head]
name = "dense"
[context]
mlp_chunk = 128
attention_chunk = 64
"""


@pytest.mark.alone
@pytest.mark.parametrize("beside", [0, 5 * MB], ids=["alone", "beside another model"])
def test_a_limit_that_is_kept_and_changes_no_result(tmp_path, beside, monkeypatch):
    monkeypatch.setattr(budget, "FASTER", 1.0)  # nothing is taken for its speed, which is the machine's
    others = mx.zeros((beside,), mx.uint8)
    mx.eval(others)
    file = long_run(tmp_path)
    free = run(file)
    limit = 0.7 * peak_of(free)
    fitted = run(file, f'train.memory_limit="{1000 * limit:.3f}MB"')
    assert peak_of(fitted) <= 1.03 * limit  # of a few megabytes, what MLX runs ahead is a share on a busy machine
    assert apart(adapter(fitted.path / "adapter"), adapter(free.path / "adapter")) < 1e-5
    assert "# train.memory_limit" in (fitted.path / "run.toml").read_text()
    ready = prepare(load_config(fitted.path / "run.toml", run_path=tmp_path / "again"), Notices())
    assert ready.fitted is not None
    assert ready.fitted.changes == {}
    del ready  # its model would count as held beside the next run
    again = run(fitted.path / "run.toml", f'run.path="{tmp_path}/again"')
    assert peak_of(again) <= 1.03 * limit
    assert same(adapter(again.path / "adapter"), adapter(fitted.path / "adapter"))


@pytest.mark.alone
def test_a_roomy_limit_keeps_named_options(tmp_path):
    file = tiny_run(tmp_path, RUN_FILE + '[backward]\nname = "checkpoint"\nsegment_size = 1\n')
    ready = prepare(configure(file, 'train.memory_limit="1GB"', "train.micro_batch_size=1"), Notices())
    assert ready.config.backward.segment_size == 1
    assert not {"backward.name", "backward.segment_size", "train.micro_batch_size"} & set(ready.fitted.changes)


def proposals(text: str) -> list[str]:
    """`key=value` of each line behind `what would fit:`."""
    lines = text.partition("what would fit:\n")[2].splitlines()
    found = [line.split(" or less")[0].split(" (set in")[0].rsplit(": ", 1)[0].strip() for line in lines]
    return [line.replace(" = ", "=", 1) for line in found]


@pytest.mark.alone
def test_every_change_that_a_refusal_proposes_is_enough(tmp_path):
    file = long_run(tmp_path, LONG + NAMED)
    gc.collect()
    limit = readable(mx.get_active_memory() + 6 * MB, "")  # other tests may hold something
    lean = f'train.memory_limit="{limit}"'
    with pytest.raises(ConfigError) as refused:
        prepare(configure(file, lean, "train.micro_batch_size=1"), Notices())
    text = str(refused.value)
    del refused  # its traceback holds the model, which would count as held beside the next one
    assert "--set: train.memory_limit: the run does not fit " in text
    found = proposals(text)
    assert any(line.startswith("train.memory_limit=") for line in found), text
    assert any(line.startswith("data.max_length=") for line in found), text
    assert any(line.startswith("backward.name=") for line in found), text
    for line in found:
        prepare(configure(file, lean, "train.micro_batch_size=1", line), Notices())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ('"16"', "the size '16' has no unit"),
        ('"16 gigs"', "the unknown unit 'gigs'"),
        ("0", "found 0"),
        ('"0GB"', "less than a byte"),
    ],
)
def test_a_size_that_means_nothing_is_one_message_with_its_line(value, said, tmp_path, capsys):
    file = tiny_run(tmp_path, RUN_FILE.replace("steps = 3", f"steps = 3\nmemory_limit = {value}"))
    line = file.read_text().splitlines().index(f"memory_limit = {value}") + 1
    with pytest.raises(SystemExit) as end:
        main(["check", str(file)])
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert f"run.toml:{line}: train.memory_limit: " in err and said in err
    assert "Traceback" not in err


class Blind:
    """A source that knows no groups beforehand."""

    provides: ClassVar = frozenset({"pairs"})

    def open(self, context):
        return SimpleNamespace(steps_per_epoch=None, can_validate=False, provides=self.provides)


@frozen
class BlindSource(Blind):
    """Makes its groups as it goes."""


def test_a_source_that_knows_no_groups_cannot_be_measured(tmp_path):
    file = tiny_run(tmp_path)
    config = configure(
        file, 'train.memory_limit="1GB"', plugins=[plugin("source", "blind", BlindSource)], source="blind"
    )
    with pytest.raises(ConfigError) as refused:
        prepare(config, Notices())
    assert "--set: train.memory_limit: nothing can be measured, since the source 'blind'" in str(refused.value)

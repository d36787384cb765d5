"""The benchmarks' harness: what is selected, who is measured when, medians, ratios and tables, on tiny models."""

from __future__ import annotations

import inspect
import io
import json
import math
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from benchmarks import heads, peers, plots, slopes, steps
from benchmarks.__main__ import main
from benchmarks.flops import attended, count
from benchmarks.losses import plugins
from benchmarks.measurement import Contender, Journal, Measurement, Spread, interleaved, ratio, value
from benchmarks.pairs import Pair, read, select, write
from benchmarks.report import Report, Table
from benchmarks.settings import Settings
from tiny_llama import CONFIG, checkpoint
from tiny_run import write_lines, write_tokenizer

from mortice.batch import Completion, Group
from mortice.blas import Blas
from mortice.rows import separate_rows, shared_row


def pair(id: str, prompt: int, chosen: int, rejected: int) -> Group:
    completions = [Completion([2] * chosen), Completion([3] * rejected)]
    return Group(id, [1] * prompt, completions, ((0, 1),))


def echo(name: str, **values) -> Contender:
    """A contender whose process finds the values it is given."""
    return Contender(name, "builtins:dict", values)


def measured(contender: str, repeat: int, **values) -> Measurement:
    return Measurement("s", {"V": 1}, contender, "", repeat, values)


def test_pairs_are_selected_by_the_longer_answer_among_prompts_in_range():
    groups = [
        pair("long-answer", 600, 300, 20), pair("short-prompt", 499, 100, 100), pair("near", 500, 20, 110),
        pair("nearest", 1000, 95, 10), pair("long-prompt", 1001, 100, 100), pair("near-too", 700, 90, 90),
    ]  # fmt: skip
    assert [p.id for p in select(groups, 3)] == ["nearest", "near", "near-too"]
    with pytest.raises(ValueError, match="5 pairs asked for, 4 have prompts of 500 to 1000 tokens"):
        select(groups, 5)


def test_groups_without_a_pair_or_with_two_prompts_are_not_selected():
    other = Group("x", [1] * 600, [Completion([2]), Completion([3], prompt_ids=[1] * 601)], ((0, 1),))
    assert [p.id for p in select([Group("sft", [1] * 600, [Completion([2])]), other, pair("y", 600, 5, 5)], 1)] == ["y"]


def test_both_sides_read_the_same_ids(tmp_path):
    written = Pair("a", [1, 2], [3] * 90, [4] * 120)
    write([written], tmp_path / "pairs.json")
    assert read(tmp_path / "pairs.json") == [written]
    assert json.loads((tmp_path / "pairs.json").read_text())[0]["answer"] == [3] * 90
    assert [c.ids for c in written.group("sft").completions] == [(3,) * 90]
    assert written.group("dpo").pairs == ((0, 1),)


def test_rounds_go_through_all_contenders_in_fresh_processes(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    said: list[str] = []
    found = interleaved("s", {"V": 1}, [echo("a", seconds=2.0), echo("b", seconds=4.0)], 2, journal, said.append)
    assert [(m.contender, m.repeat, m.values["seconds"]) for m in found] == [
        ("a", 0, 2.0), ("b", 0, 4.0), ("a", 1, 2.0), ("b", 1, 4.0),
    ]  # fmt: skip
    assert [line.rpartition(":")[0] for line in said[:2]] == ["s: V 1: a, round 1 of 2", "s: V 1: b, round 1 of 2"]
    assert Journal(tmp_path / "journal.jsonl", resume=True).found == found


def test_a_failure_is_kept_and_said(tmp_path):
    said: list[str] = []
    journal = Journal(tmp_path / "journal.jsonl")
    found = interleaved("s", {}, [Contender("a", "builtins:int", {"wrong": 1})], 1, journal, said.append)
    assert "TypeError" in found[0].failed and "FAILED: TypeError" in said[0]
    assert value(found, "a", "seconds") is None
    report = Report("s", "T", "w", {}, [Table("t", [{"s": value(found, "a", "seconds")}])], measurements=found)
    assert "- a () failed: TypeError" in report.markdown()


def test_resuming_keeps_whole_rounds_of_the_same_measurement_only(tmp_path, monkeypatch):
    file = tmp_path / "journal.jsonl"
    calls: list[str] = []
    monkeypatch.setattr(Contender, "measure", lambda self: calls.append(self.name) or {"seconds": 1.0})
    sides = [echo("a", size=1), echo("b", size=1)]
    interleaved("s", {}, sides, 2, Journal(file))
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:3]) + "\n")  # the second round was cut short
    calls.clear()
    interleaved("s", {}, sides, 2, Journal(file, resume=True))
    assert calls == ["a", "b"]
    calls.clear()
    interleaved("s", {}, [sides[0], echo("b", size=2)], 1, Journal(file, resume=True))
    assert calls == ["a", "b"]
    calls.clear()
    interleaved("s", {}, sides, 1, Journal(file))
    assert calls == ["a", "b"]


def test_ratios_are_taken_round_by_round():
    found = [
        measured("a", 0, s=2.0), measured("b", 0, s=1.0), measured("a", 1, s=9.0), measured("b", 1, s=3.0),
        measured("a", 2, s=20.0), measured("b", 2, s=4.0), measured("a", 3, s=1.0), measured("b", 3, failed="killed"),
    ]  # fmt: skip
    assert ratio(found, "a", "b", "s") == Spread(3.0, 2.0, 5.0)  # of 2, 3 and 5; not 5.5 / 3
    assert value(found, "a", "s") == 5.5
    assert ratio(found, "a", "c", "s") is None
    found = [measured("a", 0, reached=3.0, sgemm=4.0)]
    assert ratio(found, "a", "a", "reached", to_name="sgemm") == Spread(0.75, 0.75, 0.75)


def test_a_table_as_markdown():
    table = Table(
        "T", [{"side": "a", "MiB": 1234.56, "x": Spread(3.14159, 3.0, 12.34)}, {"side": "b", "MiB": 7, "x": None}]
    )
    assert table.markdown().splitlines() == [
        "### T",
        "",
        "| side | MiB | x |",
        "|---|---:|---:|",
        "| a | 1,235 | **3.14** (3.00 to 12.3) |",
        "| b | 7 | – |",
    ]


def test_products_of_a_step_by_hand():
    found = count(
        tokens=10,
        pairs=55,
        scored=4,
        linear=[(8, 2, 16)],
        layers=3,
        width=8,
        output=(32, 8),
        forwards=2,
        attention_forwards=2,
    )
    assert found.linear == 3 * 2 * 10 * 8 * 16  # forward twice, dx
    assert found.lora == 2 * (2 * 10 * (8 * 2 + 2 * 16)) + 2 * 2 * 10 * 2 * (8 + 16)  # forward twice; dA, dB, dlow, dx
    assert found.attention == 3 * 9 * 2 * 55 * 8  # scores and values twice, scores again, four products backward
    assert found.head == 2 * 2 * 4 * 32 * 8
    assert found.total == found.linear + found.lora + found.attention + found.head


def test_attended_pairs_of_queries_and_keys():
    group = Group("g", [1, 2, 3], [Completion([4, 5, 6]), Completion([7, 8])], ((0, 1),))
    assert attended(shared_row(group, 0, prompt_targets=False)) == (1 + 2 + 3) + (4 + 5) + 4
    chosen, rejected = separate_rows(group, 0, prompt_targets=False)
    assert (attended(chosen), attended(rejected)) == (1 + 2 + 3 + 4 + 5, 1 + 2 + 3 + 4)


def test_slopes_are_those_of_the_least_squares_line():
    assert slopes.slope([(1, 5.0), (2, 7.0), (3, 9.0)]) == pytest.approx(2.0)
    assert slopes.slope([(0, 0.0), (1, 1.0), (2, 0.0)]) == pytest.approx(0.0)
    rows = [{"tokens": t, "backward": "b", "peak MiB": 3 + t / 10} for t in (100, 200, 400)]
    assert slopes._slopes("tokens", rows) == [{"backward": "b", "MiB for each 1,000 tokens": pytest.approx(100.0)}]


def test_a_peer_gets_what_it_takes(tmp_path):
    settings = Settings(
        tmp_path, Journal(tmp_path / "j"), plugins(), Blas("openblas", "/lib/openblas.so"), 1, model=tmp_path,
        peers="python3",
    )  # fmt: skip
    for objective, name in steps.PEERS.items():
        (contender,) = steps.peers(settings, objective, "pairs.json")
        assert (contender.name, contender.python) == (name, "python3")
        bound = inspect.signature(peers.measure).bind(**contender.arguments).arguments
        assert bound["blas"] == "/lib/openblas.so"
        assert {key: bound[key] for key in steps.RECIPE} == steps.RECIPE


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = checkpoint(tmp_path_factory.mktemp("bench") / "model", vocab_size=272)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def steps_run(model, tmp_path_factory):
    """What `python -m benchmarks --only steps rate --quick` leaves, and what it says."""
    folder = tmp_path_factory.mktemp("run")
    write_lines(folder / "pairs.jsonl", [{"prompt": "p" * 150, "chosen": "c" * 50, "rejected": "r" * 99}])
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(io.StringIO()):
        code = main(
            ["--only", "steps", "rate", "--quick", "--model", str(model), "--pairs", str(folder / "pairs.jsonl"),
             "--out", str(folder / "out")]
        )  # fmt: skip
    assert code == 0
    return folder / "out", said.getvalue()


@pytest.mark.slow
def test_one_command_writes_tables_and_says_what_it_left_out(steps_run):
    out, said = steps_run
    assert "steps: objective orpo: mortice, segmented, round 1 of 1:" in said
    results = (out / "results.md").read_text()
    assert "The peers' rows are left out: no --peers PYTHON was given." in results
    assert results.index("## A step on real pairs") < results.index("## How much of the machine a step uses")
    found = json.loads((out / "steps.json").read_text())
    assert found["tables"][0]["rows"] == [
        {"pair": "pairs.jsonl:1", "prompt": 150, "chosen": 51, "rejected": 100, "learned by sft": 100}
    ]
    rows = {(row["objective"], row["side"]): row for row in found["tables"][1]["rows"]}
    backwards = plugins().registry.names("backward")
    backwards = [*backwards, "segmented, everything kept"]
    assert set(rows) == {(objective, f"mortice, {b}") for objective in ("orpo", "dpo", "sft") for b in backwards}
    assert rows["orpo", "mortice, full"]["tokens scored"] == 151
    assert rows["orpo", "mortice, full"]["time, peer / it"] is None
    assert found["machine"]["mlx"] and found["machine"]["processor"]
    (rate, *_) = json.loads((out / "rate.json").read_text())["tables"][0]["rows"]
    assert rate["fraction of sgemm"]["median"] == pytest.approx(rate["GFLOP/s"] / rate["sgemm GFLOP/s"])
    assert rate["GFLOP/s"] == pytest.approx(rate["GFLOP a step"] / rate["s a step"])


@pytest.mark.slow
def test_every_objective_trains_the_same_with_every_backward(steps_run, model):
    lines = map(json.loads, (steps_run[0] / "steps.jsonl").read_text().splitlines())
    found = {(line["cell"]["objective"], line["contender"]): line["values"] for line in lines}
    for (objective, _), values in found.items():
        assert values["losses"] == pytest.approx(found[objective, "mortice, full"]["losses"], abs=1e-4)
        assert values["losses"][1] < values["losses"][0]
        assert values["peak"] == max(values["peak_mlx"], values["peak_resident"])
        assert values["above"] == values["peak"] - values["weights"] > 0
    full, segmented = found["orpo", "mortice, full"], found["orpo", "mortice, segmented"]
    assert found["dpo", "mortice, full"]["losses"][0] == pytest.approx(math.log(2), abs=1e-5)  # no adapter yet
    assert full["weights"] == (model / "model.safetensors").stat().st_size - _header(model / "model.safetensors")
    assert segmented["flops"] > full["flops"] > 0


def _header(file) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def test_a_group_trains_the_same_in_every_layout(model):
    common = {
        "model": str(model), "prompt": 20, "completions": 3, "length": 5, "backward": "segmented",
        "recipe": {"steps": 1, "learning_rate": 1e-2},
    }  # fmt: skip
    separate, shared = (
        Contender("x", "benchmarks.training:group_step", common | {"layout": layout}).measure()
        for layout in ("separate", "prefix-shared")
    )
    assert separate["losses"] == pytest.approx(shared["losses"], abs=1e-5)
    assert separate["losses"][0] != separate["losses"][1]
    assert separate["flops"] > shared["flops"]


@pytest.mark.slow
def test_a_random_model_and_every_head_are_measured():
    arguments = {"config": CONFIG, "prompt": 20, "length": 4, "backward": "segmented", "recipe": {}}
    step = Contender("x", "benchmarks.training:random_step", arguments).measure()
    assert step["losses"][0] == pytest.approx(math.log(CONFIG["vocab_size"]), rel=0.5)
    for name in ("dense", "flash-cce"):
        found = heads.score(name, 300, 20_000, 32, 10**9)
        assert found["seconds"] > 0
        logits = 300 * 20_000 * 4
        assert (found["peak"] > logits) == (name == "dense")
    for library in heads.LIBRARIES:
        found = heads.products(library, 3000, 9000, 32)
        assert found["seconds"] > 0 and found["tile"][0] < 3000


def test_a_mistake_in_the_data_is_one_message(model, tmp_path, capsys):
    write_lines(tmp_path / "pairs.jsonl", [{"prompt": "short", "chosen": "a", "rejected": "b"}])
    arguments = ["--model", str(model), "--pairs", str(tmp_path / "pairs.jsonl"), "--out", str(tmp_path / "out")]
    assert main(["--only", "steps", "--quick", *arguments]) == 2
    assert "1 pairs asked for, 0 have prompts of 100 to 200 tokens" in capsys.readouterr().err


def test_without_matplotlib_the_tables_are_written_and_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--only", "groups", "--quick", "--out", str(tmp_path)]) == 0
    assert "No picture: matplotlib is not installed" in (tmp_path / "results.md").read_text()
    assert not (tmp_path / "groups.svg").exists()


def test_pictures_of_rows(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"M": 64, "V": v, "head": h, "peak MiB": 1.0 * v, "s": None} for v in (1, 2) for h in ("dense", "b")
    ]  # times failed
    report = Report("heads", "T", "w", {}, [Table("Heads", rows)], measurements=[measured("a", 0, s=1.0)])
    plots.draw(report, tmp_path)
    assert report.plots == ["heads.svg"] and "![T](heads.svg)" in report.markdown()
    assert (tmp_path / "heads.svg").read_text().startswith("<?xml")


def test_sections_that_need_a_model_say_so(tmp_path, capsys):
    assert main(["--only", "groups", "--quick", "--out", str(tmp_path)]) == 0
    assert "Left out: it needs --model." in capsys.readouterr().out


def test_answers_at_once_are_measured(model, tmp_path):
    """Without the peer: every answer has its full length, and the output says what is left out."""
    assert main(["--only", "rollouts", "--quick", "--model", str(model), "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "rollouts.json").read_text())
    assert [m["values"]["sampled"] for m in found["measurements"]] == [16, 32]
    assert any("no --peers" in note for note in found["notes"])

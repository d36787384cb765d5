"""`mortice eval` and `mortice task`: answers graded, kept and found again; perplexity and preference accuracy."""

from __future__ import annotations

import json
import math

import pytest
from attrs import frozen
from tiny_run import configure, tiny_run, write_lines

from mortice.batch import Completion, Group
from mortice.cli import main
from mortice.errors import DataError
from mortice.evaluation import Graded, Measure, Problem, differences, grade, perplexity, preference, summary
from mortice.launch import train
from mortice_plugins.tasks.sequences import Copy

COPY = '{name = "copy", length = 2}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that has learned a little, and its adapter."""
    folder = tmp_path_factory.mktemp("eval")
    train(configure(tiny_run(folder), "train.steps=2", f"run.path={folder / 'run'}"))
    return folder


def call(*arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return ended.value.code or 0, shown.out, shown.err


def measured(folder, *more, capsys, name="out.json"):
    code, out, err = call("eval", folder / "model", folder / name, "--max-tokens", 4, "--json", *more, capsys=capsys)
    assert code == 0, err
    return json.loads(out)["results"]


def test_a_measure_is_a_mean_with_its_interval():
    found = Measure.of([0.0, 1.0, 1.0, 1.0])
    assert found.mean == 0.75 and found.margin == pytest.approx(1.96 * math.sqrt(0.25 / 4)) and found.count == 4
    assert str(found) == "0.7500 ± 0.4900" and str(Measure.of([1.0])) == "1.0000"


def test_tasks_are_graded_and_answers_kept(folder, capsys):
    found = measured(folder, "--task", COPY, "--task", "sort", "--limit", 5, capsys=capsys)
    assert found["copy"]["problems"] == 5 and set(found["copy"]) >= {
        "format",
        "correct",
        "share",
        "tokens",
        "truncated",
    }
    lines = [json.loads(line) for line in (folder / "out.answers.jsonl").read_text().splitlines()]
    assert len(lines) == 11 and lines[1].keys() >= {"key", "task", "text", "scores", "finish_reason"}
    again = measured(folder, "--task", COPY, "--task", "sort", "--limit", 5, capsys=capsys)
    assert again == found
    assert len((folder / "out.answers.jsonl").read_text().splitlines()) == 11  # nothing was asked twice


def test_an_evaluation_that_was_killed_goes_on(folder, capsys):
    whole = measured(folder, "--task", COPY, "--limit", 6, capsys=capsys, name="whole.json")
    lines = (folder / "whole.answers.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "cut.answers.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:20])
    assert measured(folder, "--task", COPY, "--limit", 6, capsys=capsys, name="cut.json") == whole
    kept = (folder / "cut.answers.jsonl").read_bytes().splitlines(keepends=True)
    assert kept[:4] == lines[:4] and sorted(kept) == sorted(lines)


def test_answers_that_were_made_otherwise_are_refused(folder, capsys):
    measured(folder, "--task", COPY, "--limit", 2, capsys=capsys, name="other.json")
    code, _, err = call(
        "eval", folder / "model", folder / "other.json", "--task", COPY, "--max-tokens", 5, capsys=capsys
    )  # fmt: skip
    assert code == 2 and "holds answers that were made otherwise (sampling was" in err


def test_before_and_after(folder, capsys):
    measured(folder, "--task", COPY, "--limit", 4, capsys=capsys, name="before.json")
    more = "--adapter", folder / "run" / "adapter", "--against", folder / "before.json"
    found = measured(folder, "--task", COPY, "--limit", 4, *more, capsys=capsys, name="after.json")
    change = found["copy − before"]
    assert change["problems"] == 4 and change["share"].keys() == {"mean", "margin", "count"}


def test_differences_are_paired():
    before = {k: Graded("", 1, "stop", {"correct": float(v)}) for k, v in zip("abc", (0, 1, 0))}
    after = {k: Graded("", 1, "stop", {"correct": float(v)}) for k, v in zip("bcd", (1, 1, 1))}
    assert differences(before, after)["correct"].mean == 0.5


def test_engines_and_sampling(folder, capsys):
    greedy = measured(folder, "--task", COPY, "--limit", 3, capsys=capsys, name="kv.json")
    plain = measured(folder, "--task", COPY, "--limit", 3, "--rollout", "sequential", capsys=capsys, name="seq.json")
    assert greedy == plain
    texts = []
    for seed in (0, 0, 1):
        (folder / "t.answers.jsonl").unlink(missing_ok=True)
        measured(folder, "--task", COPY, "--limit", 3, "--temperature", 1, "--seed", seed, capsys=capsys, name="t.json")
        texts.append([json.loads(line).get("text") for line in (folder / "t.answers.jsonl").read_text().splitlines()])
    assert sorted(map(str, texts[0])) == sorted(map(str, texts[1])) != sorted(map(str, texts[2]))


def test_perplexity_and_preference(folder, capsys):
    write_lines(folder / "texts.jsonl", [{"text": "red and green"}, {"text": "blue"}])
    found = measured(
        folder, "--perplexity", folder / "texts.jsonl", "--preference", folder / "valid.jsonl", capsys=capsys
    )  # fmt: skip
    assert found["perplexity"]["rows"] == 2
    assert found["perplexity"]["perplexity"] == pytest.approx(math.exp(found["perplexity"]["nll"]))
    assert set(found["preference"]) == {"accuracy_sum", "accuracy_mean", "margin_sum", "margin_mean"}
    assert found["preference"]["accuracy_sum"]["count"] == 3


def test_numbers_by_hand():
    group = Group("a", [1], [Completion([1, 2]), Completion([1])], ((0, 1),))
    logprobs = [[[-1.0, -1.0], [-1.5]]]
    assert perplexity([group], logprobs) == {"perplexity": math.exp(3.5 / 3), "nll": 3.5 / 3, "tokens": 3, "rows": 1}
    found = preference([group], logprobs)
    assert found["accuracy_sum"].mean == 0.0 and found["accuracy_mean"].mean == 1.0
    assert found["margin_sum"].mean == -0.5 and found["margin_mean"].mean == 0.5
    assert preference([group], [[[-1.0, -0.5], [-1.5]]])["accuracy_sum"].mean == 0.5  # a tie
    with pytest.raises(DataError, match="no pairs"):
        preference([Group("a", [1], [Completion([1])])], [[[-1.0]]])


def test_a_task_may_say_what_its_scores_are_means_of():
    @frozen
    class Halves(Copy):
        def summary(self, scores):
            return {"halves": [x["share"] / 2 for x in scores]}

    graded = [Graded("", 3, "length", {"share": 1.0}), Graded("", 5, "stop", {"share": 0.0})]
    found = summary(Halves(), graded)
    assert found["halves"].mean == 0.25 and found["tokens"].mean == 4 and found["truncated"].mean == 0.5


def test_a_checker_that_fails_names_the_problem():
    @frozen
    class Broken(Copy):
        def check(self, completion, problem):
            raise KeyError("x")

    with pytest.raises(DataError, match="task broken, problem 7: KeyError: 'x'"):
        grade(Completion([1], text="a"), Problem("broken", 7, {}, (1,)), Broken())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say what to measure"),
        (("--task", "arithmetik"), "arithmetic"),
        (("--task", "copy", "--max-tokens", "0"), "--max-tokens 0 is out of range"),
        (("--task", "copy", "--split", "valid"), "no split 'valid'"),
        (("--task", "copy", "--against", "none.json"), "no such file"),
        (("--task", '{name = "gsm8k"}'), "file"),
    ],
)
def test_mistakes(folder, capsys, arguments, message):
    code, _, err = call("eval", folder / "model", *arguments, capsys=capsys)
    assert code == 2 and message in err and "Traceback" not in err


def test_problems_as_a_data_file(tmp_path, capsys):
    code, out, _ = call("task", '{name = "sort", length = 2}', tmp_path / "s.jsonl", "--count", 12, capsys=capsys)
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert code == 0 and len(rows) == 12 and "12 problems" in out
    assert all(row["completion"] == f" {row['answer']}" for row in rows)
    code, _, err = call("task", "copy", tmp_path / "t.jsonl", "--split", "test", "--count", 5000, capsys=capsys)
    assert code == 0 and "the split 'test' has" in err
    code, _, err = call("task", "copy", tmp_path / "t.jsonl", "--count", 5000, capsys=capsys)
    assert code == 2 and "has no more than" in err

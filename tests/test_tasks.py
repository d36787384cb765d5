"""Tasks: generators without leaks, checkers that score form and correctness apart; rewards that go by them."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from mortice.config import build_strategy
from mortice.errors import ConfigError, DataError
from mortice.plugins import load_plugins
from mortice.rewards import named, rewarded
from mortice_plugins.rewards.gsm8k import GSM8K as GSM8KReward
from mortice_plugins.rewards.python import PythonReward
from mortice_plugins.rewards.task import TaskReward
from mortice_plugins.tasks.arithmetic import Arithmetic
from mortice_plugins.tasks.gsm8k import GSM8K
from mortice_plugins.tasks.sequences import Copy, Sort

GENERATED = {
    "arithmetic": Arithmetic(digits=1, operations="+-*"),
    "boxed": Arithmetic(digits=1, form="boxed"),
    "copy": Copy(length=2),
    "sort": Sort(length=3),
}


@pytest.mark.parametrize("task", GENERATED.values(), ids=GENERATED)
class TestGenerated:
    def test_no_problem_is_in_both_splits(self, task):
        """Of a space that is walked whole, whatever the seeds; nor one with the same answer for the same reason."""
        train = {
            p["prompt"] for p in islice(task.problems("train", 1), sum(not task.held_out(i) for i in range(task.size)))
        }
        test = [p["prompt"] for p in task.problems("test", 2)]
        assert len(set(test)) == len(test) and train.isdisjoint(test)
        assert len(train) + len(test) == task.size
        assert 0.03 * task.size < len(test) < 0.25 * task.size

    def test_order_is_the_seeds(self, task):
        one, again, other = ([p["prompt"] for p in islice(task.problems("train", s), 20)] for s in (1, 1, 2))
        assert one == again != other

    def test_the_space_ends_with_a_message(self, task):
        with pytest.raises(ConfigError, match=r"has no more than \d+ train problems .* task.repeat = true"):
            list(task.problems("train", 0))
        with pytest.raises(ConfigError, match="no split 'valid'"):
            next(task.problems("valid", 0))

    def test_the_right_answer_is_right(self, task):
        for problem in islice(task.problems("test", 0), 20):
            assert task.check(task.completion(problem), problem)["correct"] == 1.0
            assert task.check(task.completion(problem), problem)["format"] == 1.0
            assert task.check("", problem)["correct"] == task.check("", problem)["format"] == 0.0


def test_it_may_begin_anew():
    task = Copy(length=1, repeat=True)
    once = sum(not task.held_out(i) for i in range(10))
    found = [p["prompt"] for p in islice(task.problems("train", 0), 3 * once)]
    assert [set(found[i * once : (i + 1) * once]) for i in range(3)] == [set(found[:once])] * 3
    assert found[:once] != found[once : 2 * once]


def test_large_spaces_are_drawn_from_without_repeats():
    task = Arithmetic(digits=6)
    found = [p["prompt"] for p in islice(task.problems("train", 0), 2000)]
    assert len(set(found)) == 2000


def test_other_orders_of_a_sum_are_the_same_problem():
    task = Arithmetic(digits=1, operations="+-")
    split = {task.problem(i)["prompt"]: task.held_out(i) for i in range(task.size)}
    assert all(split[f"{a} + {b} ="] == split[f"{b} + {a} ="] for a in range(10) for b in range(10))
    assert any(split[f"{a} - {b} ="] != split[f"{b} - {a} ="] for a in range(10) for b in range(10))
    digits = Sort(length=3)
    split = {digits.problem(i)["prompt"]: digits.held_out(i) for i in range(digits.size)}
    assert split["sort 3 1 2:"] == split["sort 2 3 1:"]


def test_form_and_correctness_are_apart():
    plain, boxed = Arithmetic(), Arithmetic(form="boxed")
    problem = {"prompt": "12 + 7 =", "answer": "19"}
    assert plain.check(" 19", problem) == {"format": 1, "correct": 1}
    assert plain.check("It is 19", problem) == {"format": 0, "correct": 1}
    assert plain.check("18", problem) == {"format": 1, "correct": 0}
    assert plain.check("-19", problem) == {"format": 1, "correct": 0}
    assert boxed.check(r"So \boxed{19}.", problem) == {"format": 1, "correct": 1}
    assert boxed.check("19", problem) == {"format": 0, "correct": 1}
    assert boxed.check(r"19, no: \boxed{20}", problem) == {"format": 1, "correct": 0}
    assert Copy().check("3 1", {"answer": "3 1 4"}) == {"format": 0, "correct": 0, "share": pytest.approx(2 / 3)}
    assert Copy().check("3 1 5", {"answer": "3 1 4"}) == {"format": 1, "correct": 0, "share": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"operations": "+/"}, 'operations must be some of'), ({"digits": 0}, "digits"), ({"prompt": "{a}?"}, "must hold"),
     ({"form": "long"}, "plain")],
)  # fmt: skip
def test_options_of_arithmetic(options, message):
    with pytest.raises(ConfigError, match=message):
        build_strategy(load_plugins(), "task", {"name": "arithmetic", **options})


def test_difficulty():
    easy, hard = (next(iter(Arithmetic(digits=d, operations="*").problems("train", 3))) for d in (1, 8))
    assert len(hard["prompt"]) > len(easy["prompt"])
    assert next(Arithmetic(prompt="{a}{operation}{b}?").problems("train", 0))["prompt"].endswith("?")


@pytest.mark.parametrize(
    ("text", "right"),
    [("so #### 1,234", 1), ("#### $1234.00", 1), ("#### 1234 apples", 1), ("####1234.", 1), ("it is 1234", 0),
     ("#### 12", 0), ("#### 5\n#### 1234", 1), ("#### none", 0), ("#### -1234", 0), ("", 0)],
)  # fmt: skip
def test_gsm8k_answers(text, right):
    record = {"answer": "He has 2*617.\n#### 1,234"}
    assert GSM8KReward()(text, record) == right
    assert GSM8KReward()(text, {"answer": 1234}) == right


def test_gsm8k_anywhere():
    record = {"answer": "#### -5"}
    assert GSM8KReward(anywhere=True)("first 3, then -5 apples.", record) == 1
    assert GSM8KReward(anywhere=True)("-5, so #### 3", record) == 0
    with pytest.raises(DataError, match="no 'answer', found 'question'"):
        GSM8KReward()("x", {"question": "?"})
    with pytest.raises(DataError, match="holds no number"):
        GSM8KReward()("x", {"answer": "#### many"})


def test_gsm8k_as_published(shared):
    task = GSM8K(file=shared / "data" / "gsm8k.jsonl")
    problems = list(task.problems("test", 0))
    assert len(problems) == 900 and problems[0]["prompt"].startswith("Janet")
    assert all(task.check(task.completion(p), p) == {"format": 1, "correct": 1, "strict": 1} for p in problems)
    assert task.check("The answer is 18", problems[0]) == {"format": 0, "correct": 1, "strict": 0}


def test_rows_that_are_no_problems_are_named(tmp_path):
    (tmp_path / "f.jsonl").write_text(json.dumps({"question": "a", "answer": "#### 1"}) + '\n{"question": "b"}\n')
    with pytest.raises(DataError, match=r"f\.jsonl:2: no 'answer'"):
        list(GSM8K(file=tmp_path / "f.jsonl").problems("test", 0))


def test_a_reward_from_the_runs_task():
    problem = {"prompt": "", "answer": "19"}
    reward = TaskReward().bound(Arithmetic())
    assert reward("19", problem) == 1.0 and reward("18", problem) == 0.0
    assert TaskReward(score="format").bound(Arithmetic())("18", problem) == 1.0
    with pytest.raises(DataError, match=r"goes by the checker of a \[task\]"):
        TaskReward()("19", problem)
    with pytest.raises(DataError, match=r"no score 'share' \(it gives format, correct\)"):
        TaskReward(score="share").bound(Arithmetic())("19", problem)


def test_a_function_of_the_users(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def length(text, record):\n    return len(text) / record['most']\n\nvalue = 3\n")
    assert PythonReward(function="length", file=file)("abc", {"most": 6}) == 0.5
    assert PythonReward(function="operator:contains")("abc", "b") is True
    for options, message in (
        ({"function": "width", "file": file}, "has no function 'width'"),
        ({"function": "value", "file": file}, "has no function 'value'"),
        ({"function": "f", "file": tmp_path / "none.py"}, "no file"),
        ({"function": "no_such_module:f"}, "ModuleNotFoundError"),
    ):
        with pytest.raises(ConfigError, match=message):
            PythonReward(**options)("a", {})
    for options in (
        {"function": "nothing"},
        {"function": "a:b", "file": str(file)},
        {"function": "a b", "file": str(file)},
    ):
        with pytest.raises(ConfigError, match="function must be"):
            build_strategy(load_plugins(), "reward", {"name": "python", **options})


def test_what_the_users_function_raises_names_row_and_reward(tmp_path):
    (tmp_path / "bad.py").write_text("def f(text, record):\n    raise KeyError('x')\n")
    rewards = named([("python", PythonReward(function="f", file=tmp_path / "bad.py"))])
    with pytest.raises(DataError, match="row 3: reward python raised KeyError: 'x'"):
        rewarded(rewards, "a", {}, "row 3")
    failed = []
    assert rewarded(rewards, "a", {}, "row 3", lambda name, error: failed.append(name)).total == 0.0
    assert failed == ["python"]

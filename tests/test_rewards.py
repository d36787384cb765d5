"""Rewards: what they give, and what is said of a record or an answer that they cannot score."""

from __future__ import annotations

import pytest
from attrs import frozen

from mortice.config import build_strategy
from mortice.errors import CheckpointError, ConfigError, DataError
from mortice.plugins import load_plugins
from mortice.rewards import full_marks, named, rewarded
from mortice_plugins.rewards.boxed import Boxed, last_boxed, number
from mortice_plugins.rewards.length import Length
from mortice_plugins.rewards.regex import Regex

BOX = "so it is \\boxed{%s}."


def test_regex_matches_somewhere_or_the_whole():
    assert [Regex(pattern=r"\d+")(text, {}) for text in ("a 12", "a")] == [1, 0]
    assert [Regex(pattern=r"\d+", whole=True)(text, {}) for text in ("a 12", "12")] == [0, 1]
    with pytest.raises(ConfigError, match="pattern: is no regular expression: "):
        build_strategy(load_plugins(), "reward", {"name": "regex", "pattern": "("})


def test_length_within_bounds():
    assert [Length(min=2, max=3)(text, {}) for text in ("a", "a b", "a b  c", "a b c d")] == [0, 1, 1, 0]
    assert [Length(max=3, unit="characters")(text, {}) for text in ("abc", "abcd")] == [1, 0]
    for bad in ({}, {"min": 3, "max": 2}):
        with pytest.raises(ValueError, match=r"give min or max|min 3 is above max 2"):
            Length(**bad)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a \\boxed{1} b \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}} end", "\\frac{1}{2}"),
        ("\\boxed {x}", "x"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("boxed{1}", None),
        ("", None),
    ],
)
def test_the_last_box_that_is_closed(text, found):
    assert last_boxed(text) == found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.50", 1234.5), ("$3", 3), ("\\$3", 3), ("50\\%", 50), (" -7 ", -7), ("+2.", 2), (".5", 0.5),
        ("1/2", 0.5), ("-\\frac{1}{2}", -0.5), ("\\dfrac{3}{4}", 0.75), ("1/0", None), ("x", None), ("", None),
        ("1e3", None), ("2 apples", None), ("1/2/3", None),
    ],
)  # fmt: skip
def test_numbers_as_people_write_them(text, value):
    assert number(text) == value


def test_boxed_numbers_are_compared_exactly_however_written():
    right = Boxed()
    for text in ("1,234.50", "1234.5", "2469/2", "\\frac{2469}{2}"):
        assert right(BOX % text, {"answer": 1234.5}) == 1
        assert right(BOX % text, {"answer": "1,234.5"}) == 1
    assert right(BOX % "1234.51", {"answer": 1234.5}) == 0
    assert right("1234.5", {"answer": 1234.5}) == 0
    assert right(BOX % "many", {"answer": 3}) == 0


def test_boxed_texts_are_compared_exactly():
    exact = Boxed(key="want", compare="exact")
    assert [exact(BOX % text, {"want": "x+1"}) for text in (" x+1 ", "1+x", "x + 1")] == [1, 0, 0]
    assert exact(BOX % "0.50", {"want": "0.5"}) == 0


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        ({"q": 1}, "no 'answer', found 'q'"),
        ({"answer": None}, "'answer' must be a string or a number, found None"),
        ({"answer": True}, "'answer' must be a string or a number, found True"),
        ({"answer": "x+1"}, "'answer' is no number: 'x\\+1'; compare = \"exact\""),
    ],
)
def test_a_record_without_a_right_answer_is_named(record, wrong):
    with pytest.raises(DataError, match=f"^f:3: reward boxed: {wrong}"):
        rewarded(named([("boxed", Boxed())]), "\\boxed{1}", record, "f:3")


@frozen
class Odd:
    value: object
    weight: float = 1.0

    def __call__(self, completion, record, /):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def test_rewards_add_up_by_weight_and_keep_their_own_names():
    rewards = named([("odd", Odd(1.0)), ("odd", Odd(0.5, 2.0)), ("len", Odd(3.0, -1.0))])
    found = rewarded(rewards, "x", {}, "f:1")
    assert found.values == {"odd": 1.0, "odd-2": 0.5, "len": 3.0}
    assert found.total == 1 + 1 - 3
    assert full_marks(rewards) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1"])
def test_a_reward_that_is_no_number_names_row_and_reward(value):
    with pytest.raises(DataError, match=f"^f:2: reward odd gave {value!r}, which is no finite number"):
        rewarded(named([("odd", Odd(value))]), "x", {}, "f:2")


def test_a_reward_that_raises_names_row_and_reward():
    with pytest.raises(DataError, match=r"^f:2: reward odd raised ZeroDivisionError: by zero") as error:
        rewarded(named([("odd", Odd(ZeroDivisionError("by zero")))]), "x", {}, "f:2")
    assert isinstance(error.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("error", [ConfigError("no reward head"), CheckpointError("not found")])
def test_a_reward_that_cannot_be_had_is_no_matter_of_a_row(error):
    with pytest.raises(type(error), match=f"^{error}$"):
        rewarded(named([("odd", Odd(error))]), "x", {}, "f:2", failed=lambda name, reason: None)

"""A reward for answers in GSM8K's form: "#### " and a number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from attrs import frozen

from mortice.errors import DataError
from mortice.options import option
from mortice_plugins.rewards.boxed import number

_MARKED = re.compile(r"####\s*([^\n]*)")
_NUMBER = re.compile(r"[+-]?\s?\$?\s?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")


@frozen
class GSM8K:
    """1 where the number behind the last "####" of the answer is the right one, else 0.

    Commas, signs, currency and units do not matter: "#### $1,234.00", "#### -5 apples". The right answer is the
    record's, in the same form or alone.
    """

    key: str = option("answer", help="key of the right answer in the record")
    anywhere: bool = option(False, help='without "####", take the last number of the text')
    weight: float = option(1.0, help="weight among the rewards")

    def __call__(self, completion: str, record: Mapping[str, Any], /) -> float:
        """Raises DataError for a record without a right answer."""
        return float(scores(completion, right_answer(record, self.key), anywhere=self.anywhere))


def right_answer(record: Mapping[str, Any], key: str) -> Fraction:
    """The record's number. Raises DataError where it has none."""
    if key not in record:
        raise DataError(f"no {key!r}, found {', '.join(map(repr, record)) or 'no key at all'}")
    value = record[key]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise DataError(f"{key!r} must be a string or a number, found {value!r}")
    text = str(value)
    found = marked(text) if "####" in text else number(text)
    if found is None:
        raise DataError(f'{key!r} holds no number ("#### 42", or the number alone): {text[-60:]!r}')
    return found


def marked(text: str) -> Fraction | None:
    """The number behind the last "####", or None."""
    found = _MARKED.findall(text)
    return _first(found[-1]) if found else None


def scores(completion: str, right: Fraction, *, anywhere: bool) -> bool:
    """Whether the answer's number is the right one."""
    found = marked(completion)
    if found is None and anywhere:
        numbers = _NUMBER.findall(completion)
        found = _value(numbers[-1]) if numbers else None
    return found == right


def _first(text: str) -> Fraction | None:
    match = _NUMBER.search(text)
    return _value(match.group()) if match else None


def _value(text: str) -> Fraction | None:
    return number(text.replace(" ", ""))

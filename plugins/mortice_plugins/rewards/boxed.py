r"""A reward for the answer in the last \boxed{…}, as models write it that were trained on mathematics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from attrs import frozen

from mortice.errors import DataError
from mortice.options import in_, option

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(/\d+)?")
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")


@frozen
class Boxed:
    r"""1 where the last \boxed{…} of the answer holds what the record has under `key`, else 0.

    `compare = "numeric"`: both are the same number, exactly, however written (1,234.50, 1/2, \frac{1}{2}, $3, 50\%
    as 50); what is no number is never right. `"exact"`: the same text but for white space around it.
    """

    key: str = option("answer", help="key of the right answer in the record: a string or a number")
    compare: str = option("numeric", help='"numeric" or "exact"', validator=in_(("numeric", "exact")))
    weight: float = option(1.0, help="weight among the rewards")

    def __call__(self, completion: str, record: Mapping[str, Any], /) -> float:
        """Raises DataError for a record without a right answer."""
        if self.key not in record:
            raise DataError(f"no {self.key!r}, found {', '.join(map(repr, record))}")
        right = record[self.key]
        if isinstance(right, bool) or not isinstance(right, (str, int, float)):
            raise DataError(f"{self.key!r} must be a string or a number, found {right!r}")
        right = str(right)
        if self.compare == "numeric" and number(right) is None:
            raise DataError(f'{self.key!r} is no number: {right!r}; compare = "exact" compares texts')
        found = last_boxed(completion)
        if found is None:
            return 0.0
        if self.compare == "exact":
            return float(found.strip() == right.strip())
        return float(number(found) == number(right))


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{…} that is closed; braces inside it are balanced."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for stop in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[stop], 0)
            if depth == 0:
                return text[start:stop]
    return None


def number(text: str) -> Fraction | None:
    """The exact value of a number as people write it; None for anything else."""
    plain = re.sub(r"\\[,!;$%]|[\s$%,]", "", text)
    plain = _FRACTION.sub(r"\1\2/\3", plain)
    if not _NUMBER.fullmatch(plain):
        return None
    top, _, bottom = plain.partition("/")
    return None if bottom and int(bottom) == 0 else Fraction(top) / (int(bottom) if bottom else 1)

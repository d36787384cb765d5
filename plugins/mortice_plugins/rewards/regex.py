"""A reward for text that a pattern matches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from mortice.options import option


@frozen
class Regex:
    """1 where the pattern matches the answer, else 0."""

    pattern: str = option(help="regular expression, as Python reads it")
    whole: bool = option(False, help="it must match the whole answer, not somewhere in it")
    weight: float = option(1.0, help="weight among the rewards")

    @pattern.validator  # type: ignore[attr-defined]
    def _compiles(self, attribute: Any, value: str) -> None:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from error

    def __call__(self, completion: str, record: Mapping[str, Any], /) -> float:
        match = re.fullmatch if self.whole else re.search
        return float(match(self.pattern, completion) is not None)

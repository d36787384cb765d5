"""A reward for answers of a length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from mortice.options import ge, in_, option, optional


@frozen
class Length:
    """1 where the length of the answer is within bounds, both included, else 0."""

    min: int = option(0, help="least length", validator=ge(0))
    max: int | None = option(None, help="most length", validator=optional(ge(0)))
    unit: str = option(
        "words", help='"words" (between white space) or "characters"', validator=in_(("words", "characters"))
    )
    weight: float = option(1.0, help="weight among the rewards")

    def __attrs_post_init__(self) -> None:
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        if self.min == 0 and self.max is None:
            raise ValueError("give min or max: every answer has some length")

    def __call__(self, completion: str, record: Mapping[str, Any], /) -> float:
        length = len(completion.split()) if self.unit == "words" else len(completion)
        return float(self.min <= length and (self.max is None or length <= self.max))

"""A filter by length: rows that are dropped rather than cut."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from mortice.batch import Group
from mortice.options import ge, option, optional


@frozen
class Length:
    """Leaves out rows with a prompt or an answer outside bounds, in tokens, ends included. Of pairs, those alone.

    It looks at whole rows, before anything is cut to `max_length`.
    """

    min_answer: int | None = option(None, help="least tokens of an answer", validator=optional(ge(1)))
    max_answer: int | None = option(None, help="most tokens of an answer", validator=optional(ge(1)))
    max_prompt: int | None = option(None, help="most tokens of a prompt", validator=optional(ge(1)))
    max_total: int | None = option(None, help="most tokens of a prompt and an answer", validator=optional(ge(2)))

    def __attrs_post_init__(self) -> None:
        if all(bound is None for bound in (self.min_answer, self.max_answer, self.max_prompt, self.max_total)):
            raise ValueError("give at least one bound: min_answer, max_answer, max_prompt or max_total")
        if self.min_answer and self.max_answer and self.min_answer > self.max_answer:
            raise ValueError(f"min_answer {self.min_answer} is above max_answer {self.max_answer}")

    @property
    def reason(self) -> str:
        bounds = {
            "answer shorter than": self.min_answer,
            "answer longer than": self.max_answer,
            "prompt longer than": self.max_prompt,
            "prompt and answer longer than": self.max_total,
        }
        return " or ".join(f"{text} {bound}" for text, bound in bounds.items() if bound is not None) + " tokens"

    def __call__(self, groups: Sequence[Group], /) -> list[Group | None]:
        kept: list[Group | None] = []
        for group in groups:
            if group.pairs:
                within = [i for i, pair in enumerate(group.pairs) if all(self.fits(group, k) for k in pair)]
                kept.append(group.with_pairs(within))
            else:
                kept.append(group if all(self.fits(group, k) for k in range(len(group.completions))) else None)
        return kept

    def fits(self, group: Group, k: int) -> bool:
        answer, prompt = len(group.completions[k].ids), len(group.prompt_of(k))
        bounds = ((answer, self.max_answer), (prompt, self.max_prompt), (answer + prompt, self.max_total))
        return answer >= (self.min_answer or 0) and all(most is None or n <= most for n, most in bounds)

"""UltraFeedback's records, as they were published and as they were binarized.

Cui et al., "UltraFeedback: Boosting Language Models with Scaled AI Feedback", 2023 (arXiv:2310.01377).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve, frozen

from mortice.batch import Example
from mortice.errors import DataError
from mortice.options import in_, option
from mortice.tokenizer import Tokenizer
from mortice_plugins.formats.answers import number
from mortice_plugins.formats.conversational import kind_name, text_of
from mortice_plugins.formats.preference import Preference
from mortice_plugins.formats.rated import Rated, list_of

ASPECTS = ("instruction_following", "honesty", "truthfulness", "helpfulness")


@frozen
class UltraFeedback(Rated):
    """{"instruction", "completions"}, or binarized {"prompt", "chosen", "rejected", "score_chosen", "score_rejected"}.

    Each of the completions has a "response" and its ratings; pairs are made of them as `pairs` and `min_gap` say.
    `score = "overall"` goes by "overall_score"; some two thousand answers of the published data have 10 there and were
    rated 1. `"ratings"` goes by the mean of the ratings of the four aspects under "annotations". System prompts that
    single answers were sampled with are not read. Binarized records have one pair each, whatever `pairs` says;
    `min_gap` holds for their two scores too.
    """

    keys: ClassVar[frozenset[str]] = frozenset(
        {
            *("instruction", "completions", "source", "models", "correct_answers", "incorrect_answers"),
            *("prompt", "prompt_id", "chosen", "rejected", "messages", "score_chosen", "score_rejected"),
            *("system", "weight"),
        }
    )
    required: ClassVar[tuple[str, ...]] = ("instruction", "completions")

    score: str = option(
        "overall",
        help='what rates an answer: "overall" (its overall_score) or "ratings" (the mean of its four aspects)',
        validator=in_(("overall", "ratings")),
    )

    def matches(self, record: Mapping[str, Any], /) -> bool:
        binarized = ("chosen", "rejected", "score_chosen", "score_rejected")
        return super().matches(record) or all(key in record for key in binarized)

    def __call__(self, record: Mapping[str, Any], tokenizer: Tokenizer, /, *, source: str) -> Example:
        if "completions" not in record:
            return self.binarized(record, tokenizer, source)
        completions = list_of(record, "completions")
        for k, item in enumerate(completions):
            if not isinstance(item, Mapping) or not isinstance(item.get("response"), str):
                found = ", ".join(map(repr, item)) if isinstance(item, Mapping) else kind_name(item)
                raise DataError(f"completions[{k}] must be an object with the text of a 'response', found {found}")
        scores = [self.rating(item, f"completions[{k}]") for k, item in enumerate(completions)]
        answers = [item["response"] for item in completions]
        return self.rated(text_of(record, "instruction"), answers, scores, record, tokenizer, source)

    def rating(self, item: Mapping[str, Any], where: str) -> float:
        """Of one answer. Raises DataError where it has none."""
        if self.score == "overall":
            return number(item.get("overall_score"), f"{where}.overall_score")
        annotations = item.get("annotations")
        if not isinstance(annotations, Mapping):
            raise DataError(f"{where}.annotations must be an object, found {kind_name(annotations)}")
        entries = [annotations.get(aspect) for aspect in ASPECTS]
        ratings = [_rating(entry.get("Rating")) for entry in entries if isinstance(entry, Mapping)]
        known = [rating for rating in ratings if rating is not None]
        if not known:
            raise DataError(f"{where}.annotations has a 'Rating' for none of {', '.join(ASPECTS)}")
        return sum(known) / len(known)

    def binarized(self, record: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> Example:
        form = Preference(system=self.system, template=self.template)
        found = form(record, tokenizer, source=source)
        gap = number(record["score_chosen"], "'score_chosen'") - number(record["score_rejected"], "'score_rejected'")
        return found if gap > 0 and gap >= self.min_gap else Example(evolve(found.group, pairs=()), source)


def _rating(value: Any) -> float | None:
    """Ratings are numbers in quotes; "N/A" is none."""
    try:
        rating = float(value)
    except (TypeError, ValueError):
        return None
    return rating if math.isfinite(rating) else None

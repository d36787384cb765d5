"""Answers with ratings, made into pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import evolve, field, frozen

from mortice.batch import Example
from mortice.errors import DataError
from mortice.options import ge, in_, option
from mortice.tokenizer import Tokenizer
from mortice_plugins.formats.answers import example, number, rated_pairs
from mortice_plugins.formats.conversational import Conversational, kind_name, text_of


@frozen
class Rated(Conversational):
    """{"prompt", "completions", "scores"}: answers, strings or message lists, and a number for each; higher is better.

    Pairs are made of answers whose scores are apart, as `pairs` and `min_gap` say. A record whose answers all tie makes
    none; it is left out and counted. Optional: "system", "tools", "weight".
    """

    keys: ClassVar[frozenset[str]] = frozenset({"prompt", "completions", "scores", "system", "tools", "weight"})
    required: ClassVar[tuple[str, ...]] = ("prompt", "completions", "scores")
    provides: ClassVar[frozenset[str]] = frozenset({"pairs", "groups", "scores"})

    pairs: str = option(
        "best-worst",
        help='"best-worst": one pair a record; "all": every two answers that are apart; "adjacent": each answer '
        "against the next lower one that is far enough away",
        validator=in_(("best-worst", "all", "adjacent")),
    )
    min_gap: float = option(0.0, help="scores closer than this tie (equal ones always do)", validator=ge(0.0))
    _every: bool = field(default=False, kw_only=True, repr=False)

    def with_every_answer(self) -> Self:
        """The same, with answers in its groups that no pair names too: for scoring."""
        return evolve(self, every=True)

    def matches(self, record: Mapping[str, Any], /) -> bool:
        return all(key in record for key in self.required)

    def __call__(self, record: Mapping[str, Any], tokenizer: Tokenizer, /, *, source: str) -> Example:
        answers, scores = list_of(record, "completions"), list_of(record, "scores")
        if len(answers) != len(scores):
            raise DataError(f"'scores' has {len(scores)} entries for {len(answers)} completions")
        ratings = [number(score, f"scores[{k}]") for k, score in enumerate(scores)]
        return self.rated(text_of(record, "prompt"), answers, ratings, record, tokenizer, source)

    def rated(
        self, prompt: Any, answers: list[Any], scores: list[float], record: Mapping[str, Any], tokenizer: Tokenizer,
        source: str,
    ) -> Example:  # fmt: skip
        """Answers and their ratings as a group. Raises DataError for an answer that is no text, or for fewer than 2."""
        if len(answers) < 2:
            raise DataError(f"'completions' has {len(answers)} entries: a pair takes two")
        sides = [
            self.split(tokenizer, prompt, answer, record, key=f"completions[{k}]") for k, answer in enumerate(answers)
        ]
        pairs = rated_pairs(scores, self.pairs, self.min_gap)
        return example(sides, pairs, record, source, scores, every=self._every)


def list_of(record: Mapping[str, Any], key: str) -> list[Any]:
    """Raises DataError for anything but a list under `key`."""
    value = record[key]
    if not isinstance(value, list):
        raise DataError(f"{key!r} must be a list, found {kind_name(value)}")
    return value

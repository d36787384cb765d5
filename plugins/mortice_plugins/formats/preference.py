"""Pairs: a prompt with chosen and rejected answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from mortice.batch import Example
from mortice.errors import DataError
from mortice.options import option
from mortice.tokenizer import Tokenizer
from mortice_plugins.formats.answers import example, number
from mortice_plugins.formats.conversational import Conversational, text_of


@frozen
class Preference(Conversational):
    """{"prompt", "chosen", "rejected"}: strings or message lists; the final turns are scored.

    Without "prompt", chosen and rejected are whole conversations, and what they share is the prompt. Turns that stand
    before a final one on one side alone belong to that side's own prompt. Either side may be a list of several answers,
    strings or message lists: those of a side tie, and each chosen one is paired with each rejected one. Optional:
    "system", "tools", "weight", and ratings of both sides under the keys that `score_keys` names: a number, or one for
    each answer of the side. "origin" is where `mortice pairs` says how a pair was made; it is not read.
    """

    required: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    provides: ClassVar[frozenset[str]] = frozenset({"pairs", "groups", "scores"})

    score_keys: tuple[str, ...] = option(
        ("score_chosen", "score_rejected"), help="keys of the ratings of chosen and rejected, where records have them"
    )

    @score_keys.validator  # type: ignore[attr-defined]
    def _two(self, attribute: Any, value: tuple[str, ...]) -> None:
        if len(value) != 2 or value[0] == value[1]:
            raise ValueError(f"must be two keys, of chosen and of rejected, found {list(value)}")

    @property
    def keys(self) -> frozenset[str]:
        own = ("prompt", "chosen", "rejected", "system", "tools", "weight", "origin")
        return frozenset({*own, *self.score_keys})

    def matches(self, record: Mapping[str, Any], /) -> bool:
        return all(key in record for key in self.required)

    def __call__(self, record: Mapping[str, Any], tokenizer: Tokenizer, /, *, source: str) -> Example:
        chosen, rejected = answers_of(record, "chosen"), answers_of(record, "rejected")
        if "prompt" in record:
            prompt = text_of(record, "prompt")
        else:
            prompt, parted = shared_prompt(*chosen, *rejected)
            chosen, rejected = parted[: len(chosen)], parted[len(chosen) :]
        sides = [
            self.split(tokenizer, prompt, answer, record, key=key)
            for key, answers in (("chosen", chosen), ("rejected", rejected))
            for answer in answers
        ]
        pairs = [(c, len(chosen) + r) for c in range(len(chosen)) for r in range(len(rejected))]
        return example(sides, pairs, record, source, self.scores(record, len(chosen), len(rejected)))

    def scores(self, record: Mapping[str, Any], chosen: int, rejected: int) -> list[float] | None:
        """Ratings of all answers, where the record has them. Raises DataError for one side's alone."""
        given = [key for key in self.score_keys if record.get(key) is not None]
        if not given:
            return None
        if len(given) == 1:
            other = next(key for key in self.score_keys if key != given[0])
            raise DataError(f"{given[0]!r} is there and {other!r} is not: give both ratings, or none")
        found: list[float] = []
        for key, answers in zip(self.score_keys, (chosen, rejected)):
            values = record[key] if isinstance(record[key], list) else [record[key]] * answers
            if len(values) != answers:
                raise DataError(f"{key!r} has {len(values)} ratings for {answers} answers")
            found += [number(value, repr(key)) for value in values]
        return found


def answers_of(record: Mapping[str, Any], key: str) -> Sequence[Any]:
    """The answers of one side: one that is a string or a message list, or a list of such."""
    value = text_of(record, key)
    if isinstance(value, str) or not value or not all(isinstance(item, (str, list)) for item in value):
        return [value]
    return value


def shared_prompt(*conversations: Any) -> tuple[Any, list[Any]]:
    """The messages that all conversations begin with, and the rest of each. Raises DataError for none."""
    if any(isinstance(conversation, str) for conversation in conversations):
        transcripts = all(str(c).lstrip().startswith("Human:") for c in conversations)
        hint = "; format = 'hh' reads transcripts that begin with Human:" if transcripts else ""
        raise DataError(f"without 'prompt', 'chosen' and 'rejected' must be message lists that begin alike{hint}")
    same, first = 0, conversations[0]
    while all(same < len(c) - 1 and c[same] == first[same] for c in conversations):
        same += 1
    if same == 0:
        raise DataError("'chosen' and 'rejected' share no first message, and there is no 'prompt'")
    return first[:same], [c[same:] for c in conversations]

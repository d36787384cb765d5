"""Pairs: a prompt with a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from mortice.batch import Completion, Example, Group
from mortice.errors import DataError
from mortice.tokenizer import Tokenizer
from mortice_plugins.formats.conversational import Conversational, text_of, weight


@frozen
class Preference(Conversational):
    """{"prompt", "chosen", "rejected"}: strings or message lists; the final turns are scored.

    Without "prompt", chosen and rejected are whole conversations, and what they share is the prompt. Turns that stand
    before a final one on one side alone belong to that side's own prompt. Optional: "system", "tools", "weight".
    """

    keys: ClassVar[frozenset[str]] = frozenset({"prompt", "chosen", "rejected", "system", "tools", "weight"})
    required: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    provides: ClassVar[frozenset[str]] = frozenset({"pairs", "groups"})

    def matches(self, record: Mapping[str, Any], /) -> bool:
        return all(key in record for key in self.required)

    def __call__(self, record: Mapping[str, Any], tokenizer: Tokenizer, /, *, source: str) -> Example:
        chosen, rejected = text_of(record, "chosen"), text_of(record, "rejected")
        if "prompt" in record:
            prompt = text_of(record, "prompt")
        else:
            prompt, chosen, rejected = shared_prompt(chosen, rejected)
        sides = [
            self.split(tokenizer, prompt, answer, record, key=key)
            for key, answer in (("chosen", chosen), ("rejected", rejected))
        ]
        first = sides[0].prompt_ids
        completions = [
            Completion(
                s.completion_ids, s.loss_mask, weight(record), s.text,
                prompt_ids=None if s.prompt_ids == first else s.prompt_ids,
            )
            for s in sides
        ]  # fmt: skip
        return Example(Group(source, first, completions, ((0, 1),), record), source)


def shared_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """The messages that two conversations begin with, and the rest of each. Raises DataError for none."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError("without 'prompt', 'chosen' and 'rejected' must be message lists that begin alike")
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    if same == 0:
        raise DataError("'chosen' and 'rejected' share no first message, and there is no 'prompt'")
    return chosen[:same], chosen[same:], rejected[same:]

"""Pairs of transcripts, as in Anthropic's helpful and harmless data.

Bai et al., "Training a Helpful and Harmless Assistant with Reinforcement Learning from Human Feedback", 2022
(arXiv:2204.05862).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from mortice.batch import Example
from mortice.conversation import Split, split_text
from mortice.errors import DataError
from mortice.tokenizer import Tokenizer
from mortice_plugins.formats.answers import example
from mortice_plugins.formats.conversational import Conversational, kind_name

_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@frozen
class HH(Conversational):
    """{"chosen", "rejected"}: whole transcripts, "\\n\\nHuman: …\\n\\nAssistant: …"; the last answers are scored.

    With a chat template the turns become messages; without one, or with template = "none", the text stays as it is, and
    an answer is what stands behind the last "\\n\\nAssistant:". Optional: "system", "weight".
    """

    keys: ClassVar[frozenset[str]] = frozenset({"chosen", "rejected", "system", "weight"})
    required: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    provides: ClassVar[frozenset[str]] = frozenset({"pairs", "groups"})

    def matches(self, record: Mapping[str, Any], /) -> bool:
        texts = [record.get(key) for key in self.required]
        return all(isinstance(text, str) and _TURN.match(text) for text in texts)

    def __call__(self, record: Mapping[str, Any], tokenizer: Tokenizer, /, *, source: str) -> Example:
        chosen, rejected = (turns(record[key], key) for key in self.required)
        if chosen[0] != rejected[0]:
            raise DataError("'chosen' and 'rejected' share no first turn")
        sides = [
            self.side(tokenizer, record, key, found) for key, found in (("chosen", chosen), ("rejected", rejected))
        ]
        return example(sides, ((0, 1),), record, source)

    def side(
        self, tokenizer: Tokenizer, record: Mapping[str, Any], key: str, found: list[tuple[str, str]]
    ) -> Split:  # fmt: skip
        if self.template == "none" or not tokenizer.has_template:
            text: str = record[key]
            start = [match.end() for match in _TURN.finditer(text)][-1]
            return split_text(tokenizer, text[:start], text[start:])
        messages: list[dict[str, Any]] = [{"role": _ROLES[who], "content": content} for who, content in found]
        return self.split(tokenizer, messages[:-1], messages[-1:], record, key=key)


def turns(text: Any, key: str) -> list[tuple[str, str]]:
    """(`Human` or `Assistant`, what they say) of a transcript that ends with an answer. Raises DataError."""
    if not isinstance(text, str):
        raise DataError(f"{key!r} must be a transcript, found {kind_name(text)}")
    starts = list(_TURN.finditer(text))
    if not starts or starts[0].start() != 0:
        raise DataError(f"{key!r} must begin with 'Human:', found {text[:20]!r}")
    stops = [*(match.start() for match in starts[1:]), len(text)]
    found = [(match[1], text[match.end() : stop].strip()) for match, stop in zip(starts, stops)]
    if found[0][0] != "Human" or found[-1][0] != "Assistant":
        raise DataError(
            f"{key!r} must begin with 'Human:' and end with 'Assistant:', found {[who for who, _ in found]}"
        )
    return found

"""A prompt and its completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from mortice.batch import Completion, Example, Group
from mortice.tokenizer import Tokenizer
from mortice_plugins.formats.conversational import Conversational, text_of, weight


@frozen
class CompletionFormat(Conversational):
    """{"prompt", "completion"}: strings or message lists; only the completion's assistant turns are scored.

    Strings become a user and an assistant turn where the checkpoint has a chat template, unless template = "none".
    """

    keys: ClassVar[frozenset[str]] = frozenset({"prompt", "completion", "system", "tools", "weight"})
    required: ClassVar[tuple[str, ...]] = ("prompt", "completion")
    provides: ClassVar[frozenset[str]] = frozenset()

    def matches(self, record: Mapping[str, Any], /) -> bool:
        return all(key in record for key in self.required)

    def __call__(self, record: Mapping[str, Any], tokenizer: Tokenizer, /, *, source: str) -> Example:
        prompt, answer = text_of(record, "prompt"), text_of(record, "completion")
        split = self.split(tokenizer, prompt, answer, record, key="completion", every_turn=True)
        completion = Completion(split.completion_ids, split.loss_mask, weight(record), split.text)
        return Example(Group(source, split.prompt_ids, (completion,), (), record), source)

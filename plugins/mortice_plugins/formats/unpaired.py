"""Answers that are labelled one by one: good or bad, without another one to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from mortice.batch import LABEL, Completion, Example, Group
from mortice.errors import DataError
from mortice.options import option
from mortice.tokenizer import Tokenizer
from mortice_plugins.formats.conversational import Conversational, kind_name, text_of, weight


@frozen
class Unpaired(Conversational):
    """{"prompt", "completion", "label"}: an answer, a string or a message list, and whether it is desirable.

    The label is true or false, or 1 or 0. The final turn is scored. Optional: "system", "tools", "weight".
    """

    provides: ClassVar[frozenset[str]] = frozenset({"labels"})

    label_key: str = option("label", help="key of the label")

    @property
    def keys(self) -> frozenset[str]:
        return frozenset({"prompt", "completion", self.label_key, "system", "tools", "weight"})

    @property
    def required(self) -> tuple[str, ...]:
        return ("prompt", "completion", self.label_key)

    def matches(self, record: Mapping[str, Any], /) -> bool:
        return all(key in record for key in self.required)

    def __call__(self, record: Mapping[str, Any], tokenizer: Tokenizer, /, *, source: str) -> Example:
        prompt, answer, label = text_of(record, "prompt"), text_of(record, "completion"), record[self.label_key]
        if not isinstance(label, (bool, int, float)) or label not in (0, 1):
            raise DataError(f"{self.label_key!r} must be true or false, or 1 or 0, found {_shown(label)}")
        split = self.split(tokenizer, prompt, answer, record, key="completion")
        completion = Completion(
            split.completion_ids, split.loss_mask, weight(record), split.text, extras={LABEL: float(label)}
        )
        return Example(Group(source, split.prompt_ids, (completion,), (), record), source)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else kind_name(value)

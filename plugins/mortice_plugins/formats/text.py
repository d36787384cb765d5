"""Raw text, every token of it learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from mortice.batch import Completion, Example, Group
from mortice.errors import DataError
from mortice.tokenizer import Tokenizer
from mortice_plugins.formats.conversational import weight


@frozen
class Text:
    """{"text"}: every token but the first is scored, and the EOS that is appended.

    The first token is BOS where the tokenizer adds one, else the text's own first token.
    """

    keys: ClassVar[frozenset[str]] = frozenset({"text", "weight"})
    required: ClassVar[tuple[str, ...]] = ("text",)
    provides: ClassVar[frozenset[str]] = frozenset()

    def matches(self, record: Mapping[str, Any], /) -> bool:
        return "text" in record

    def __call__(self, record: Mapping[str, Any], tokenizer: Tokenizer, /, *, source: str) -> Example:
        text = record["text"]
        if not isinstance(text, str):
            raise DataError(f"'text' must be a string, found {type(text).__name__}")
        ids = tokenizer.encode(text, add_special=True)
        if tokenizer.eos_id is not None and (not ids or ids[-1] not in tokenizer.eos_ids):
            ids.append(tokenizer.eos_id)
        completion = Completion(ids[1:], weight=weight(record), text=text)
        return Example(Group(source, ids[:1], (completion,), (), record), source)

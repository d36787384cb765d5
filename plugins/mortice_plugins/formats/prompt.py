"""A prompt alone, for answers that are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from mortice.batch import Example, Group
from mortice.errors import DataError
from mortice.options import option
from mortice.tokenizer import Tokenizer
from mortice_plugins.formats.conversational import Conversational, messages, text_of, tools


@frozen
class PromptFormat(Conversational):
    """{"prompt", …}: a string or a message list to be answered; rewards see the whole record, whatever else it holds.

    A string becomes a user turn where the checkpoint has a chat template, unless template = "none".
    """

    provides: ClassVar[frozenset[str]] = frozenset()

    key: str = option("prompt", help="key of the prompt in a record")
    suffix: str = option("", help="text put behind the prompt (behind its last turn): what form an answer should have")

    @property
    def keys(self) -> frozenset[str]:
        return frozenset({self.key, "system", "tools"})

    @property
    def required(self) -> tuple[str, ...]:
        return (self.key,)

    def matches(self, record: Mapping[str, Any], /) -> bool:
        return self.key in record

    def __call__(self, record: Mapping[str, Any], tokenizer: Tokenizer, /, *, source: str) -> Example:
        if self.key not in record:
            raise DataError(f"no {self.key!r}, found {', '.join(map(repr, record)) or 'no key at all'}")
        prompt = text_of(record, self.key)
        if isinstance(prompt, str) and (self.template == "none" or not tokenizer.has_template):
            ids = tokenizer.encode(prompt + self.suffix, add_special=True)
        else:
            turns = self.with_system(messages(prompt, self.key, "user"), record)
            if not turns:
                raise DataError(f"{self.key!r} is empty")
            turns[-1] = {**turns[-1], "content": turns[-1]["content"] + self.suffix}
            ids = tokenizer.render_prompt(turns, tools(record))
        if not ids:
            raise DataError(f"{self.key!r} is empty")
        return Example(Group(source, tuple(ids), (), (), record), source)

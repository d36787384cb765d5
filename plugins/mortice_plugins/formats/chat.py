"""Conversations: assistant turns are learned, the others are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from mortice.batch import Completion, Example, Group
from mortice.conversation import split_answer, split_turns
from mortice.errors import DataError
from mortice.options import in_, option
from mortice.tokenizer import Tokenizer
from mortice_plugins.formats.conversational import Conversational, messages, tools, weight


@frozen
class Chat(Conversational):
    """{"messages": [{"role", "content"}, …]}, or ShareGPT's {"conversations": [{"from", "value"}, …]}.

    User, system and tool turns are masked. Messages behind the last assistant turn are left out. Optional: "system",
    "tools", "weight".
    """

    train_on: str = option(
        "all-assistant",
        help='"all-assistant" turns, or the "last" one',
        validator=in_(("all-assistant", "last")),
    )
    keys: ClassVar[frozenset[str]] = frozenset({"messages", "conversations", "system", "tools", "weight"})
    required: ClassVar[tuple[str, ...]] = ("messages",)
    provides: ClassVar[frozenset[str]] = frozenset()

    def matches(self, record: Mapping[str, Any], /) -> bool:
        return "messages" in record or "conversations" in record

    def __call__(self, record: Mapping[str, Any], tokenizer: Tokenizer, /, *, source: str) -> Example:
        key = "messages" if "messages" in record else "conversations"
        if not isinstance(record[key], list):
            raise DataError(f"{key!r} must be a list of messages, found {type(record[key]).__name__}")
        turns = self.with_system(messages(record[key], key, "user"), record)
        assistant = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        if not assistant:
            raise DataError(f"{key!r} has no assistant turn to learn from")
        if self.train_on == "last":
            last = assistant[-1]
            split = split_answer(tokenizer, turns[:last], turns[last], tools(record))
        else:
            split = split_turns(tokenizer, turns, tools(record))
        completion = Completion(split.completion_ids, split.loss_mask, weight(record), split.text)
        return Example(Group(source, split.prompt_ids, (completion,), (), record), source)

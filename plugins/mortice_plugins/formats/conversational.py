"""What the formats share: messages as they come, the system role, and raw text where there is no template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from mortice.conversation import Split, split_answer, split_text, split_turns
from mortice.errors import DataError
from mortice.options import in_, option
from mortice.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool", "developer", "function")
_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@frozen
class Conversational:
    """Options of every format that holds prompts and answers."""

    system: str = option(
        "keep",
        help='what becomes of system messages: "keep", "merge" into the first user turn, or "drop"',
        validator=in_(("keep", "merge", "drop")),
    )
    template: str = option(
        "auto",
        help='"auto": strings become user and assistant turns where the checkpoint has a chat template; '
        '"none": strings stay raw text',
        validator=in_(("auto", "none")),
    )

    def split(
        self, tokenizer: Tokenizer, prompt: Any, answer: Any, record: Mapping[str, Any], *, key: str,
        every_turn: bool = False,
    ) -> Split:  # fmt: skip
        """Prompt and answer, strings or message lists, to token ids. Raises DataError naming what is wrong.

        `key` is the answer's. An answer of several messages may repeat the prompt. Its final turn is learned, with
        `every_turn` all of its assistant turns.
        """
        raw = isinstance(prompt, str) and isinstance(answer, str)
        if raw and (self.template == "none" or not tokenizer.has_template):
            return split_text(tokenizer, prompt, answer)
        before = messages(prompt, "prompt", "user")
        after = messages(answer, key, "assistant")
        if len(after) > len(before) and after[: len(before)] == before:
            after = after[len(before) :]
        if not after or after[-1]["role"] != "assistant":
            raise DataError(f"{key!r} must end with an assistant turn, found {[m['role'] for m in after]}")
        before = self.with_system(before, record)
        if every_turn:
            return split_turns(tokenizer, [*before, *after], tools(record), first=len(before))
        return split_answer(tokenizer, [*before, *after[:-1]], after[-1], tools(record))

    def with_system(self, turns: list[dict[str, Any]], record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Turns, headed by the record's own `system` text where they have none, with the `system` option applied."""
        own = record.get("system")
        if own is not None and not isinstance(own, str):
            raise DataError(f"'system' must be a string, found {kind_name(own)}")
        if own and not any(t["role"] == "system" for t in turns):
            turns = [{"role": "system", "content": own}, *turns]
        if self.system == "keep":
            return turns
        texts = [t["content"] for t in turns if t["role"] == "system"]
        rest = [t for t in turns if t["role"] != "system"]
        if self.system == "merge" and texts:
            first = next((i for i, t in enumerate(rest) if t["role"] == "user"), None)
            if first is None:
                raise DataError('system = "merge" needs a user turn')
            rest[first] = {**rest[first], "content": "\n\n".join([*texts, rest[first]["content"]])}
        return rest


def messages(value: Any, key: str, role: str) -> list[dict[str, Any]]:
    """A string (one turn of `role`) or a list of messages, checked. Raises DataError naming key and place."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise DataError(f"{key!r} must be a string or a list of messages, found {kind_name(value)}")
    return [_message(m, f"{key}[{i}]") for i, m in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} must be a message, found {kind_name(value)}")
    if "from" in value and "value" in value:
        value = {"role": _SHAREGPT.get(value["from"], value["from"]), "content": value["value"]}
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise DataError(f"{where}.role is {role!r} (accepted: {', '.join(ROLES)})")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise DataError(f"{where}.content holds parts that are not text; only text can be trained on")
        content = "".join(parts)  # type: ignore[arg-type]
    if content is None and value.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise DataError(f"{where}.content must be text, found {kind_name(content)}")
    calls = value.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise DataError(f"{where}.tool_calls must be a list of objects, found {kind_name(calls)}")
    return {**value, "role": role, "content": content}


def tools(record: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Tool schemas of a record. Raises DataError where they are no list of objects."""
    value = record.get("tools")
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(f"'tools' must be a list of objects, found {kind_name(value)}")
    return value


def weight(record: Mapping[str, Any]) -> float:
    """The record's own weight, 1 by default. Raises DataError for anything but a number of 0 or more."""
    value = record.get("weight", 1.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise DataError(f"'weight' must be a number of 0 or more, found {value!r}")
    return float(value)


def text_of(record: Mapping[str, Any], key: str) -> Any:
    """A string or a list under `key`. Raises DataError for anything else."""
    value = record[key]
    if not isinstance(value, (str, list)):
        raise DataError(f"{key!r} must be a string or a list of messages, found {kind_name(value)}")
    return value


def kind_name(value: Any) -> str:
    """A JSON value in a word, for messages."""
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "a string", "bool": "a boolean"}
    return names.get(type(value).__name__, f"the number {value!r}")

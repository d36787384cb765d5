"""Where a prompt ends and an answer begins, in token ids.

The prompt is tokenized by itself, as it is when the model answers it, so that training, sampling and `generate` see
the same ids, and both sides of a pair share them. The answer's ids are those of the whole text behind that point
wherever the whole tokenizes into the same prompt; where prompt and answer would merge into one token, the answer is
tokenized by itself too, since no model that is given the prompt could write the merged token.

A generation prompt need not be a prefix of the full conversation (templates that open a think block, or strip one
from history): then the answer is found by its text.

An answer ends with the token that the template puts behind it, which is scored; what follows that token (a newline)
is dropped. Where the template puts none, the tokenizer's EOS is appended, and scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from mortice.errors import DataError
from mortice.tokenizer import Encoded, Message, Tokenizer

Tools = Sequence[Mapping[str, Any]] | None


@frozen
class Split:
    """A prompt and what is learned behind it."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    text: str
    """The answer's own text."""


def split_text(tokenizer: Tokenizer, prompt: str, answer: str) -> Split:
    """Raw text: one BOS where the tokenizer adds one, EOS at the end."""
    prompt_ids = tuple(tokenizer.encode(prompt, add_special=True))
    plain = tokenizer.encode_offsets(prompt).ids
    if not prompt_ids:
        if tokenizer.bos_id is None:
            raise DataError("the prompt is empty, and the tokenizer has no BOS to predict the first token from")
        prompt_ids = (tokenizer.bos_id,)
    ids = _behind(tokenizer, prompt, prompt + answer, plain).ids
    return _scored(prompt_ids, _ended(tokenizer, ids), answer)


def split_answer(
    tokenizer: Tokenizer, prompt: Sequence[Message], answer: Sequence[Message], tools: Tools = None
) -> Split:
    """The final turn of a conversation: `prompt` messages, then the messages of one answer, all of it scored."""
    opened = tokenizer.apply_chat_template(prompt, tools=tools, add_generation_prompt=True)
    full = tokenizer.apply_chat_template([*prompt, *answer], tools=tools)
    prompt_ids = tokenizer.encode_offsets(opened).ids
    content = (answer[-1].get("content") or "").rstrip()
    called = bool(answer[-1].get("tool_calls"))
    end: int | None
    if full.startswith(opened):
        start = len(opened)
        behind = _behind(tokenizer, opened, full, prompt_ids)
    elif content or called:
        start = _find(full, answer[0].get("content") or "")
        behind = _shifted(tokenizer.encode_offsets(full[start:]), start)
    else:  # an empty answer cannot be looked for: what is left of it is the token that ends it
        whole = tokenizer.encode_offsets(full)
        end = _last_special(tokenizer, whole)
        behind = Encoded(whole.ids[end - 1 : end], whole.offsets[end - 1 : end])
        start = behind.offsets[0][0]
    at = -1 if called else full.rfind(content) if content else start
    if at < start:  # a turn that the template writes in its own way ends with its last special token
        end = _last_special(tokenizer, behind)
    else:
        end = found_end(tokenizer, behind, full, at + len(content))
        if end is None:  # nothing ends it: what the template prints behind the content is not the model's
            end = sum(low < at + len(content) for low, _ in behind.offsets)
    return _scored(prompt_ids, _ended(tokenizer, behind.ids[:end]), "".join(m.get("content") or "" for m in answer))


def split_turns(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools = None) -> Split:
    """Every assistant turn of a conversation is scored; user, system and tool turns are not.

    Raises DataError where a turn cannot be found in the rendered conversation.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError("the conversation has no assistant turn to learn from")
    last = turns[-1] + 1
    if len(turns) == 1:
        return split_answer(tokenizer, messages[: turns[0]], messages[turns[0] : last], tools)
    full = tokenizer.apply_chat_template(messages[:last], tools=tools)
    encoded = tokenizer.encode_offsets(full)
    scored = [False] * len(encoded.ids)
    cursor = 0
    for i in turns:
        start, content_end = _locate(tokenizer, messages, i, tools, full, cursor)
        end = found_end(tokenizer, encoded, full, content_end)
        for j, (low, high) in enumerate(encoded.offsets):
            if high > start and (low < content_end if end is None else j < end):
                scored[j] = True
        cursor = content_end
    first = scored.index(True)
    stop = len(scored) - scored[::-1].index(True)
    ids, mask = encoded.ids[first:stop], tuple(scored[first:stop])
    ended = _ended(tokenizer, ids)
    text = messages[turns[-1]].get("content") or ""
    return Split(encoded.ids[:first], ended, mask + (True,) * (len(ended) - len(ids)), text)


def _locate(
    tokenizer: Tokenizer, messages: Sequence[Message], i: int, tools: Tools, full: str, cursor: int
) -> tuple[int, int]:
    """Where assistant turn i begins and its content ends in the rendered conversation."""
    opened = tokenizer.apply_chat_template(messages[:i], tools=tools, add_generation_prompt=True)
    closed = tokenizer.apply_chat_template(messages[: i + 1], tools=tools)
    content = messages[i].get("content") or ""
    at = full.find(content, max(cursor, len(opened) if full.startswith(opened) else 0)) if content else -1
    if at < 0 and content.strip():
        content = content.strip()
        at = full.find(content, cursor)
    if full.startswith(opened):
        if at >= 0 and not messages[i].get("tool_calls"):
            return len(opened), at + len(content)
        if full.startswith(closed):
            inside = tokenizer.encode_offsets(closed)
            last = _last_special(tokenizer, inside) - 1  # the end token stands behind the content
            return len(opened), inside.offsets[last][0]
    if at < 0:
        raise DataError(
            f"turn {i + 1} (assistant) cannot be found in the rendered conversation: the template changes it; "
            'train_on = "last" needs the final turn only'
        )
    return at, at + len(content)


def _find(full: str, content: str) -> int:
    for text in (content, content.strip()):
        at = full.rfind(text)
        if text and at >= 0:
            return at
    raise DataError("the answer cannot be found in the rendered conversation: the template changes it")


def found_end(tokenizer: Tokenizer, encoded: Encoded, text: str, content_end: int) -> int | None:
    """Index behind the token that ends an answer: the first special token behind its content, with nothing but white
    space between. None where the template puts none there."""
    special = tokenizer.special_ids
    for j, (low, high) in enumerate(encoded.offsets):
        if low >= content_end and encoded.ids[j] in special:
            return j + 1
        if low >= content_end and text[low:high].strip():
            return None
    return None


def _last_special(tokenizer: Tokenizer, encoded: Encoded) -> int:
    found = [j + 1 for j, i in enumerate(encoded.ids) if i in tokenizer.special_ids]
    return found[-1] if found else len(encoded.ids)


def _shifted(encoded: Encoded, by: int) -> Encoded:
    return Encoded(encoded.ids, tuple((low + by, high + by) for low, high in encoded.offsets))


def _behind(tokenizer: Tokenizer, before: str, full: str, prompt_ids: tuple[int, ...]) -> Encoded:
    """Tokens of what stands behind `before` in `full`, with offsets in `full`."""
    whole = tokenizer.encode_offsets(full)
    n = len(prompt_ids)
    if whole.ids[:n] == prompt_ids and (n == len(whole.ids) or whole.offsets[n][0] >= len(before)):
        return Encoded(whole.ids[n:], whole.offsets[n:])
    return _shifted(tokenizer.encode_offsets(full[len(before) :]), len(before))


def _ended(tokenizer: Tokenizer, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The ids with one token at the end that ends them."""
    if tokenizer.eos_id is None or (ids and ids[-1] in tokenizer.special_ids):
        return ids
    return (*ids, tokenizer.eos_id)


def _scored(prompt_ids: tuple[int, ...], ids: tuple[int, ...], text: str) -> Split:
    return Split(tuple(prompt_ids), tuple(ids), (True,) * len(ids), text)

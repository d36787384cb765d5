"""Where a prompt ends and an answer begins, in token ids.

The prompt is tokenized by itself, as it is when the model answers it, so that training, sampling and `generate` see
the same ids, and both sides of a pair share them. The answer's ids are those of the whole text behind that point
wherever the whole tokenizes into the same prompt; where prompt and answer would merge into one token, the answer is
tokenized by itself too, since no model that is given the prompt could write the merged token.

A generation prompt need not be a prefix of the full conversation (templates that open a think block, or strip one
from history). Then the answer begins where the rendering parts from that of another answer to the same prompt. A
conversation with several learned turns is laid down as the template prints it.

An answer ends with the token that the template puts behind it, which is scored; what follows that token (a newline)
is dropped. Where the template puts none, the tokenizer's EOS is appended, and scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
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
    if not prompt_ids:
        if tokenizer.bos_id is None:
            raise DataError("the prompt is empty, and the tokenizer has no BOS to predict the first token from")
        prompt_ids = (tokenizer.bos_id,)
    ids = _ended(tokenizer, _pieces(tokenizer, prompt + answer, [len(prompt)])[1].ids)
    return Split(prompt_ids, ids, (True,) * len(ids), answer)


def split_answer(tokenizer: Tokenizer, prompt: Sequence[Message], answer: Message, tools: Tools = None) -> Split:
    """The final turn of a conversation: `prompt` messages, then the one message that is learned."""
    messages = [*prompt, answer]
    full = tokenizer.apply_chat_template(messages, tools=tools)
    start = _turn_start(tokenizer, messages, len(prompt), tools, full)
    behind = _pieces(tokenizer, full, [start])[1]
    ids = _ended(tokenizer, behind.ids[: _turn_end(tokenizer, behind, full, start, len(full), answer)])
    prompt_ids = tuple(tokenizer.render_prompt(prompt, tools))
    return Split(prompt_ids, ids, (True,) * len(ids), _text(answer))


def split_turns(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools = None, *, first: int = 0) -> Split:
    """Every assistant turn from message `first` on is scored; user, system and tool turns are not.

    Raises DataError where a turn cannot be found in the rendered conversation.
    """
    turns = [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
    if not turns:
        raise DataError("the conversation has no assistant turn to learn from")
    if len(turns) == 1:
        return split_answer(tokenizer, messages[: turns[0]], messages[turns[0]], tools)
    full = tokenizer.apply_chat_template(messages[: turns[-1] + 1], tools=tools)
    starts = [_turn_start(tokenizer, messages, i, tools, full) for i in turns]
    before, *pieces = _pieces(tokenizer, full, starts)
    ids: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()
    for i, piece, (start, stop) in zip(turns, pieces, pairwise([*starts, len(full)])):
        closed = tokenizer.apply_chat_template(messages[: i + 1], tools=tools)
        if full.startswith(closed):
            stop = len(closed)
        elif messages[i].get("tool_calls") or not full[start:].lstrip().startswith(_content(messages[i])):
            raise _changed(i)
        end = _turn_end(tokenizer, piece, full, start, stop, messages[i])
        if i == turns[-1]:
            last = _ended(tokenizer, piece.ids[:end])
            ids, mask = ids + last, mask + (True,) * len(last)
        else:
            ids, mask = ids + piece.ids, mask + tuple(j < end for j in range(len(piece.ids)))
    return Split(before.ids, ids, mask, _text(messages[turns[-1]]))


def _turn_start(tokenizer: Tokenizer, messages: Sequence[Message], i: int, tools: Tools, full: str) -> int:
    """Where assistant turn i begins in the rendered conversation. Raises DataError where it cannot be told."""
    opened = tokenizer.apply_chat_template(messages[:i], tools=tools, add_generation_prompt=True)
    if full.startswith(opened):
        return len(opened)
    history = tokenizer.apply_chat_template(messages[:i], tools=tools)
    other = {"role": "assistant", "content": "!" if _content(messages[i]).startswith("?") else "?"}
    probe = tokenizer.apply_chat_template([*messages[:i], other], tools=tools)
    same = min(len(full), len(probe))
    start = next((k for k in range(same) if full[k] != probe[k]), same)
    if not full.startswith(history) or start < len(history):
        raise _changed(i)
    encoded = tokenizer.encode_offsets(full)
    for token, (low, high) in zip(encoded.ids, encoded.offsets):
        if low < start < high and token in tokenizer.special_ids:  # both texts begin like one special token
            return low
    return start


def _turn_end(tokenizer: Tokenizer, piece: Encoded, full: str, start: int, stop: int, message: Message) -> int:
    """How many tokens of `piece`, which begins at the turn's start, belong to the turn, its end token among them.

    The turn lies between `start` and `stop` in `full`.
    """
    inside = [
        (j, low, high) for j, (low, high) in enumerate(piece.offsets)
        if low < stop and piece.ids[j] in tokenizer.special_ids
    ]  # fmt: skip
    content = _content(message)
    at = -1
    if not message.get("tool_calls"):
        plain = full[start:stop]  # without special tokens: "end" is not to be found in "<|end|>"
        for _, low, high in inside:
            plain = plain[: low - start] + "\0" * (high - low) + plain[high - start :]
        at = plain.find(content)
        at = start + (at if at >= 0 else full[start:stop].find(content))
    if at < start:  # a turn that the template writes in its own way ends with its last special token
        return inside[-1][0] + 1 if inside else sum(low < stop for low, _ in piece.offsets)
    content_end = at + len(content)
    end = _end_token(tokenizer, piece, full, content_end)
    return end if end is not None else sum(low < content_end for low, _ in piece.offsets)


def _end_token(tokenizer: Tokenizer, piece: Encoded, full: str, content_end: int) -> int | None:
    """Index behind the token that ends an answer: the first special token behind its content, with nothing but white
    space between. None where the template puts none there."""
    for j, (low, high) in enumerate(piece.offsets):
        if low >= content_end and piece.ids[j] in tokenizer.special_ids:
            return j + 1
        if low >= content_end and full[low:high].strip():
            return None
    return None


def _pieces(tokenizer: Tokenizer, text: str, cuts: Sequence[int]) -> list[Encoded]:
    """Tokens of the pieces between cuts, with offsets in `text`: those of the whole text where it tokenizes up to
    every cut as what stands before it does alone, else of each piece by itself."""
    whole = tokenizer.encode_offsets(text)
    alone = [tokenizer.encode_offsets(text[:cut]).ids for cut in cuts]
    if all(
        whole.ids[: len(ids)] == ids and all(low >= cut for low, _ in whole.offsets[len(ids) : len(ids) + 1])
        for cut, ids in zip(cuts, alone)
    ):
        places = [0, *map(len, alone), len(whole.ids)]
        return [Encoded(whole.ids[a:b], whole.offsets[a:b]) for a, b in pairwise(places)]
    return [_encoded_at(tokenizer, text[a:b], a) for a, b in pairwise([0, *cuts, len(text)])]


def _encoded_at(tokenizer: Tokenizer, text: str, place: int) -> Encoded:
    encoded = tokenizer.encode_offsets(text)
    return Encoded(encoded.ids, tuple((low + place, high + place) for low, high in encoded.offsets))


def _ended(tokenizer: Tokenizer, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The ids with one token at the end that ends them."""
    if tokenizer.eos_id is None or (ids and ids[-1] in tokenizer.special_ids):
        return ids
    return (*ids, tokenizer.eos_id)


def _text(message: Message) -> str:
    return message.get("content") or ""


def _content(message: Message) -> str:
    """A message's text without the white space around it, which templates trim."""
    return _text(message).strip()


def _changed(i: int) -> DataError:
    return DataError(
        f"turn {i + 1} (assistant) cannot be found in the rendered conversation: the template changes it; "
        'train_on = "last" needs the final turn only'
    )

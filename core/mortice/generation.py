"""Decoding one sequence with a K/V cache. Rollouts of many sequences at once are the `rollout` kind's business."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from mortice.batch import Group
from mortice.context import CacheContext
from mortice.data import check_vocabulary
from mortice.model import Model
from mortice.objective import number
from mortice.protocols import Sampling
from mortice.randomness import stable_key
from mortice.tokenizer import Tokenizer

PREFILL = 512
"""Prompt tokens in one forward."""


def next_token(logits: mx.array, sampling: Sampling, place: int) -> int:
    """Choose from logits `[V]` (soft-capped): greedy at temperature 0, else a keyed draw from what top-k, top-p and
    min-p leave of the distribution at the temperature."""
    if sampling.temperature == 0:
        return int(number(mx.argmax(logits)))
    logprobs = mx.log(mx.softmax(logits.astype(mx.float32) / sampling.temperature))
    if sampling.top_k:
        least = mx.sort(logprobs)[-min(sampling.top_k, logprobs.size)]
        logprobs = mx.where(logprobs < least, -mx.inf, logprobs)
    if sampling.top_p < 1:
        order = mx.argsort(-logprobs)
        ranked = mx.exp(logprobs[order])
        before = mx.cumsum(ranked) - ranked  # probability of everything more likely
        keep = mx.zeros(logprobs.shape, dtype=mx.bool_).at[order].maximum(before < sampling.top_p)
        logprobs = mx.where(keep, logprobs, -mx.inf)
    if sampling.min_p:
        least = mx.max(logprobs) + mx.log(mx.array(sampling.min_p))
        logprobs = mx.where(logprobs < least, -mx.inf, logprobs)
    return int(number(mx.random.categorical(logprobs, key=stable_key(sampling.seed, "token", place))))


def generate_tokens(model: Model, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """Token ids one by one, the end-of-sequence id included where one comes, at most `max_tokens` of them.

    Raises ValueError for an empty prompt.
    """
    if not prompt:
        raise ValueError("a prompt needs at least one token")
    check_vocabulary([Group("prompt", prompt, ())], model.output.vocab)
    model.read()
    ctx = CacheContext()
    tokens = list(prompt)
    for place in range(sampling.max_tokens):
        for start in range(0, len(tokens), PREFILL):
            part = tokens[start : start + PREFILL]
            hidden = model.hidden(ctx, mx.array(part))[-1:]
            ctx.advance(len(part))
            mx.eval(hidden, ctx.arrays())
        output = model.output
        token = next_token(output.finish(output.project(hidden))[0], sampling, place)
        yield token
        if token in sampling.eos_ids:
            return
        tokens = [token]


def stream_text(tokens: Iterator[int], tokenizer: Tokenizer, stop_ids: Sequence[int] = ()) -> Iterator[str]:
    """Pieces of text as token ids come in. A character whose bytes are spread over tokens is held back until whole."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        if token in stop_ids:
            break
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    rest = tokenizer.decode(ids)[len(shown) :]
    if rest:
        yield rest

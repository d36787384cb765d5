"""Decoding one sequence with a K/V cache. Rollouts of many sequences at once are the `rollout` kind's business."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import mlx.core as mx
from attrs import frozen

from mortice import staging
from mortice.batch import Group
from mortice.context import CacheContext
from mortice.data import check_vocabulary
from mortice.linear import FEW, on_cpu
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


@frozen(eq=False)
class Prefilled:
    """A prompt that was run once; any number of continuations start from it."""

    ctx: CacheContext
    logits: mx.array
    """`[V]`, soft-capped: of the first token behind the prompt."""


def prefill(model: Model, prompt: Sequence[int]) -> Prefilled:
    """Run a prompt. Raises ValueError for an empty one, DataError for a token that the model has no row for."""
    if not prompt:
        raise ValueError("a prompt needs at least one token")
    check_vocabulary([Group("prompt", prompt, ())], model.output.vocab)
    model.read()
    ctx = CacheContext()
    for start in range(0, len(prompt), PREFILL):
        logits = _next_logits(model, ctx, prompt[start : start + PREFILL])
    return Prefilled(ctx, logits)


def _next_logits(model: Model, ctx: CacheContext, tokens: Sequence[int]) -> mx.array:
    """Logits `[V]` behind the last of the tokens, which the cache takes in."""
    # A prompt's operations run at once, as in evaluation; a single token is not worth the waiting in between.
    with staging.eagerly() if on_cpu() and len(tokens) > FEW else nullcontext():
        hidden = model.hidden(ctx, mx.array(list(tokens)))[-1:]
    ctx.advance(len(tokens))
    mx.eval(hidden, ctx.arrays())
    return model.output.finish(model.output.project(hidden))[0]


def continue_from(model: Model, start: Prefilled, sampling: Sampling) -> Iterator[int]:
    """Token ids behind a prompt, one by one, the end-of-sequence id included where one comes, at most `max_tokens`."""
    for token, _ in scored_from(model, start, sampling):
        yield token


def scored_from(model: Model, start: Prefilled, sampling: Sampling) -> Iterator[tuple[int, mx.array]]:
    """`continue_from` with the logits `[V]` that each token was chosen from."""
    ctx, logits = start.ctx.branch(), start.logits
    for place in range(sampling.max_tokens):
        token = next_token(logits, sampling, place)
        yield token, logits
        if token in sampling.eos_ids or place == sampling.max_tokens - 1:
            return
        logits = _next_logits(model, ctx, [token])


def generate_tokens(model: Model, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """`continue_from` of a prompt that is run for this alone."""
    yield from continue_from(model, prefill(model, prompt), sampling)


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

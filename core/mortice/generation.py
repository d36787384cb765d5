"""Decoding one sequence with a K/V cache, and what ends an answer. Many at once: `decoding.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
from attrs import define, field, frozen

from mortice import staging
from mortice.batch import Completion, Group
from mortice.context import CacheContext
from mortice.data import check_vocabulary
from mortice.linear import FEW, on_cpu
from mortice.model import Model
from mortice.protocols import Sampling
from mortice.sampling import Chosen, Draw
from mortice.sampling import draw as sampled
from mortice.tokenizer import Tokenizer

PREFILL = 512
"""Prompt tokens in one forward."""
TAIL = 8
"""Tokens among which a character that has just become whole lies: its bytes may come one by one."""


def next_token(logits: mx.array, sampling: Sampling, draw: Draw) -> Chosen:
    """Choose from logits `[V]` (soft-capped): see `mortice.sampling`."""
    row = logits[None]
    return sampled(np.array(row.astype(mx.float32)) if on_cpu() else row, [draw], sampling)[0]


@define(eq=False)
class Growing:
    """An answer of which one token after the other comes in."""

    sampling: Sampling
    tokenizer: Tokenizer
    ids: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    reason: str | None = None
    """Why it ended, None while it goes on."""
    text: str | None = None
    """Once it has ended: without the id or the text that ended it."""

    def add(self, chosen: Chosen) -> None:
        self.ids.append(chosen.token)
        self.logprobs.append(chosen.logprob)
        if chosen.token in self.sampling.eos_ids:
            self._end("stop", self.tokenizer.decode(self.ids[:-1]))
        elif (cut := self._stopped()) is not None:
            self._end("stop-string", cut)
        elif len(self.ids) >= self.sampling.max_tokens:
            self._end("length", self.tokenizer.decode(self.ids))

    def _end(self, reason: str, text: str) -> None:
        self.reason, self.text = reason, text

    def _stopped(self) -> str | None:
        """The text before the first stop string, None where none is in it.

        The whole text is looked through only where the last tokens hold the last character of a stop string.
        """
        stops = self.sampling.stop
        if not stops:
            return None
        tail = self.tokenizer.decode(self.ids[-TAIL:])
        if not any(stop[-1] in tail for stop in stops):
            return None
        text = self.tokenizer.decode(self.ids)
        found = [place for stop in stops if (place := text.find(stop)) >= 0]
        return text[: min(found)] if found else None

    def completion(self) -> Completion:
        return Completion(
            tuple(self.ids), text=self.text, sampler_logprobs=tuple(self.logprobs), finish_reason=self.reason
        )


@frozen(eq=False)
class Prefilled:
    """A prompt that was run once; any number of continuations start from it."""

    ctx: CacheContext
    logits: mx.array
    """`[V]`, soft-capped: of the first token behind the prompt."""
    ids: Sequence[int]


def prefill(model: Model, prompt: Sequence[int]) -> Prefilled:
    """Run a prompt. Raises ValueError for an empty one, DataError for a token that the model has no row for."""
    if not prompt:
        raise ValueError("a prompt needs at least one token")
    check_vocabulary([Group("prompt", prompt, ())], model.output.vocab)
    model.read()
    ctx = CacheContext()
    for start in range(0, len(prompt), PREFILL):
        logits = _next_logits(model, ctx, prompt[start : start + PREFILL])
    return Prefilled(ctx, logits, tuple(prompt))


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
    for chosen in scored_from(model, start, sampling, sampling.seed):
        yield chosen.token


def scored_from(model: Model, start: Prefilled, sampling: Sampling, seed: int) -> Iterator[Chosen]:
    """`continue_from` with log-probabilities; `seed` names the answer."""
    ctx, logits = start.ctx.branch(), start.logits
    ids: list[int] = []
    for place in range(sampling.max_tokens):
        chosen = next_token(logits, sampling, Draw(0, seed, place, start.ids, ids))
        ids.append(chosen.token)
        yield chosen
        if chosen.token in sampling.eos_ids or place == sampling.max_tokens - 1:
            return
        logits = _next_logits(model, ctx, [chosen.token])


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

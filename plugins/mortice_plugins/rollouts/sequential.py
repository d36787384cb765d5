"""One answer after the other: the plain engine, which faster ones are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
from attrs import evolve, frozen

from mortice.batch import Completion
from mortice.errors import DataError
from mortice.generation import Prefilled, prefill, scored_from
from mortice.objective import number
from mortice.protocols import EngineContext, Request, Sampling
from mortice.randomness import stable_seed


@frozen
class Sequential:
    """Answers one by one. Each prompt is run once for all its samples."""

    provides = frozenset({"token-ids", "logprobs-at-temperature", "weight-sync"})

    def open(self, context: EngineContext) -> SequentialEngine:
        return SequentialEngine(context)


@frozen(eq=False)
class SequentialEngine:
    context: EngineContext

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, int, Completion]]:
        for index, request in enumerate(requests):
            if not request.ids:
                raise DataError(f"prompt {request.key!r} is empty")
            start = prefill(self.context.model, request.ids)
            for sample in range(sampling.samples):
                own = evolve(sampling, seed=stable_seed(sampling.seed, request.key, sample))
                yield index, sample, self._answer(start, own)

    def _answer(self, start: Prefilled, sampling: Sampling) -> Completion:
        tokenizer = self.context.tokenizer
        ids: list[int] = []
        logprobs: list[float] = []
        text, reason = "", "length"
        for token, logits in scored_from(self.context.model, start, sampling):
            self.context.poll()
            ids.append(token)
            logits = logits.astype(mx.float32) / (sampling.temperature or 1.0)
            logprobs.append(number(logits[token] - mx.logsumexp(logits)))
            if token in sampling.eos_ids:
                reason = "stop"
                break
            text = tokenizer.decode(ids)
            found = [place for stop in sampling.stop if (place := text.find(stop)) >= 0]
            if found:
                text, reason = text[: min(found)], "stop-string"
                break
        return Completion(tuple(ids), text=text, sampler_logprobs=tuple(logprobs), finish_reason=reason)

    def close(self) -> None:
        """There is nothing to let go."""

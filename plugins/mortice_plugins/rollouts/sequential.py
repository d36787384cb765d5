"""One answer after the other: the plain engine, which faster ones are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

from mortice.batch import Completion
from mortice.errors import DataError
from mortice.generation import Growing, prefill, scored_from
from mortice.protocols import EngineContext, Request, Sampling
from mortice.sampling import answer_seed


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
        model = self.context.model
        for index, request in enumerate(requests):
            if not request.ids:
                raise DataError(f"prompt {request.key!r} is empty")
            start = prefill(model, request.ids)
            for sample in range(sampling.samples):
                answer = Growing(sampling, self.context.tokenizer)
                for chosen in scored_from(model, start, sampling, answer_seed(sampling, request, sample)):
                    self.context.poll()
                    answer.add(chosen)
                    if answer.reason is not None:
                        break
                yield index, sample, answer.completion()

    def close(self) -> None:
        """There is nothing to let go."""

"""Many answers at once, from keys and values that are kept: continuous batching over shared prompts.

Every step is one forward over the next token of each answer under way, together with the prompts that come in
(`mortice.decoding`). An answer that ends leaves at once, and waiting ones come in as soon as the budget allows. The
budget is kept by reserving what an answer may come to, so nothing that was begun is ever thrown away.

What this leaves out: guessing tokens ahead, and sharing what different prompts begin with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from attrs import define, field, frozen

from mortice.batch import Completion, Group
from mortice.data import check_vocabulary
from mortice.decoding import Bundle, Prompt, bundled, forward
from mortice.errors import ConfigError, DataError
from mortice.generation import Growing
from mortice.linear import on_cpu
from mortice.model import Model
from mortice.options import ge, gt, option, optional
from mortice.protocols import EngineContext, Request, Sampling
from mortice.sampling import Draw, answer_seed, draw

PREFILL = 2048
"""Prompt tokens that come into one forward; a longer prompt comes alone."""
TOGETHER = 8
"""Where more wait, the rows divided by this are free before any comes in: rows that begin together are multiplied
together."""


@frozen
class KVCache:
    """Answers many prompts at once from cached keys and values; a prompt is run once for all its samples.

    An answer that ends makes room for those that wait. At most `rows` answers are under way, and what prompts and
    answers may come to stays within `cache_tokens`, and within `cache_limit` GB where that is given. Samples of one
    prompt begin together; only where not even an empty batch holds them all they come in parts.

    What is sampled depends on the seed, the request and the number of the sample, not on what else is in the batch.
    Products over other numbers of rows round in other ways, though, so that of two all but equally likely tokens the
    other one may come.
    """

    provides = frozenset({"token-ids", "logprobs-at-temperature", "weight-sync"})

    rows: int = option(64, help="most answers under way at once", validator=ge(1))
    cache_tokens: int = option(
        65536, help="most tokens in the cache: prompts, and answers at their full length", validator=ge(2)
    )
    cache_limit: float | None = option(
        None, help="GB that keys and values may take (default: no limit but cache_tokens)", validator=optional(gt(0.0))
    )

    def open(self, context: EngineContext) -> KVCacheEngine:
        return KVCacheEngine(self, context)


@define
class Statistics:
    """What an engine has done since it was opened."""

    forwards: int = 0
    prompts: int = 0
    """Run; once for all its samples, or once a part."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Sampled."""
    most_rows: int = 0
    """Answers under way at once."""
    most_reserved: int = 0
    """Tokens."""
    most_bytes: int = 0
    """That keys, values and states took."""


@frozen
class Cost:
    """Bytes that a token's keys and values take in each layer, with the layer's window, and those of a row's states."""

    layers: tuple[tuple[int, int | None], ...] = ()
    states: int = 0

    @classmethod
    def of(cls, prompt: Prompt) -> Cost:
        layers = tuple(
            (sum(x.shape[0] * x.shape[2] * x.dtype.size for x in pair), prompt.windows[layer])
            for layer, pair in prompt.kept.items()
        )
        return cls(layers, sum(x.nbytes for state in prompt.states.values() for x in state))

    def of_tokens(self, tokens: int) -> int:
        return sum(size * (tokens if window is None else min(tokens, window)) for size, window in self.layers)


@frozen(eq=False)
class _Asked:
    """Samples of one request that come in together."""

    index: int
    request: Request
    samples: range


@frozen(eq=False)
class _Row:
    """An answer under way."""

    asked: _Asked
    sample: int
    seed: int
    answer: Growing

    def draw(self, row: int) -> Draw:
        ids = self.answer.ids
        return Draw(row, self.seed, len(ids), self.asked.request.ids, ids)


@define(eq=False)
class _Cohort:
    """A bundle, and its rows in the bundle's order."""

    bundle: Bundle
    rows: list[_Row]

    def let_go(self) -> None:
        """Of the rows that have ended."""
        going_on = [i for i, row in enumerate(self.rows) if row.answer.reason is None]
        if len(going_on) < len(self.rows):
            self.rows = [self.rows[i] for i in self.bundle.keep(going_on)] if going_on else []


@frozen
class Bound:
    """One of the bounds of what is in the cache, in tokens or in bytes."""

    option: str
    most: float
    of_prompt: Callable[[int], int]
    """What a prompt of so many tokens takes."""
    row: int
    """What an answer may come to."""

    def taken(self, prompts: Sequence[int], rows: int) -> int:
        return sum(map(self.of_prompt, prompts)) + rows * self.row

    def refusal(self, request: Request, max_tokens: int) -> ConfigError:
        needed, most = self.taken([len(request.ids)], 1), self.most
        told = f"{needed:,} tokens of cache, and rollout.{self.option} is {most:,}"
        if self.option == "cache_limit":
            told = f"{needed / 1e9:.2g} GB of cache, and rollout.{self.option} is {most / 1e9:g}"
        return ConfigError(
            f"prompt {request.key!r} has {len(request.ids):,} tokens; with an answer of up to {max_tokens:,} it takes "
            + told
        )


@define(eq=False)
class _Batch:
    """What waits and what is under way in one call."""

    rows: int
    bounds: Sequence[Bound]
    waiting: deque[_Asked]
    cohorts: list[_Cohort] = field(factory=list)

    @property
    def under_way(self) -> list[_Row]:
        return [row for cohort in self.cohorts for row in cohort.rows]

    @property
    def lengths(self) -> list[int]:
        """Of the prompts that are held."""
        return [length for cohort in self.cohorts for length in cohort.bundle.lengths]

    def admit(self) -> list[_Asked]:
        """Take what comes in now from what waits."""
        free, lengths = self.rows - len(self.under_way), self.lengths
        wanted = sum(len(asked.samples) for asked in self.waiting)
        if self.cohorts and free < min(wanted, self.rows // TOGETHER):
            return []
        found: list[_Asked] = []
        run = 0
        while self.waiting:
            asked = self.waiting[0]
            length, count = len(asked.request.ids), len(asked.samples)
            rows = self.rows - free + count
            if count > free or any(b.taken([*lengths, length], rows) > b.most for b in self.bounds):
                break
            if run and run + length > PREFILL:
                break
            found.append(self.waiting.popleft())
            free, run = free - count, run + length
            lengths.append(length)
        return found


@define(eq=False)
class KVCacheEngine:
    options: KVCache
    context: EngineContext
    statistics: Statistics = field(factory=Statistics)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, int, Completion]]:
        model = self.context.model
        for request in requests:
            if not request.ids:
                raise DataError(f"prompt {request.key!r} is empty")
        check_vocabulary([Group(f"prompt {r.key!r}", r.ids, ()) for r in requests], model.output.vocab)
        if not requests:
            return
        model.read()
        bounds = self._bounds(model, requests[0], sampling.max_tokens)
        parts = [part for i, request in enumerate(requests) for part in self._parts(i, request, sampling, bounds)]
        # Prompts of like lengths come in together; the long ones first, so that the end is short.
        parts.sort(key=lambda asked: -len(asked.request.ids))
        batch = _Batch(self.options.rows, bounds, deque(parts))
        while batch.waiting or batch.cohorts:
            self.context.poll()
            for row in self._step(model, batch, sampling):
                yield row.asked.index, row.sample, row.answer.completion()

    def close(self) -> None:
        """There is nothing to let go."""

    def _bounds(self, model: Model, request: Request, longest: int) -> list[Bound]:
        bounds = [Bound("cache_tokens", self.options.cache_tokens, int, longest)]
        if self.options.cache_limit is not None:
            _, (prompt,) = forward(model, [request.ids[:1]], [], [])  # what a token takes is seen on one
            cost = Cost.of(prompt)
            row = cost.of_tokens(longest) + cost.states
            bounds.append(Bound("cache_limit", self.options.cache_limit * 1e9, cost.of_tokens, row))
        return bounds

    def _parts(self, index: int, request: Request, sampling: Sampling, bounds: Sequence[Bound]) -> Iterator[_Asked]:
        """All samples of a request, in as many parts as an empty batch asks for. Raises ConfigError where not even one
        fits."""
        most = self.options.rows
        for bound in bounds:
            most = min(most, int((bound.most - bound.of_prompt(len(request.ids))) // max(1, bound.row)))
            if most < 1:
                raise bound.refusal(request, sampling.max_tokens)
        for start in range(0, sampling.samples, most):
            yield _Asked(index, request, range(start, min(start + most, sampling.samples)))

    def _step(self, model: Model, batch: _Batch, sampling: Sampling) -> list[_Row]:
        """One forward: what is under way goes on, and what fits comes in. Returns the answers that ended."""
        coming, rows = batch.admit(), batch.under_way
        logits, prompts = forward(
            model,
            [asked.request.ids for asked in coming],
            [cohort.bundle for cohort in batch.cohorts],
            [row.answer.ids[-1] for row in rows],
        )
        draws = [row.draw(len(coming) + i) for i, row in enumerate(rows)]
        beginning = [self._begun(asked, sampling) for asked in coming]
        draws += [row.draw(i) for i, own in enumerate(beginning) for row in own]
        drawn = [*rows, *(row for own in beginning for row in own)]
        for row, chosen in zip(drawn, draw(logits, draws, sampling)):
            row.answer.add(chosen)
        for cohort in batch.cohorts:
            cohort.let_go()
        batch.cohorts = [cohort for cohort in batch.cohorts if cohort.rows]
        batch.cohorts += _cohorts(prompts, beginning, sampling.max_tokens)
        self._note(batch, coming, len(drawn))
        return [row for row in drawn if row.answer.reason is not None]

    def _begun(self, asked: _Asked, sampling: Sampling) -> list[_Row]:
        tokenizer = self.context.tokenizer
        return [
            _Row(asked, sample, answer_seed(sampling, asked.request, sample), Growing(sampling, tokenizer))
            for sample in asked.samples
        ]

    def _note(self, batch: _Batch, coming: Sequence[_Asked], drawn: int) -> None:
        s, rows = self.statistics, len(batch.under_way)
        s.forwards += 1
        s.prompts += len(coming)
        s.prompt_tokens += sum(len(asked.request.ids) for asked in coming)
        s.tokens += drawn
        s.most_rows = max(s.most_rows, rows)
        s.most_reserved = max(s.most_reserved, batch.bounds[0].taken(batch.lengths, rows))
        s.most_bytes = max(s.most_bytes, sum(cohort.bundle.nbytes for cohort in batch.cohorts))


def _cohorts(prompts: Sequence[Prompt], beginning: Sequence[Sequence[_Row]], longest: int) -> list[_Cohort]:
    """Rows that have their first token, with those behind prompts of like lengths."""
    left = [[row for row in rows if row.answer.reason is None] for rows in beginning]
    going_on = [(prompt, rows) for prompt, rows in zip(prompts, left) if rows]
    found = []
    for places in bundled([prompt.length for prompt, _ in going_on]):
        own = [going_on[i] for i in places]
        bundle = Bundle([prompt for prompt, _ in own], [len(rows) for _, rows in own], longest=longest, host=on_cpu())
        found.append(_Cohort(bundle, [row for _, rows in own for row in rows]))
    return found

"""One optimizer step's gradient: groups to micro-batches, terms and counts summed over all of them, one division.

Nothing here knows where groups come from or what the optimizer does with the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from attrs import define, evolve, field, frozen

from mortice.batch import Batch, Gradients, Group, Limits, MicroBatch
from mortice.context import Randomness, SpanContext
from mortice.data import check_vocabulary
from mortice.errors import TrainingError
from mortice.model import Model
from mortice.objective import (
    Counts,
    Objective,
    ObjectiveResult,
    Statistics,
    WeightedLoss,
    count_terms,
    hidden_states,
    loss_label,
    make_batch,
    number,
    requirements,
)
from mortice.protocols import Backward, Head, Layout, Params
from mortice.rows import read_through


@frozen(eq=False)
class Engine:
    """The strategies that turn groups into a loss and a gradient, put together for one model."""

    model: Model
    head: Head
    backward: Backward
    layout: Layout
    losses: tuple[WeightedLoss, ...] = ()
    limits: Limits = field(factory=Limits)
    attention_chunk: int | None = None
    mlp_chunk: int = 0
    temperature: float = 1.0

    def __attrs_post_init__(self) -> None:
        ready = getattr(self.head, "ready", None)
        if ready is not None:
            ready()

    @property
    def requires(self) -> frozenset[str]:
        return requirements(self.losses)

    def contexts(self, micro: MicroBatch, randomness: Randomness | None = None) -> list[SpanContext]:
        return [
            SpanContext(
                row, attention_chunk=self.attention_chunk, mlp_chunk=self.mlp_chunk, randomness=randomness
            )
            for row in micro.rows
        ]  # fmt: skip

    def arrange(self, groups: Sequence[Group]) -> Arranged:
        """Micro-batches, what losses see of them, and the counts of the whole step. No forward is run.

        Raises DataError for a token id outside the vocabulary.
        """
        micros = self.lay_out(groups)
        batches = [make_batch(micro, self.requires) for micro in micros]
        counts: dict[tuple[int, str], float] = {}
        for batch in batches:
            for name, count in count_terms(self.losses, batch).items():
                counts[name] = counts.get(name, 0.0) + count
        return Arranged(tuple(micros), tuple(batches), counts)

    def lay_out(self, groups: Sequence[Group]) -> list[MicroBatch]:
        """The micro-batches of these groups as `gradients` and `evaluate` make them. Raises DataError for a token id
        outside the vocabulary."""
        check_vocabulary(groups, self.model.output.vocab)
        prompts = "prompt_logprobs" in self.requires
        if not getattr(self.head, "reads_last", False):
            return self.layout(groups, self.limits, prompt_targets=prompts)
        read = [read_through(group) for group in groups]
        given = {id(one): group for one, group in zip(read, groups)}
        return [
            evolve(micro, given=[given[id(group)] for group in micro.groups])
            for micro in self.layout(read, self.limits, prompt_targets=prompts)
        ]

    def _statistics(
        self, params: Params, groups: Sequence[Group], arranged: Arranged, past: Statistics, poll: Callable[[], None],
        *, as_trained: bool,
    ) -> dict[tuple[int, str], tuple[float, float]]:  # fmt: skip
        """What losses go by beyond their micro-batch: of the past as given, else from a forward without gradient, the
        one by which the reference was scored, so that equal policies are exactly equal."""
        found = {
            (i, name): past.get((i, name), (0.0, 0.0))
            for i, loss in enumerate(self.losses)
            if loss.statistics_of == "past"
            for name in loss.statistics_names(arranged.batches[0])
        }
        for kind in ("step", "unrelated"):
            asking = [(i, loss) for i, loss in enumerate(self.losses) if loss.statistics_of == kind]
            if not asking:
                continue
            if kind == "step":
                pieces = list(zip(arranged.micros, arranged.batches))
            else:
                micros = self.lay_out([group.unrelated for group in groups if group.unrelated is not None])
                pieces = [(micro, make_batch(micro, self.requires & {"ref_logprobs"})) for micro in micros]
            for micro, batch in pieces:
                poll()
                scores = self._scored(params, micro, as_trained=as_trained and kind == "step").scores
                for i, loss in asking:
                    more = loss.statistics(scores, batch)
                    found = added(found, {(i, name): pair for name, pair in more.items()})
        return found

    def past_after(self, past: Statistics, tally: Tally) -> Statistics:
        """The statistics of past steps once a step is among them. One that is not finite is left out."""
        if not all(math.isfinite(number) for pair in tally.statistics.values() for number in pair):
            return past
        kept = {}
        for (i, name), (total, count) in past.items():
            share = getattr(self.losses[i].loss, "statistics_decay", 1.0)
            kept[i, name] = share * total, share * count
        return added(kept, tally.statistics)

    def gradients(
        self,
        params: Params,
        groups: Sequence[Group],
        randomness: Randomness | None = None,
        poll: Callable[[], None] = lambda: None,
        past: Statistics | None = None,
    ) -> tuple[Tally, Gradients]:
        """Loss and gradient of one optimizer step over any number of groups.

        `poll` is called before each micro-batch and may raise to abandon the step. `past` are the statistics of the
        steps before. Raises TrainingError where nothing is scored.
        """
        arranged = self.arrange(groups)
        self.model.read()
        tally = Tally.start(self.losses, arranged.counts)
        statistics = self._statistics(params, groups, arranged, past or {}, poll, as_trained=True)
        total: Gradients = {}
        for micro, batch in zip(arranged.micros, arranged.batches):
            poll()
            if not any(row.scored for row in micro.rows):
                continue
            objective = Objective(
                self.model, self.head, micro, losses=self.losses, batch=batch, counts=arranged.counts,
                statistics=statistics, temperature=self.temperature, trainable=params,
            )  # fmt: skip
            result, found = self.backward(self.model, params, self.contexts(micro, randomness), objective)
            total = found if not total else {name: total[name] + value for name, value in found.items()}
            mx.eval(total)
            tally.add(micro, batch, result)
        return tally, total

    def evaluate(
        self, params: Params, groups: Sequence[Group], poll: Callable[[], None] = lambda: None,
        past: Statistics | None = None,
    ) -> Tally:  # fmt: skip
        """The same loss and metrics over groups, without a gradient and without dropout; each row once."""
        arranged = self.arrange(groups)
        self.model.read()
        self.model.bind(params)
        tally = Tally.start(self.losses, arranged.counts)
        statistics = self._statistics(params, groups, arranged, past or {}, poll, as_trained=False)
        for micro, batch in zip(arranged.micros, arranged.batches):
            poll()
            objective = Objective(
                self.model, self.head, micro, losses=self.losses, batch=batch, counts=arranged.counts,
                statistics=statistics, temperature=self.temperature,
            )  # fmt: skip
            tally.add(micro, batch, objective(hidden_states(self.model, self.contexts(micro)), grad=False))
        return tally

    def logprobs(
        self, params: Params, groups: Sequence[Group], *, as_trained: bool = False
    ) -> list[list[tuple[float, ...]]]:
        """Log-probability of every completion token, `[group][completion][token]`; NaN outside the loss mask.

        To the last bit those that `evaluate` goes by, or with `as_trained` those of `gradients`.
        """
        found: dict[int, list[tuple[float, ...]]] = {}  # by identity, since a layout may change the order
        for micro in self.lay_out(groups):
            found |= zip(map(id, micro.given), self.scores(params, micro, as_trained=as_trained))
        return [found[id(group)] for group in groups]

    def scores(
        self, params: Params, micro: MicroBatch, *, as_trained: bool = False
    ) -> list[list[tuple[float, ...]]]:  # fmt: skip
        """`logprobs` of one micro-batch."""
        return split_scores(micro, self._scored(params, micro, as_trained=as_trained))

    def _scored(self, params: Params, micro: MicroBatch, *, as_trained: bool) -> ObjectiveResult:
        self.model.read()
        self.model.bind(params)
        objective = Objective(
            self.model, self.head, micro, losses=self.losses, temperature=self.temperature, trainable=params
        )
        contexts = self.contexts(micro)
        if not as_trained:
            return objective.scored(hidden_states(self.model, contexts), traced=False, grad=False)
        if hasattr(self.backward, "score"):
            return self.backward.score(self.model, params, contexts, objective)
        # The whole of it then, for nothing but its forward.
        objective = Objective(self.model, self.head, micro, temperature=self.temperature, trainable=params)
        return self.backward(self.model, params, contexts, objective)[0]


@frozen(eq=False)
class Arranged:
    """What is known of a step before any forward."""

    micros: tuple[MicroBatch, ...]
    batches: tuple[Batch, ...]
    counts: Counts


def split_scores(micro: MicroBatch, result: ObjectiveResult) -> list[list[tuple[float, ...]]]:
    """What the head gave, `[M]`, back to `[group][completion][token]`: log-probabilities, or values where it has those.

    NaN for tokens that were not scored, prompt targets left out. Of a head that reads the last token alone, one value.
    """
    scores = result.scores
    values: Any = (scores.logprobs if scores.values is None else scores.values).tolist()
    grid = [[math.nan] * len(c.ids) for _, _, _, c in micro.completions()]
    at = 0
    for row in micro.rows:
        for owner, place, is_prompt in zip(row.owner, row.place, row.is_prompt):
            if not is_prompt:
                grid[owner][place] = values[at]
            at += 1
    out, first = [], 0
    for group, given in zip(micro.groups, micro.given):
        from_ = 0 if group is given else -1
        out.append([tuple(x[from_:]) for x in grid[first : first + len(group.completions)]])
        first += len(group.completions)
    return out


@define(eq=False)
class Tally:
    """Terms, counts and metrics, summed up over the micro-batches of a step; one division at the end."""

    losses: tuple[WeightedLoss, ...]
    counts: Counts
    loss: float = 0.0
    totals: dict[tuple[int, str], float] = field(factory=dict)
    metrics: dict[str, tuple[float, float]] = field(factory=dict)
    statistics: dict[tuple[int, str], tuple[float, float]] = field(factory=dict)
    """Of losses that go by those of past steps: what this step adds to them."""
    tokens: int = 0
    """Tokens that ran through the model."""
    pairs: int = 0
    identical_pairs: int = 0
    """Pairs whose two answers are the same: there is nothing to prefer."""
    _scores: dict[int, list[tuple[float, ...]]] = field(factory=dict)

    def scores(self, groups: Sequence[Group]) -> list[list[tuple[float, ...]]]:
        """`[group][completion][token]` of the groups that were scored, in the order in which they are given here: as
        `split_scores` has them."""
        return [self._scores[id(group)] for group in groups]

    @classmethod
    def start(cls, losses: tuple[WeightedLoss, ...], counts: Counts) -> Tally:
        if losses and not any(counts.values()):
            terms = ", ".join(sorted({name for _, name in counts})) or "none"
            raise TrainingError(f"nothing is scored in this step: every term of the loss has a count of 0 ({terms})")
        return cls(losses, counts)

    def add(self, micro: MicroBatch, batch: Batch, result: ObjectiveResult) -> None:
        """Take one micro-batch in."""
        mx.eval(result.loss, result.terms, result.metrics, result.scores.logprobs)
        self.loss += number(result.loss)
        self.tokens += micro.tokens
        for key, total in result.terms.items():
            self.totals[key] = self.totals.get(key, 0.0) + number(total)
        for name, (total, count) in result.metrics.items():
            old = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = (old[0] + number(total), old[1] + number(count))
        for group in micro.given:
            self.pairs += len(group.pairs)
            self.identical_pairs += sum(group.completions[c].ids == group.completions[r].ids for c, r in group.pairs)
        for i, loss in enumerate(self.losses):
            if loss.statistics_of == "past":
                found = loss.statistics(result.scores, batch)
                self.statistics |= added(self.statistics, {(i, name): pair for name, pair in found.items()})
        self._scores |= zip(map(id, micro.given), split_scores(micro, result))

    def values(self) -> dict[str, float]:
        """`loss`, each term's own mean and each metric, and how many pairs there were, where a loss goes by pairs. With
        several losses a term carries its loss's name."""
        found = {"loss": self.loss}
        if "pairs" in requirements(self.losses):
            found |= {"pairs": self.pairs, "identical_pairs": self.identical_pairs}
        for (i, name), total in self.totals.items():
            label = name if len(self.losses) == 1 else f"{loss_label(self.losses, i)}/{name}"
            count = self.counts[i, name]
            found[label] = total / count if count else 0.0
        found |= {name: total / count for name, (total, count) in self.metrics.items() if count}
        return found


def saved_statistics(losses: Sequence[WeightedLoss], past: Statistics) -> dict[str, dict[str, list[float]]]:
    """As JSON holds them: by the loss's name, numbered where several have one."""
    found: dict[str, dict[str, list[float]]] = {}
    for (i, name), pair in past.items():
        found.setdefault(loss_label(losses, i), {})[name] = list(pair)
    return found


def restored_statistics(
    losses: Sequence[WeightedLoss], saved: Mapping[str, Mapping[str, Sequence[float]]]
) -> Statistics:  # fmt: skip
    """The inverse of `saved_statistics`. Raises KeyError for a loss that there is not."""
    places = {loss_label(losses, i): i for i in range(len(losses))}
    return {
        (places[label], name): (float(total), float(count))
        for label, named in saved.items()
        for name, (total, count) in named.items()
    }


def added(one: Statistics, other: Statistics) -> dict[tuple[int, str], tuple[float, float]]:
    """Totals and counts of both together."""
    found = dict(one)
    for key, (total, count) in other.items():
        before = found.get(key, (0.0, 0.0))
        found[key] = before[0] + total, before[1] + count
    return found


def global_norm(gradients: Gradients) -> mx.array:
    """The float32 norm over all gradients together."""
    squares = [mx.sum(mx.square(g.astype(mx.float32))) for g in gradients.values()]
    return mx.sqrt(mx.sum(mx.stack(squares)))


def clip(gradients: Gradients, max_norm: float) -> tuple[Gradients, float]:
    """Gradients scaled down to `max_norm` where their norm is larger (0 turns it off), and their norm before it."""
    norm = global_norm(gradients)
    value = number(norm)
    if max_norm and math.isfinite(value) and value > max_norm:
        scale = max_norm / value
        gradients = {name: g * scale for name, g in gradients.items()}
    return gradients, value

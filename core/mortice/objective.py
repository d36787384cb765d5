"""The objective: hidden states to (loss, d hidden). It is where losses, heads and backward strategies meet.

    hidden → head → TokenLogprobs → loss → d logprob → d hidden

A loss sees log-probabilities, a head sees hidden states, a backward strategy sees this closure; none knows the
others. Called outside every transform the objective runs the head eagerly, tile by tile; `traced` is the same
inside one `value_and_grad`, where the head's own gradient stands as a custom vjp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
from attrs import evolve, field, frozen

from mortice import staging
from mortice.batch import LABEL, Batch, Completion, Gradients, LossOutput, MicroBatch, TokenLogprobs
from mortice.linear import on_cpu
from mortice.model import Model, Output
from mortice.protocols import Head, Loss


@frozen
class WeightedLoss:
    """One of the losses that a run adds up."""

    name: str
    loss: Loss
    weight: float = 1.0

    @property
    def requires(self) -> frozenset[str]:
        return frozenset(getattr(self.loss, "requires", ()))

    @property
    def from_start(self) -> Mapping[str, str]:
        return getattr(self.loss, "from_start", {})

    @property
    def statistics_of(self) -> str | None:
        """Where the numbers come from that the loss goes by: `step`, `unrelated`, `past`, or None."""
        return getattr(self.loss, "statistics_of", None)

    def statistics(self, scores: TokenLogprobs, batch: Batch) -> dict[str, tuple[float, float]]:
        """(total, count) of each of them in one micro-batch."""
        loss: Any = self.loss
        found = loss.statistics(scores, batch)
        return {name: (number(total), number(count)) for name, (total, count) in found.items()}

    def statistics_names(self, batch: Batch) -> list[str]:
        return [] if self.statistics_of is None else list(self.statistics(placeholder_scores(batch), batch))


Counts = Mapping[tuple[int, str], float]
"""(index of the loss, term) → the count of the whole optimizer step."""
Statistics = Mapping[tuple[int, str], tuple[float, float]]
"""(index of the loss, name) → total and count of a number that the loss goes by."""


def requirements(losses: Sequence[WeightedLoss]) -> frozenset[str]:
    """What all losses of a run need together."""
    return frozenset().union(*(loss.requires for loss in losses))


def make_batch(micro: MicroBatch, requires: frozenset[str] = frozenset()) -> Batch:
    """What a loss sees of a micro-batch. Per-token vectors of the completions are laid out as the rows score them.

    Raises ValueError where a completion lacks `ref_logprobs`, `old_logprobs` or `sampler_logprobs` that `requires`
    names.
    """
    owner = np.concatenate([row.owner for row in micro.rows])  # [M]
    place = np.concatenate([row.place for row in micro.rows])
    is_prompt = np.concatenate([row.is_prompt for row in micro.rows])
    completions = list(micro.completions())
    count = len(completions)
    owners = (owner[None, :] == np.arange(count)[:, None]) & ~is_prompt[None, :]  # [C, M]

    group_index = np.repeat(np.arange(len(micro.groups)), [len(g.completions) for g in micro.groups])
    first = np.concatenate([[0], np.cumsum([len(g.completions) for g in micro.groups])])
    pairs = [(first[i] + c, first[i] + r) for i, group in enumerate(micro.groups) for c, r in group.pairs]

    own = [w for group in micro.groups for w in group.pair_weights or (1.0,) * len(group.pairs)]
    pair_weights = [completions[chosen][3].weight * weight for (chosen, _), weight in zip(pairs, own)]

    def per_token(name: str) -> mx.array | None:
        vectors = [getattr(c, name) for _, _, _, c in completions]
        if all(v is None for v in vectors) and name not in requires:
            return None
        for vector, (_, group, k, _) in zip(vectors, completions):
            if vector is None:
                raise ValueError(f"completion {k} of group {group.id!r} has no {name}")
        values = [0.0 if p else vectors[o][j] for o, j, p in zip(owner, place, is_prompt)]
        return mx.array(np.asarray(values, dtype=np.float32))

    def per_completion(values: list[float | None], default: float) -> mx.array:
        return mx.array(np.asarray([default if v is None else v for v in values], dtype=np.float32))

    extras = sorted({name for _, _, _, c in completions for name in c.extras})
    preferred, other = ({int(pair[side]) for pair in pairs} for side in (0, 1))

    def label(index: int, completion: Completion) -> float | None:
        told = completion.extras.get(LABEL)
        if told is None and (index in preferred) != (index in other):
            told = float(index in preferred)
        return told

    return Batch(
        owner=mx.array(owner),
        is_prompt=mx.array(is_prompt),
        pairs=mx.array(np.asarray(pairs, dtype=np.int32).reshape(-1, 2)),
        pair_weights=mx.array(np.asarray(pair_weights, dtype=np.float32)),
        group=mx.array(group_index.astype(np.int32)),
        lengths=mx.array(owners.sum(axis=1).astype(np.float32)),
        advantages=per_completion([c.advantage for _, _, _, c in completions], 0.0),
        weights=per_completion([c.weight for _, _, _, c in completions], 1.0),
        rewards=per_completion([c.reward for _, _, _, c in completions], 0.0),
        labels=per_completion([label(i, c) for i, _, _, c in completions], float("nan")),
        owners=mx.array(owners),
        groups=len(micro.groups),
        old_logprobs=per_token("old_logprobs"),
        ref_logprobs=per_token("ref_logprobs"),
        sampler_logprobs=per_token("sampler_logprobs"),
        extras={n: per_completion([c.extras.get(n) for _, _, _, c in completions], float("nan")) for n in extras},
    )


def count_terms(losses: Sequence[WeightedLoss], batch: Batch) -> dict[tuple[int, str], float]:
    """The count of every term of every loss in one micro-batch, known before any forward."""
    counts: dict[tuple[int, str], float] = {}
    for index, weighted in enumerate(losses):
        own = getattr(weighted.loss, "counts", None)
        if own is not None:
            found = own(batch)
        else:
            nothing = {name: mx.array(0.0) for name in weighted.statistics_names(batch)}
            output = weighted.loss(placeholder_scores(batch), evolve(batch, statistics=nothing))
            found = {name: count for name, (_, count) in output.terms.items()}
        for name, count in found.items():
            counts[index, name] = number(count)
    return counts


def placeholder_scores(batch: Batch) -> TokenLogprobs:
    """Scores that stand in where only counts and names matter."""
    flat = mx.full((batch.owner.shape[0],), -1.0)
    return TokenLogprobs(flat, lse=flat, entropy=flat, values=flat)


def number(value: Any) -> float:
    """A Python number of a one-element array, or of a number."""
    plain: Any = value.item() if isinstance(value, mx.array) else value
    return float(plain)


@frozen(eq=False)
class ObjectiveResult:
    """What the objective found in one micro-batch."""

    loss: mx.array
    """This micro-batch's part of the step's loss: Σ weight · total / count of the whole step."""
    scores: TokenLogprobs
    terms: Mapping[tuple[int, str], mx.array] = field(factory=dict)
    """(index of the loss, term) → total."""
    metrics: Mapping[str, tuple[mx.array, mx.array]] = field(factory=dict)
    """name → (total, count)."""
    dhidden: list[mx.array] | None = None
    """d loss / d hidden of every row, `[T, D]`."""
    gradients: Gradients = field(factory=dict)
    """Of the output's own parameters, where they train."""


class Objective:
    """Loss and `d hidden` of one micro-batch, divided by the counts of the whole step.

    Without losses it only scores. `params` names what trains: output parameters among them get gradients.
    """

    def __init__(
        self,
        model: Model,
        head: Head,
        micro: MicroBatch,
        *,
        losses: Sequence[WeightedLoss] = (),
        batch: Batch | None = None,
        counts: Counts | None = None,
        statistics: Statistics | None = None,
        temperature: float = 1.0,
        trainable: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self._head = model, head
        self._losses, self._counts = losses, counts or {}
        self._batch = batch
        self._statistics: dict[int, dict[str, mx.array]] = {}
        for (i, name), (total, count) in (statistics or {}).items():
            self._statistics.setdefault(i, {})[name] = mx.array(total / count if count else 0.0)
        self._temperature = temperature
        self._trainable = trainable or {}
        self._index = [mx.array(row.index) for row in micro.rows]
        self._targets = mx.array(np.concatenate([row.target for row in micro.rows]))  # [M]
        self._entropy = "entropy" in requirements(losses)
        self._primary = "values" if "values" in getattr(head, "provides", ()) else "logprobs"

    def __call__(self, hiddens: Sequence[mx.array], *, grad: bool = True) -> ObjectiveResult:
        """Outside every transform: hidden states of every row `[T, D]` to loss and `d hidden`."""
        output = self._output()
        hidden = self._gather(hiddens)
        scores = self._head.score(hidden, self._targets, output, grad=grad, entropy=self._entropy)
        primary = getattr(scores, self._primary)
        if not grad:
            loss, terms, metrics = self._loss(scores, primary)
            return ObjectiveResult(loss, scores, terms, metrics)

        (loss, terms, metrics), dprimary = mx.value_and_grad(lambda x: self._loss(scores, x))(primary)
        assert scores.dhidden is not None
        dscored = dprimary[:, None] * scores.dhidden  # [M, D]
        mx.eval(loss, terms, metrics, dscored)
        scores = evolve(scores, dhidden=None)
        gradients: Gradients = {}
        if self._output_names(output):
            assert scores.lse is not None
            gradients = self._head.output_gradients(hidden, self._targets, output, dprimary, scores.lse)
            gradients = {name: gradients[name] for name in self._output_names(output)}
        return ObjectiveResult(loss, scores, terms, metrics, self._scatter(dscored, hiddens), gradients)

    def traced(self, hiddens: Sequence[mx.array]) -> tuple[mx.array, tuple[Any, Any, TokenLogprobs]]:
        """Inside one `value_and_grad`: the loss, and (terms, metrics, scores)."""
        scores = self._traced_scores(hiddens)
        loss, terms, metrics = self._loss(scores, getattr(scores, self._primary))
        return loss, (terms, metrics, scores)

    def scored(self, hiddens: Sequence[mx.array], *, traced: bool, grad: bool = True) -> ObjectiveResult:
        """What the head finds, and no loss: to the last bit what a step finds that runs it inside its trace
        (`traced`), or outside. `grad=False`: what evaluation finds. A head may cut its work in another way where it
        makes the unit gradient too, and then rounds in another way."""
        if traced:
            scores = self._traced_scores(hiddens)
        else:
            hidden, output = self._gather(hiddens), self._output()
            scores = self._head.score(hidden, self._targets, output, grad=grad, entropy=self._entropy)
        return ObjectiveResult(mx.array(0.0), evolve(scores, dhidden=None))

    def _traced_scores(self, hiddens: Sequence[mx.array]) -> TokenLogprobs:
        hidden, output = self._gather(hiddens), self._output()
        if getattr(self._head, "differentiable", False):
            return self._head.score(hidden, self._targets, output, entropy=self._entropy, traced=True)
        return self._with_own_vjp(hidden, output)

    def _with_own_vjp(self, hidden: mx.array, output: Output) -> TokenLogprobs:
        """The head as one custom function: its vjp is the unit gradient times the cotangent."""
        names = self._output_names(output)
        head, targets, primary = self._head, self._targets, self._primary

        def with_values(values: Sequence[mx.array]) -> Output:
            return output.with_parameters(dict(zip(names, values)))

        @mx.custom_function
        def score(hidden: mx.array, *values: mx.array) -> tuple[mx.array, ...]:
            s = head.score(hidden, targets, with_values(values), grad=True, entropy=self._entropy, traced=True)
            assert s.dhidden is not None
            value = getattr(s, primary)
            zeros = mx.zeros_like(value)
            lse = zeros if s.lse is None else s.lse
            return value, lse, zeros if s.entropy is None else s.entropy, s.dhidden, s.logprobs

        @score.vjp
        def score_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
            hidden, values = primals[0], primals[1:]
            dprimary = cotangents[0]
            dhidden = (dprimary[:, None] * outputs[3]).astype(hidden.dtype)
            if not names:
                return (dhidden,)
            found = head.output_gradients(hidden, targets, with_values(values), dprimary, outputs[1], traced=True)
            return (dhidden, *(found[name].astype(v.dtype) for name, v in zip(names, values)))

        bound = output.parameters()
        found: Any = score(hidden, *(bound[name] for name in names))
        value, lse, entropy = found[0], mx.stop_gradient(found[1]), mx.stop_gradient(found[2])
        logprobs = mx.stop_gradient(found[4])
        scores = TokenLogprobs(logprobs, lse=lse, entropy=entropy if self._entropy else None)
        return evolve(scores, **{primary: value})

    def _output(self) -> Output:
        own = getattr(self._head, "output_for", None)
        output = self._model.output if own is None else own(self._model)
        return output if self._temperature == 1.0 else output.at_temperature(self._temperature)

    def _output_names(self, output: Output) -> list[str]:
        return [name for name in output.parameters() if name in self._trainable]

    def _gather(self, hiddens: Sequence[mx.array]) -> mx.array:
        return mx.concatenate([h[index] for h, index in zip(hiddens, self._index)])  # [M, D]

    def _scatter(self, dscored: mx.array, hiddens: Sequence[mx.array]) -> list[mx.array]:
        """`[M, D]` back to `[T, D]` of every row; several targets may read one hidden state."""
        cuts = np.cumsum([index.shape[0] for index in self._index])[:-1].tolist()
        return [
            mx.zeros(h.shape).at[index].add(part).astype(h.dtype)
            for h, index, part in zip(hiddens, self._index, mx.split(dscored, cuts))
        ]

    def _loss(self, scores: TokenLogprobs, primary: mx.array) -> tuple[mx.array, dict, dict]:
        """(loss, totals of the terms, (total, count) of the metrics), as a function of the head's scores."""
        scores = evolve(scores, **{self._primary: primary})
        loss = mx.array(0.0)
        terms: dict[tuple[int, str], mx.array] = {}
        metrics: dict[str, tuple[mx.array, mx.array]] = {}
        for i, weighted in enumerate(self._losses):
            assert self._batch is not None
            batch = evolve(self._batch, statistics=self._statistics[i]) if i in self._statistics else self._batch
            found = weighted.loss(scores, batch)
            for name, (total, _) in found.terms.items():
                terms[i, name] = mx.array(total, dtype=mx.float32) if not isinstance(total, mx.array) else total
                count = self._counts[i, name]
                if count:
                    loss = loss + weighted.weight * found.weights.get(name, 1.0) * terms[i, name] / count
            for name, value in _metrics(found, self._batch.groups).items():
                metrics[f"{loss_label(self._losses, i)}/{name}" if name in metrics else name] = value
        return loss, terms, metrics


def loss_label(losses: Sequence[WeightedLoss], i: int) -> str:
    """A loss's name, numbered from the second of that name on."""
    same = sum(loss.name == losses[i].name for loss in losses[:i])
    return losses[i].name if not same else f"{losses[i].name}-{same + 1}"


def _metrics(found: LossOutput, groups: int) -> dict[str, tuple[mx.array, mx.array]]:
    out = {}
    for name, value in found.metrics.items():
        total, count = value if isinstance(value, tuple) else (value * groups, groups)
        out[name] = (mx.stop_gradient(mx.array(total)), mx.stop_gradient(mx.array(count)))
    return out


def hidden_states(model: Model, contexts: Sequence[Any], *, blocks_at_once: int = 2) -> list[mx.array]:
    """Hidden states of every row without any gradient, a few blocks at a time: memory of one residual stream."""
    hiddens = []
    for ctx in contexts:
        carry = model.begin(ctx, ctx.tokens)
        for start in range(0, len(model.blocks), blocks_at_once):
            with staging.eagerly() if on_cpu() else nullcontext():
                carry = model.run(carry, ctx, start, start + blocks_at_once)
            mx.eval(carry)
        hiddens.append(model.finish(carry))
        mx.eval(hiddens[-1])
    return hiddens

"""Conformance of losses: subclass `LossSuite` in a pytest file and set `loss`.

    class TestMargin(LossSuite):
        loss = Margin(gamma=2.0)

The groups are made from what the loss `requires`; override `groups` where it needs more (`extras`, one completion).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve

from mortice.batch import LABEL, SCORE, Batch, Group, LossOutput, TokenLogprobs
from mortice.objective import WeightedLoss
from mortice.protocols import Loss
from mortice.testing.batches import make_batch, make_group, make_scores

REQUIREMENTS = frozenset(
    {
        *("pairs", "groups", "labels", "scores", "advantages", "unrelated"),
        *("ref_logprobs", "old_logprobs", "sampler_logprobs", "prompt_logprobs", "entropy", "values"),
    }
)
"""Everything that `requires` may name."""


def loss_value(outputs: Sequence[LossOutput]) -> float:
    """The loss of a step: totals and counts summed over its micro-batches, then one division a term."""
    value = 0.0
    for name in outputs[0].terms:
        total = sum(number(output.terms[name][0]) for output in outputs)
        count = sum(number(output.terms[name][1]) for output in outputs)
        value += outputs[0].weights.get(name, 1.0) * total / count if count else 0.0
    return value


def number(value: Any) -> float:
    item: Any = mx.array(value).item()
    return float(item)


class LossSuite:
    """What every loss must do. Set `loss` to the configured strategy."""

    loss: ClassVar[Loss]

    @property
    def requires(self) -> frozenset[str]:
        return frozenset(getattr(self.loss, "requires", ()))

    def groups(self) -> list[Group]:
        """Four groups (as many when overridden) of unequal lengths, with everything that the loss requires."""
        if "pairs" in self.requires:
            lengths: list[tuple[int, ...]] = [(3, 5), (1, 2), (4, 4), (7, 1)]
        elif self.requires & {"groups", "advantages"}:
            lengths = [(3, 5, 2), (1, 2, 4), (4, 4, 1), (7, 1, 3)]
        else:
            lengths = [(3,), (1,), (4,), (7,)]
        pairs = [(0, 1)] if "pairs" in self.requires else []
        groups = [make_group(f"g{i}", *each, prompt=2 + i, pairs=pairs) for i, each in enumerate(lengths)]
        return [self._filled(group, seed) for seed, group in enumerate(groups)]

    def _filled(self, group: Group, seed: int) -> Group:
        """Advantages, rewards, labels, ratings, old and reference log-probabilities, drawn with this seed."""
        rng = np.random.default_rng(100 + seed)
        return group.with_completions(
            [
                evolve(
                    completion,
                    advantage=float(rng.normal()),
                    reward=float(rng.normal()),
                    extras={LABEL: float((seed + k) % 2), SCORE: float(rng.normal()), **completion.extras},
                    old_logprobs=(-rng.uniform(0.2, 3.0, len(completion.ids))).tolist(),
                    ref_logprobs=(-rng.uniform(0.2, 3.0, len(completion.ids))).tolist(),
                    sampler_logprobs=(-rng.uniform(0.2, 3.0, len(completion.ids))).tolist(),
                )
                for k, completion in enumerate(group.completions)
            ]
        )

    def scores(self, groups: Sequence[Group], constant: float | None = None) -> TokenLogprobs:
        """Log-probabilities that belong to the group's id, or one constant for all tokens."""
        logprobs, prompts = [], []
        for group in groups:
            rng = np.random.default_rng([ord(c) for c in group.id])
            low, high = (-4.0, -0.1) if constant is None else (constant, constant)
            logprobs.append([rng.uniform(low, high, len(c.ids)).tolist() for c in group.completions])
            prompts.append(rng.uniform(low, high, len(group.prompt_ids) - 1).tolist())
        scores = make_scores(groups, logprobs, self.requires, prompts=prompts)
        return evolve(scores, entropy=-scores.logprobs, values=scores.logprobs)

    def batch(self, groups: Sequence[Group], step: Sequence[Group] | None = None) -> Batch:
        """What the loss sees of the groups in a step of just these, or of others too.

        Statistics are those of the step's own scores, wherever a run takes them from."""
        batch, loss = make_batch(groups, self.requires), WeightedLoss("loss", self.loss)
        if loss.statistics_of is None:
            return batch
        whole = groups if step is None else step
        found = loss.statistics(self.scores(whole), make_batch(whole, self.requires))
        return evolve(batch, statistics={name: mx.array(total / count) for name, (total, count) in found.items()})

    def value_and_gradient(self, groups: Sequence[Group], scores: TokenLogprobs) -> tuple[LossOutput, mx.array]:
        """What the loss returns, and the gradient of the sum of its weighted terms by what the head gives, `[M]`."""
        batch = self.batch(groups)
        primary = "values" if "values" in self.requires else "logprobs"

        def weighted(x: mx.array) -> mx.array:
            output = self.loss(evolve(scores, **{primary: x}), batch)
            parts = [output.weights.get(name, 1.0) * total for name, (total, _) in output.terms.items()]
            return mx.stack([mx.array(part) for part in parts]).sum()

        return self.loss(scores, batch), mx.grad(weighted)(getattr(scores, primary))

    def test_requires_what_there_is(self) -> None:
        assert self.requires <= REQUIREMENTS

    def test_statistics_say_what_they_are_of(self) -> None:
        of = getattr(self.loss, "statistics_of", None)
        assert of in (None, "step", "unrelated", "past")
        assert ("unrelated" in self.requires) == (of == "unrelated")

    def test_terms_are_totals_and_counts(self) -> None:
        groups = self.groups()
        output = self.loss(self.scores(groups), self.batch(groups))
        assert output.terms
        assert set(output.weights) <= set(output.terms)
        for total, count in output.terms.values():
            assert math.isfinite(number(total))
            assert number(count) > 0
        for value in output.metrics.values():
            assert all(math.isfinite(number(v)) for v in (value if isinstance(value, tuple) else (value,)))

    def test_is_pure(self) -> None:
        groups = self.groups()
        batch, scores = self.batch(groups), self.scores(groups)
        before = mx.array(scores.logprobs)
        values = [loss_value([self.loss(scores, batch)]) for _ in range(3)]
        assert len(set(values)) == 1
        assert mx.array_equal(scores.logprobs, before).item()

    def test_counts_do_not_depend_on_scores(self) -> None:
        groups = self.groups()
        batch = self.batch(groups)

        def counts(scores: TokenLogprobs) -> dict[str, float]:
            return {name: number(count) for name, (_, count) in self.loss(scores, batch).terms.items()}

        expected = counts(self.scores(groups))
        assert counts(self.scores(groups, -1.0)) == expected
        own = getattr(self.loss, "counts", None)
        if own is not None:
            assert {name: number(count) for name, count in own(batch).items()} == expected

    def test_gradient_reaches_the_scores(self) -> None:
        groups = self.groups()
        _, gradient = self.value_and_gradient(groups, self.scores(groups))
        assert mx.isfinite(gradient).all().item()
        assert gradient.any().item()

    @pytest.mark.parametrize("constant", [0.0, -1e-8, -60.0])
    def test_finite_where_probabilities_are_extreme(self, constant: float) -> None:
        groups = self.groups()
        output, gradient = self.value_and_gradient(groups, self.scores(groups, constant))
        assert math.isfinite(loss_value([output]))
        assert mx.isfinite(gradient).all().item()

    @pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (1, 1, 1, 1)], ids=str)
    def test_micro_batches_do_not_matter(self, sizes: tuple[int, ...]) -> None:
        groups = self.groups()
        starts = np.cumsum((0, *sizes))
        parts = [groups[start : start + size] for start, size in zip(starts, sizes)]
        whole = loss_value([self.loss(self.scores(groups), self.batch(groups))])
        split = loss_value([self.loss(self.scores(part), self.batch(part, groups)) for part in parts])
        assert split == pytest.approx(whole, rel=1e-5, abs=1e-6)

    def test_order_of_groups_does_not_matter(self) -> None:
        groups = self.groups()
        turned = groups[::-1]
        whole = loss_value([self.loss(self.scores(groups), self.batch(groups))])
        other = loss_value([self.loss(self.scores(turned), self.batch(turned))])
        assert other == pytest.approx(whole, rel=1e-5, abs=1e-6)

    def test_prompt_targets_of_other_losses_do_not_matter(self) -> None:
        if "prompt_logprobs" in self.requires:
            pytest.skip("the loss scores prompts")
        groups = self.groups()
        alone = loss_value([self.loss(self.scores(groups), self.batch(groups))])
        batch, scores = self._beside_prompts(groups)
        assert loss_value([self.loss(scores, batch)]) == pytest.approx(alone, rel=1e-5, abs=1e-6)

    def _beside_prompts(self, groups: Sequence[Group]) -> tuple[Batch, TokenLogprobs]:
        """The same with prompt tokens scored too, as when another loss of the run asks for them."""
        requires = self.requires | {"prompt_logprobs"}
        batch, own = make_batch(groups, requires), self.scores(groups)
        batch = evolve(batch, statistics=self.batch(groups).statistics)
        places = np.cumsum(~np.asarray(batch.is_prompt)) - 1  # [M] of each completion token among the own scores
        at = mx.array(np.maximum(places, 0))

        def spread(x: mx.array) -> mx.array:
            return mx.where(batch.is_prompt, -9.0, x[at])

        logprobs = spread(own.logprobs)
        return batch, evolve(own, logprobs=logprobs, entropy=-logprobs, values=logprobs)

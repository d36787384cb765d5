"""BCO: a binary classifier of chosen against rejected, whose logit is the reward.

Jung et al., "Binary Classifier Optimization for Large Language Model Alignment", 2024 (arXiv:2404.04656). What it
leaves out: the density ratio for prompts of unequal sources (UDM), which needs a classifier of prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import mlx.core as mx
from attrs import evolve, frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import and_, gt, in_, le, option
from mortice_plugins.losses.pairs import PROFILE, Sides, log_ratios, log_sigmoid, max_loss_option, preference, sides


@frozen
class BCO:
    """Binary cross-entropy with the reward as logit: chosen is 1, rejected 0; with or without a reward shift.

    With C and R the summed log-ratios log π/π_ref of chosen and rejected response, the loss is the mean over pairs of
    −log σ(beta · C − δ) − log σ(−(beta · R − δ)): the sum of both sides, not their mean. With `shift = "none"` δ is 0;
    with `"running"` it is the mean of all rewards beta · C and beta · R of the steps before, and 0 in the first, where
    a policy that is its own reference has rewards of 0. It is a constant of the step, whatever its micro-batches are,
    and part of checkpoints. `shift_decay` below 1 forgets: what earlier steps have added to sum and number counts that
    much of itself after each further step. A pair counts with the weight of its chosen completion.
    """

    requires: ClassVar = frozenset({"pairs", "ref_logprobs"})
    profile: ClassVar = PROFILE

    beta: float = option(0.1, help="scale of rewards", validator=gt(0.0))
    shift: str = option(
        "none",
        help='δ, which rewards are measured from: "none" (0), or "running" (the mean of the rewards so far)',
        validator=in_(("none", "running")),
    )
    shift_decay: float = option(
        1.0,
        help="what earlier rewards still count of themselves after each step (1: a plain mean)",
        validator=and_(gt(0.0), le(1.0)),
    )
    max_loss: float | None = max_loss_option()

    def __attrs_post_init__(self) -> None:
        if self.shift == "none" and self.shift_decay != 1:
            raise ValueError(f"shift_decay is {self.shift_decay}, which shift 'none' does not use; 'running' does")

    @classmethod
    def examples(cls) -> Iterable[BCO]:
        return (cls(shift="running", shift_decay=0.9, max_loss=2.0),)

    @property
    def statistics_of(self) -> str | None:
        return "past" if self.shift == "running" else None

    @property
    def statistics_decay(self) -> float:
        return self.shift_decay

    def statistics(self, scores: TokenLogprobs, batch: Batch, /) -> Mapping[str, tuple[mx.array, mx.array]]:
        chosen, rejected = self._rewards(scores, batch)
        return {"shift": ((batch.pair_weights * (chosen + rejected)).sum(), 2 * batch.pair_weights.sum())}

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        chosen, rejected = self._rewards(scores, batch)
        shift = batch.statistics["shift"] if self.shift == "running" else mx.array(0.0)
        loss = -log_sigmoid(chosen - shift) - log_sigmoid(shift - rejected)
        output = preference(loss, (chosen, rejected), scores, batch, self.max_loss)
        return output if self.shift == "none" else evolve(output, metrics={**output.metrics, "shift": shift})

    def _rewards(self, scores: TokenLogprobs, batch: Batch) -> Sides:
        return sides(self.beta * batch.sum(log_ratios(scores, batch)), batch)  # [N]

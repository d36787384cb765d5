"""SimPO: a preference loss on length-normalised log-probabilities, without a reference model.

Meng, Xia and Chen, "SimPO: Simple Preference Optimization with a Reference-Free Reward", 2024 (arXiv:2405.14734). γ
stands outside β, as TRL has it. What it leaves out: the NLL term of CPO-SimPO, and label smoothing; mortice's own
`simpo` has both.
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice import Batch, LossOutput, TokenLogprobs, hookimpl, option
from mortice.options import ge, gt


@frozen
class SimPO:
    """Preference loss on mean log-probabilities with a target margin; no reference model.

    With c̄ and r̄ the mean log-probabilities of the response tokens of chosen and rejected, the loss is the mean over
    pairs of −log σ(beta · (c̄ − r̄) − gamma). A pair counts with the weight of its chosen completion.
    """

    requires: ClassVar = frozenset({"pairs"})

    beta: float = option(2.0, help="scale of the margin", validator=gt(0.0))
    gamma: float = option(0.5, help="target of the scaled margin", validator=ge(0.0))

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        mean = batch.mean(scores.logprobs)  # [C]
        chosen, rejected = mean[batch.pairs[:, 0]], mean[batch.pairs[:, 1]]  # [N]
        weights = batch.pair_weights  # [N]
        margin = chosen - rejected
        loss = mx.logaddexp(mx.zeros_like(margin), self.gamma - self.beta * margin)  # −log σ(beta · margin − gamma)

        def mean_of(value: mx.array) -> tuple[mx.array, mx.array]:
            return (weights * value).sum(), weights.sum()

        return LossOutput(
            {"preference": mean_of(loss)},
            metrics={"margin": mean_of(margin), "accuracy": mean_of(margin > 0)},
        )


@hookimpl
def register_losses(register):
    register("plain-simpo", SimPO)

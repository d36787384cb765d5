"""SimPO: a preference loss on length-normalised log-probabilities, without a reference model.

Meng, Xia and Chen, "SimPO: Simple Preference Optimization with a Reference-Free Reward", 2024 (arXiv:2405.14734), and
CPO-SimPO, which adds the NLL of the chosen response.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import evolve, frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import ge, gt, option
from mortice_plugins.losses.pairs import (
    FROM_START,
    PROFILE,
    chosen_nll,
    max_loss_option,
    preference,
    sides,
    smoothed,
    smoothing_option,
)


@frozen
class SimPO:
    """Preference loss on mean log-probabilities with a target margin; no reference model.

    With c̄ and r̄ the mean log-probabilities of the tokens of chosen and rejected response, z = beta · (c̄ − r̄) − gamma
    and ε = label_smoothing, the loss is

        mean over pairs of −(1−ε) log σ(z) − ε log σ(−z)  +  nll_weight · nll

    gamma stands outside beta; the paper's margin is gamma/beta. `nll`, there where nll_weight is above 0, is the mean
    over all tokens of chosen responses. A pair counts with the weight of its chosen completion.
    """

    requires: ClassVar = frozenset({"pairs"})
    profile: ClassVar = PROFILE
    from_start: ClassVar = FROM_START

    beta: float = option(2.0, help="scale of the margin", validator=gt(0.0))
    gamma: float = option(0.5, help="target of the scaled margin", validator=ge(0.0))
    label_smoothing: float = smoothing_option()
    nll_weight: float = option(0.0, help="weight of the chosen responses' NLL (CPO-SimPO)", validator=ge(0.0))
    max_loss: float | None = max_loss_option()

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        chosen, rejected = sides(self.beta * batch.mean(scores.logprobs), batch)  # [N]
        loss = smoothed(chosen - rejected - self.gamma, self.label_smoothing)
        output = preference(loss, (chosen, rejected), scores, batch, self.max_loss)
        if not self.nll_weight:
            return output
        return evolve(
            output, terms={**output.terms, "nll": chosen_nll(scores, batch)}, weights={"nll": self.nll_weight}
        )

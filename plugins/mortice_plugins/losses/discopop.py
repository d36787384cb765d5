"""DiscoPOP: a loss that a language model found, between the logistic and the exponential one.

Lu et al., "Discovering Preference Optimization Algorithms with and for Large Language Models", 2024 (arXiv:2406.08414),
equation 5 (log-ratio modulated loss).
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import and_, gt, lt, option
from mortice_plugins.losses.pairs import PROFILE, log_ratios, log_sigmoid, max_loss_option, preference, sides


@frozen
class DiscoPOP:
    """Logistic loss for pairs in the wrong order, exponential loss for those in the right one.

    With C and R the summed log-ratios log π/π_ref of chosen and rejected response, z = beta · (C − R) and a = σ(z/tau),
    the loss is the mean over pairs of −(1−a) · log σ(z) + a · e^−z. A pair counts with the weight of its chosen
    completion.
    """

    requires: ClassVar = frozenset({"pairs", "ref_logprobs"})
    profile: ClassVar = PROFILE

    beta: float = option(0.1, help="scale of rewards", validator=gt(0.0))
    tau: float = option(
        0.05, help="width of the change from one loss to the other, below 1", validator=and_(gt(0.0), lt(1.0))
    )
    max_loss: float | None = max_loss_option()

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        chosen, rejected = sides(self.beta * batch.sum(log_ratios(scores, batch)), batch)  # [N]
        margin = chosen - rejected
        logistic = -mx.sigmoid(-margin / self.tau) * log_sigmoid(margin)
        exponential = mx.exp(log_sigmoid(margin / self.tau) - margin)  # as one exponent: e^−z alone overflows
        return preference(logistic + exponential, (chosen, rejected), scores, batch, self.max_loss)

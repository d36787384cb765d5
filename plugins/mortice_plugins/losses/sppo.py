"""SPPO: a regression of both log-ratios onto how often a response wins.

Wu et al., "Self-Play Preference Optimization for Language Model Alignment", 2024 (arXiv:2405.00675), with hard
probabilities: a chosen response always wins. What it leaves out: win rates of a preference model, and the rounds of
self-play, which are runs of their own.
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import gt, option
from mortice_plugins.losses.pairs import PROFILE, log_ratios, max_loss_option, preference, sides


@frozen
class SPPO:
    """Squared distances of the log-ratios from ½/beta for the chosen and −½/beta for the rejected response.

    With C and R the summed log-ratios log π/π_ref of chosen and rejected response, the loss is the mean over pairs of
    (C − ½/beta)² + (R + ½/beta)². beta is 1/η of the paper. A pair counts with the weight of its chosen completion.
    """

    requires: ClassVar = frozenset({"pairs", "ref_logprobs"})
    profile: ClassVar = PROFILE

    beta: float = option(0.1, help="the log-ratios are to be ±½/beta (1/η in the paper)", validator=gt(0.0))
    max_loss: float | None = max_loss_option()

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        chosen, rejected = sides(batch.sum(log_ratios(scores, batch)), batch)  # [N]
        goal = 0.5 / self.beta
        loss = mx.square(chosen - goal) + mx.square(rejected + goal)
        return preference(loss, (self.beta * chosen, self.beta * rejected), scores, batch, self.max_loss)

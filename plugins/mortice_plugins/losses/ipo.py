"""IPO: a regression of the log-ratio margin onto a fixed gap, so that a certain preference is not pushed without end.

Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences", 2023 (arXiv:2310.12036).
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import gt, option
from mortice_plugins.losses.pairs import PROFILE, log_ratios, max_loss_option, preference, sides


@frozen
class IPO:
    """Squared distance of the log-ratio margin from 1/(2·beta), on means over tokens.

    With c and r the mean log-ratios log π/π_ref of the tokens of chosen and rejected response, the loss is the mean
    over pairs of (c − r − 1/(2·beta))². Means and not sums: the paper does not say, its authors did, and with sums
    the length of a response sets the scale. A larger beta (τ in the paper) asks for a smaller gap. A pair counts with
    the weight of its chosen completion.
    """

    requires: ClassVar = frozenset({"pairs", "ref_logprobs"})
    profile: ClassVar = PROFILE

    beta: float = option(0.1, help="the wanted gap is 1/(2·beta) (τ in the paper)", validator=gt(0.0))
    max_loss: float | None = max_loss_option()

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        chosen, rejected = sides(batch.mean(log_ratios(scores, batch)), batch)  # [N]
        loss = mx.square(chosen - rejected - 1 / (2 * self.beta))
        return preference(loss, (self.beta * chosen, self.beta * rejected), scores, batch, self.max_loss)

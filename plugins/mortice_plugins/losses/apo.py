"""APO: anchored preference optimisation, which says for each response whether its likelihood is to rise or to fall.

D'Oosterlinck et al., "Anchored Preference Optimization and Contrastive Revisions", 2024 (arXiv:2408.06266), equations 7
and 8. What it leaves out: the unpaired form.
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import gt, option
from mortice_plugins.losses.pairs import PROFILE, log_ratios, max_loss_option, preference, sides


@frozen
class APOZero:
    """Chosen up and rejected down, each from its own anchor: for answers better than the model's own.

    With C and R the summed log-ratios log π/π_ref of chosen and rejected response, the loss is the mean over pairs of
    1 − σ(beta · C) + σ(beta · R). A pair counts with the weight of its chosen completion.
    """

    requires: ClassVar = frozenset({"pairs", "ref_logprobs"})
    profile: ClassVar = PROFILE

    beta: float = option(0.1, help="scale of rewards", validator=gt(0.0))
    max_loss: float | None = max_loss_option()

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        chosen, rejected = sides(self.beta * batch.sum(log_ratios(scores, batch)), batch)  # [N]
        return preference(mx.sigmoid(-chosen) + mx.sigmoid(rejected), (chosen, rejected), scores, batch, self.max_loss)


@frozen
class APODown:
    """Both responses down, the rejected one more: for answers worse than the model's own.

    With C and R the summed log-ratios log π/π_ref of chosen and rejected response, the loss is the mean over pairs of
    σ(beta · C) + 1 − σ(beta · (C − R)). A pair counts with the weight of its chosen completion.
    """

    requires: ClassVar = frozenset({"pairs", "ref_logprobs"})
    profile: ClassVar = PROFILE

    beta: float = option(0.1, help="scale of rewards", validator=gt(0.0))
    max_loss: float | None = max_loss_option()

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        chosen, rejected = sides(self.beta * batch.sum(log_ratios(scores, batch)), batch)  # [N]
        return preference(
            mx.sigmoid(chosen) + mx.sigmoid(rejected - chosen), (chosen, rejected), scores, batch, self.max_loss
        )

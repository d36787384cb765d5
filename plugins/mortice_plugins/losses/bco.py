"""BCO: a binary classifier of chosen against rejected, whose logit is the reward.

Jung et al., "Binary Classifier Optimization for Large Language Model Alignment", 2024 (arXiv:2404.04656). What it
leaves out: the reward shift δ (a running mean of rewards; here it is 0) and the density ratio for prompts of unequal
sources.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import gt, option
from mortice_plugins.losses.pairs import PROFILE, log_ratios, log_sigmoid, preference, sides


@frozen
class BCO:
    """Binary cross-entropy with the reward as logit: chosen is 1, rejected 0; no reward shift.

    With C and R the summed log-ratios log π/π_ref of chosen and rejected response, the loss is the mean over pairs of
    −log σ(beta · C) − log σ(−beta · R): the sum of both sides, not their mean. A pair counts with the weight of its
    chosen completion.
    """

    requires: ClassVar = frozenset({"pairs", "ref_logprobs"})
    profile: ClassVar = PROFILE

    beta: float = option(0.1, help="scale of rewards", validator=gt(0.0))

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        chosen, rejected = sides(self.beta * batch.sum(log_ratios(scores, batch)), batch)  # [N]
        return preference(-log_sigmoid(chosen) - log_sigmoid(-rejected), (chosen, rejected), scores, batch)

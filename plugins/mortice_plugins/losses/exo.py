"""EXO: the reverse KL of the policy's preference to smoothed labels, where DPO has the forward one.

Ji et al., "Towards Efficient Exact Optimization of Language Model Alignment", 2024 (arXiv:2402.00856), equation 16, for
pairs. What it leaves out: EXO on more than two ranked or scored responses.
"""

from __future__ import annotations

import math
from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import and_, gt, lt, option
from mortice_plugins.losses.pairs import PROFILE, log_ratios, log_sigmoid, max_loss_option, preference, sides


@frozen
class EXO:
    """Reverse KL between the policy's preference of a pair and its smoothed label.

    With C and R the summed log-ratios log π/π_ref of chosen and rejected response, z = beta · (C − R), and ε =
    label_smoothing, the loss is the mean over pairs of

        σ(z) · (log σ(z) − log(1−ε)) + σ(−z) · (log σ(−z) − log ε)

    which is least at σ(z) = 1 − ε. A pair counts with the weight of its chosen completion.
    """

    requires: ClassVar = frozenset({"pairs", "ref_logprobs"})
    profile: ClassVar = PROFILE

    beta: float = option(0.1, help="scale of rewards (β of the policy in the paper)", validator=gt(0.0))
    label_smoothing: float = option(1e-3, help="chance ε that a label is wrong", validator=and_(gt(0.0), lt(0.5)))
    max_loss: float | None = max_loss_option()

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        chosen, rejected = sides(self.beta * batch.sum(log_ratios(scores, batch)), batch)  # [N]
        margin = chosen - rejected
        right = mx.sigmoid(margin) * (log_sigmoid(margin) - math.log1p(-self.label_smoothing))
        wrong = mx.sigmoid(-margin) * (log_sigmoid(-margin) - math.log(self.label_smoothing))
        return preference(right + wrong, (chosen, rejected), scores, batch, self.max_loss)

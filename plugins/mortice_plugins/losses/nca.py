"""NCA: noise contrastive alignment, which holds up the likelihood of the chosen response itself.

Chen et al., "Noise Contrastive Alignment of Language Models with Explicit Rewards", 2024 (arXiv:2402.05369), for pairs.
What it leaves out: InfoNCA, and more than two responses with explicit rewards.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import gt, option
from mortice_plugins.losses.pairs import PROFILE, log_ratios, log_sigmoid, max_loss_option, preference, sides


@frozen
class NCA:
    """Noise contrastive alignment of pairs: each reward against 0, not only against the other one.

    With C and R the summed log-ratios log π/π_ref of chosen and rejected response, c = beta · C and r = beta · R, the
    loss is the mean over pairs of −log σ(c) − ½ log σ(−c) − ½ log σ(−r). A pair counts with the weight of its chosen
    completion.
    """

    requires: ClassVar = frozenset({"pairs", "ref_logprobs"})
    profile: ClassVar = PROFILE

    beta: float = option(0.1, help="scale of rewards", validator=gt(0.0))
    max_loss: float | None = max_loss_option()

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        chosen, rejected = sides(self.beta * batch.sum(log_ratios(scores, batch)), batch)  # [N]
        loss = -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)
        return preference(loss, (chosen, rejected), scores, batch, self.max_loss)

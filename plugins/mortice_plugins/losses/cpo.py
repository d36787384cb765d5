"""CPO: contrastive preference optimisation, DPO without its reference but with the NLL of the chosen response.

Xu et al., "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation", 2024
(arXiv:2401.08417).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import mlx.core as mx
from attrs import evolve, frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import ge, gt, in_, option
from mortice_plugins.losses.pairs import (
    FROM_START,
    PROFILE,
    chosen_nll,
    max_loss_option,
    preference,
    refuse_smoothed_hinge,
    sides,
    smoothed,
    smoothing_option,
)


@frozen
class CPO:
    """Preference loss on summed log-probabilities, with the NLL of the chosen response; no reference model.

    With c and r the summed log-probabilities of chosen and rejected response, z = beta · (c − r) and ε =
    label_smoothing, the loss is the mean over pairs of

        sigmoid   −(1−ε) log σ(z) − ε log σ(−z)
        hinge     max(0, 1 − z)

    and nll_weight times the NLL, the mean over all tokens of chosen responses (the paper's E[−log π(chosen)] has sums
    over a response; its code has this mean). A pair counts with the weight of its chosen completion.
    """

    requires: ClassVar = frozenset({"pairs"})
    profile: ClassVar = PROFILE
    from_start: ClassVar = FROM_START

    variant: str = option(
        "sigmoid", help="function of the margin: sigmoid, or hinge", validator=in_(("sigmoid", "hinge"))
    )
    beta: float = option(0.1, help="scale of the margin", validator=gt(0.0))
    label_smoothing: float = smoothing_option("chance ε that a label is wrong (sigmoid)")
    nll_weight: float = option(1.0, help="weight of the chosen responses' NLL; 0 leaves it out", validator=ge(0.0))
    max_loss: float | None = max_loss_option()

    @classmethod
    def examples(cls) -> Iterable[CPO]:
        return (cls(label_smoothing=0.1, nll_weight=0.0),)

    def __attrs_post_init__(self) -> None:
        refuse_smoothed_hinge(self.variant, self.label_smoothing)

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        chosen, rejected = sides(self.beta * batch.sum(scores.logprobs), batch)  # [N]
        margin = chosen - rejected
        hinge = self.variant == "hinge"
        loss = mx.maximum(0.0, 1.0 - margin) if hinge else smoothed(margin, self.label_smoothing)
        output = preference(loss, (chosen, rejected), scores, batch, self.max_loss)
        if not self.nll_weight:
            return output
        return evolve(
            output, terms={**output.terms, "nll": chosen_nll(scores, batch)}, weights={"nll": self.nll_weight}
        )

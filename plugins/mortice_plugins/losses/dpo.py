"""DPO: preference learning against a reference model, without a reward model.

Rafailov et al., "Direct Preference Optimization", 2023 (arXiv:2305.18290), and what changes its margin or the
function of it: conservative smoothing (Mitchell, "A note on DPO with noisy preferences", 2023), robust DPO (Chowdhury
et al., 2024, arXiv:2403.00409), the hinge of SLiC (Zhao et al., 2023, arXiv:2305.10425), f-divergences (Wang et al.,
2023, arXiv:2309.16240), length normalisation (Lambert et al., "Tulu 3", 2024, arXiv:2411.15124) and length
desensitising (Liu et al., 2024, arXiv:2409.06411). Losses with a target or a regression of their own are plugins of
their own: `ipo`, `exo`, `discopop`, `nca`, `bco`, `sppo`, `apo-zero`, `apo-down`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import and_, fraction, gt, in_, le, option, optional
from mortice_plugins.losses.pairs import (
    PROFILE,
    Sides,
    log_ratios,
    log_sigmoid,
    max_loss_option,
    preference,
    refuse_smoothed_hinge,
    sides,
    smoothed,
    smoothing_option,
)

STEEPEST = 30.0
"""Where 1 − e^−x goes on as a straight line: squares of e^30 still fit float32, as the norm of a gradient needs."""


@frozen
class DPO:
    """Preference loss on the log-ratios of policy to reference: −log σ of the reward margin, and its variants.

    With C and R the summed log-ratios log π(y)/π_ref(y) of chosen and rejected response, z = beta · (g(C) − g(R)) is
    the margin of their rewards, and the loss is the mean over pairs of

        sigmoid   −(1−ε) log σ(z) − ε log σ(−z)                  ε = label_smoothing; above 0 it is conservative DPO
        robust    (−(1−ε) log σ(z) + ε log σ(−z)) / (1−2ε)       unbiased where a share ε of the labels is flipped
        hinge     max(0, 1 − z)                                  SLiC with a reference

    g is the derivative of an f-divergence at the ratio:

        reverse-kl  g(x) = x                                     DPO as in its paper
        forward-kl  g(x) = 1 − e^−x
        js          g(x) = log 2 + log σ(x)
        alpha       g(x) = (1 − e^(−alpha·x)) / alpha            alpha → 0 is reverse-kl, 1 is forward-kl

    `alpha` is that of the paper; some trainers write 1 − alpha. Where an exponent passes 30, the exponential goes on
    as a straight line. With `length_normalised`, C and R are means over the tokens of a response. `length_alpha`
    weights the tokens of the longer response beyond the length of the shorter one, in policy and reference (α of
    LD-DPO; 0 leaves them out). A pair counts with the weight of its chosen completion.
    """

    requires: ClassVar = frozenset({"pairs", "ref_logprobs"})
    profile: ClassVar = PROFILE

    variant: str = option(
        "sigmoid",
        help="function of the margin: sigmoid, robust, or hinge",
        validator=in_(("sigmoid", "robust", "hinge")),
    )
    beta: float = option(
        0.1, help="scale of rewards: how strongly the policy is held to the reference", validator=gt(0.0)
    )
    label_smoothing: float = smoothing_option("chance ε that a label is wrong (sigmoid and robust)")
    divergence: str = option(
        "reverse-kl",
        help="divergence from the reference: reverse-kl, forward-kl, js, or alpha",
        validator=in_(("reverse-kl", "forward-kl", "js", "alpha")),
    )
    alpha: float | None = option(
        None, help="α of the alpha divergence, above 0 and at most 1", validator=optional(and_(gt(0.0), le(1.0)))
    )
    length_normalised: bool = option(False, help="mean log-ratio of a response's tokens instead of their sum")
    length_alpha: float = option(
        1.0, help="weight of the tokens beyond the length of the shorter response", validator=fraction
    )
    max_loss: float | None = max_loss_option()

    @classmethod
    def examples(cls) -> Iterable[DPO]:
        return (
            cls(variant="robust", label_smoothing=0.1),
            cls(divergence="alpha", alpha=0.5, label_smoothing=0.1),
            cls(length_alpha=0.5),
        )

    def __attrs_post_init__(self) -> None:
        refuse_smoothed_hinge(self.variant, self.label_smoothing)
        if self.variant == "robust" and not 0 < self.label_smoothing < 0.5:
            raise ValueError(
                f"variant 'robust' divides by 1 − 2·label_smoothing: it needs one above 0 and below 0.5, "
                f"found {self.label_smoothing}"
            )
        if self.divergence == "alpha" and self.alpha is None:
            raise ValueError("divergence 'alpha' needs alpha, above 0 and at most 1")
        if self.divergence != "alpha" and self.alpha is not None:
            raise ValueError(f"alpha is {self.alpha}, which divergence {self.divergence!r} does not use; 'alpha' does")
        if self.length_normalised and (self.length_alpha != 1 or self.divergence != "reverse-kl"):
            raise ValueError(
                "length_normalised takes means of all tokens' log-ratios: it goes with length_alpha = 1.0 and "
                f"divergence = 'reverse-kl', found {self.length_alpha} and {self.divergence!r}"
            )

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        chosen, rejected = (self.beta * self._slope(x) for x in self._log_ratios(scores, batch))  # [N]
        return preference(self._loss(chosen - rejected), (chosen, rejected), scores, batch, self.max_loss)

    def _log_ratios(self, scores: TokenLogprobs, batch: Batch) -> Sides:
        ratios = log_ratios(scores, batch)  # [M]
        if self.length_normalised:
            return sides(batch.mean(ratios), batch)
        if self.length_alpha == 1:
            return sides(batch.sum(ratios), batch)
        place = mx.cumsum(batch.owners.astype(mx.int32), axis=1)  # [C, M], from 1
        shared = mx.minimum(*sides(batch.lengths, batch))[:, None]  # [N, 1]
        chosen, rejected = (
            mx.where(owned, mx.where(place <= shared, ratios, self.length_alpha * ratios), 0.0).sum(axis=1)
            for owned, place in zip(sides(batch.owners, batch), sides(place, batch))
        )
        return chosen, rejected

    def _slope(self, x: mx.array) -> mx.array:
        """f'(e^x), less f'(1)."""
        if self.divergence == "forward-kl":
            return one_minus_exp(x)
        if self.divergence == "js":
            return math.log(2) + log_sigmoid(x)
        return x if self.alpha is None else one_minus_exp(self.alpha * x) / self.alpha

    def _loss(self, margin: mx.array) -> mx.array:
        if self.variant == "hinge":
            return mx.maximum(0.0, 1.0 - margin)
        if self.variant == "sigmoid":
            return smoothed(margin, self.label_smoothing)
        wrong = self.label_smoothing
        return (wrong * log_sigmoid(-margin) - (1 - wrong) * log_sigmoid(margin)) / (1 - 2 * wrong)


def one_minus_exp(x: mx.array) -> mx.array:
    """1 − e^−x, from x = −30 downwards as a straight line of the same slope, so that neither overflows."""
    near = -mx.expm1(-mx.maximum(x, -STEEPEST))
    far = 1.0 + math.exp(STEEPEST) * (x + STEEPEST - 1.0)
    return mx.where(x > -STEEPEST, near, far)

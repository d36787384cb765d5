"""ORPO: supervised fine-tuning and a preference term in one loss, without a reference model.

Hong, Lee and Thorne, "ORPO: Monolithic Preference Optimization without Reference Model", 2024 (arXiv:2403.07691).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import mlx.core as mx
from attrs import frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import ge, in_, option
from mortice_plugins.losses.pairs import (
    FROM_START,
    PROFILE,
    chosen_nll,
    clipped,
    clipped_share,
    max_loss_option,
    mean_over_pairs,
    pair_metrics,
    refuse_smoothed_hinge,
    sides,
    smoothed,
    smoothing_option,
)

NEAREST = 1e-12
"""How close to 1 a probability is taken to be: below it 1 − p of float32 log-probabilities is rounding only."""


@frozen
class ORPO:
    """Odds-ratio preference optimisation: NLL plus λ times the log-odds term; no reference model.

    With c̄ and r̄ the mean log-probabilities of the response tokens of chosen and rejected:

        loss     = nll − beta · mean over pairs of log σ(log_odds)
        log_odds = (c̄ − r̄) − (log(1 − e^c̄) − log(1 − e^r̄))

    `nll` is the mean over all tokens of prompt and chosen response (`sft_scope = "full"`), or the mean over pairs of
    −c̄ (`"response"`, as in the paper). With ε = label_smoothing above 0, −(1−ε) log σ(log_odds) − ε log σ(−log_odds)
    takes the place of −log σ(log_odds); with `variant = "hinge"`, max(0, 1 − log_odds) does, and pairs that are apart
    by that much are left alone. `max_loss` bounds that term of a pair. A pair, and each token of its NLL, counts with
    the weight of its chosen completion.
    """

    profile: ClassVar = PROFILE
    from_start: ClassVar = FROM_START

    beta: float = option(0.1, help="weight of the odds-ratio term (λ in the paper)", validator=ge(0.0))
    sft_scope: str = option(
        "full",
        help="the NLL term: full (token mean over prompt and chosen response), or response (pair mean of −c̄)",
        validator=in_(("full", "response")),
    )
    variant: str = option(
        "sigmoid", help="function of the log-odds: sigmoid, or hinge", validator=in_(("sigmoid", "hinge"))
    )
    label_smoothing: float = smoothing_option("chance ε that a label is wrong (sigmoid)")
    lambda_schedule: str = option(
        "static",
        help='"static": beta as it is; "adaptive": the controller `adaptive-lambda` steers it by validation',
        validator=in_(("static", "adaptive")),
    )
    max_loss: float | None = max_loss_option()

    @property
    def brings(self) -> Mapping[str, Any]:
        """The controller that an adaptive schedule is, where the run names none; it begins with `beta`."""
        if self.lambda_schedule == "static":
            return {}
        return {
            "controller.name": "adaptive-lambda", "controller.start": self.beta, "controller.option": "loss.beta",
        }  # fmt: skip

    @classmethod
    def examples(cls) -> Iterable[ORPO]:
        return (cls(label_smoothing=0.1),)

    def __attrs_post_init__(self) -> None:
        refuse_smoothed_hinge(self.variant, self.label_smoothing)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"pairs", "prompt_logprobs"} if self.sft_scope == "full" else {"pairs"})

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        chosen, rejected = sides(batch.mean(scores.logprobs), batch)  # [N]
        log_odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
        hinge = self.variant == "hinge"
        odds = mx.maximum(0.0, 1.0 - log_odds) if hinge else smoothed(log_odds, self.label_smoothing)
        full = self.sft_scope == "full"
        nll = chosen_nll(scores, batch, prompts=True) if full else mean_over_pairs(-chosen, batch)
        return LossOutput(
            {"nll": nll, "odds": mean_over_pairs(clipped(odds, self.max_loss), batch)},
            weights={"odds": self.beta},
            metrics=pair_metrics((chosen, rejected), scores, batch)
            | {"log_odds": mean_over_pairs(log_odds, batch)}
            | clipped_share(odds, self.max_loss, batch),
        )


def log1mexp(x: mx.array) -> mx.array:
    """log(1 − e^x) for x ≤ 0, with a finite value and gradient also at x = 0.

    Mächler, "Accurately Computing log(1 − exp(−|a|))", 2012: which of two forms is exact turns at −log 2. Autodiff goes
    through both, so each is kept away from where the other holds, with some overlap at the turn.
    """
    near = mx.log(-mx.expm1(mx.clip(x, -1.0, -NEAREST)))
    far = mx.log1p(-mx.exp(mx.minimum(x, -0.5)))
    return mx.where(x > -math.log(2), near, far)

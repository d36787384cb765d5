"""ORPO: supervised fine-tuning and a preference term in one loss, without a reference model.

Hong, Lee and Thorne, "ORPO: Monolithic Preference Optimization without Reference Model", 2024 (arXiv:2403.07691).
"""

from __future__ import annotations

import math
from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import ge, in_, option

NEAREST = 1e-12
"""How close to 1 a probability is taken to be: below it 1 − p of float32 log-probabilities is rounding only."""


@frozen
class ORPO:
    """Odds-ratio preference optimisation: NLL plus λ times the log-odds term; no reference model.

    With c̄ and r̄ the mean log-probabilities of the response tokens of chosen and rejected:

        loss     = nll − beta · mean over pairs of log σ(log_odds)
        log_odds = (c̄ − r̄) − (log(1 − e^c̄) − log(1 − e^r̄))

    `nll` is the mean over all tokens of prompt and chosen response (`sft_scope = "full"`), or the mean over pairs of
    −c̄ (`"response"`, as in the paper). A pair counts with the weight of its chosen completion.
    """

    profile: ClassVar = {
        "optimizer.learning_rate": 1e-5,
        "schedule.name": "cosine",
        "schedule.warmup": 0.03,
        "adapter.rank": 16,
        "adapter.scale": 2.0,
    }

    beta: float = option(0.1, help="weight of the odds-ratio term (λ in the paper)", validator=ge(0.0))
    sft_scope: str = option(
        "full",
        help="the NLL term: full (token mean over prompt and chosen response), or response (pair mean of −c̄)",
        validator=in_(("full", "response")),
    )

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"pairs", "prompt_logprobs"} if self.sft_scope == "full" else {"pairs"})

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        mean = batch.mean(scores.logprobs)  # [C]
        chosen, rejected = mean[batch.pairs[:, 0]], mean[batch.pairs[:, 1]]  # [N]
        weights = batch.weights[batch.pairs[:, 0]]
        pairs = weights.sum()

        log_odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
        odds = mx.logaddexp(mx.zeros_like(log_odds), -log_odds)  # −log σ(log_odds)
        nll = self._token_nll(scores, batch) if self.sft_scope == "full" else (-(weights * chosen).sum(), pairs)

        def mean_of(value: mx.array) -> tuple[mx.array, mx.array]:
            return (weights * value).sum(), pairs

        return LossOutput(
            {"nll": nll, "odds": mean_of(odds)},
            weights={"odds": self.beta},
            metrics={
                "lw": mean_of(chosen),
                "lr": mean_of(rejected),
                "log_odds": mean_of(log_odds),
                "margin": mean_of(chosen - rejected),
                "accuracy": mean_of(chosen > rejected),
            },
        )

    def _token_nll(self, scores: TokenLogprobs, batch: Batch) -> tuple[mx.array, mx.array]:
        """(total, count) over prompt and chosen response, each token once: a prompt belongs to the chosen, which comes
        first in its group."""
        counted = (batch.owner[:, None] == batch.pairs[None, :, 0]).any(axis=1)  # [M]
        weights = mx.where(counted, batch.weights[batch.owner], 0.0)
        return -(weights * mx.where(counted, scores.logprobs, 0.0)).sum(), weights.sum()


def log1mexp(x: mx.array) -> mx.array:
    """log(1 − e^x) for x ≤ 0, with a finite value and gradient also at x = 0.

    Mächler, "Accurately Computing log(1 − exp(−|a|))", 2012: which of two forms is exact turns at −log 2. Autodiff goes
    through both, so each is kept away from where the other holds, with some overlap at the turn.
    """
    near = mx.log(-mx.expm1(mx.clip(x, -1.0, -NEAREST)))
    far = mx.log1p(-mx.exp(mx.minimum(x, -0.5)))
    return mx.where(x > -math.log(2), near, far)

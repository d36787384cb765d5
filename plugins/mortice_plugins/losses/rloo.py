"""RLOO: REINFORCE on whole answers, each measured against the others of its group.

Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
2024 (arXiv:2402.14740).
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import ge, gt, option
from mortice_plugins.losses.grpo import PROFILE as GRPO_PROFILE


@frozen
class RLOO:
    """Policy gradient of whole answers with a leave-one-out baseline.

    With R the reward of an answer less the mean reward of the others of its group, which the source gives as its
    advantage (`[source] baseline = "others"`, the default with this loss), and r = π/π_old of the whole answer, the
    loss is the mean over answers of

        −min(r · R, clip(r, 1 − clip, 1 + clip) · R)  +  beta · KL

    KL is the sum over tokens of π_ref/π − 1 − log π_ref/π (k3). On the first pass over a rollout r is 1 and the
    gradient is that of −R log π. An answer counts with its weight: 0 for one that was cut off and is masked.
    """

    profile: ClassVar = {**GRPO_PROFILE, "source.baseline": "others", "source.scale": "none"}

    clip: float = option(0.2, help="how far the ratio of an answer may move from 1", validator=gt(0.0))
    beta: float = option(0.0, help="weight of the KL divergence from the reference", validator=ge(0.0))

    @property
    def requires(self) -> frozenset[str]:
        own = frozenset({"groups", "advantages", "old_logprobs"})
        return own | {"ref_logprobs"} if self.beta else own

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        assert batch.old_logprobs is not None
        change = batch.sum(scores.logprobs - batch.old_logprobs)  # [C]
        ratio, gain = mx.exp(change), batch.advantages
        clipped = mx.clip(ratio, 1 - self.clip, 1 + self.clip)
        weights = mx.where(batch.lengths > 0, batch.weights, 0.0)

        def mean(x: mx.array) -> tuple[mx.array, mx.array]:
            return (weights * x).sum(), weights.sum()

        out = ((ratio > 1 + self.clip) & (gain > 0)) | ((ratio < 1 - self.clip) & (gain < 0))
        metrics = {"clip": mean(out), "ratio": mean(ratio), "policy_change": mean(mx.abs(change))}
        policy = mean(-mx.minimum(ratio * gain, clipped * gain))
        if not self.beta:
            return LossOutput({"policy": policy}, metrics)
        assert batch.ref_logprobs is not None
        below = batch.ref_logprobs - scores.logprobs
        kl = mean(batch.sum(mx.exp(below) - 1 - below))
        return LossOutput({"policy": policy, "kl": kl}, metrics, {"kl": self.beta})

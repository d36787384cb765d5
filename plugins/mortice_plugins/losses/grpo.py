"""GRPO and its kin: policy gradients of groups of answers that were sampled and rewarded.

Shao et al., "DeepSeekMath", 2024 (arXiv:2402.03300): `grpo`. Xiao et al., "BNPO", 2025 (arXiv:2506.02864): its mean
over tokens, `bnpo`. Liu et al., "Understanding R1-Zero-Like Training", 2025 (arXiv:2503.20783): `dr-grpo`. Yu et al.,
"DAPO", 2025 (arXiv:2503.14476): `dapo`. MiniMax, "MiniMax-M1", 2025 (arXiv:2506.13585): `cispo`. Zheng et al., "Group
Sequence Policy Optimization", 2025 (arXiv:2507.18071): `gspo`. The upper bound `delta` is INTELLECT-2's
(arXiv:2505.07291); the correction for a sampler that differs is that of Yao et al., "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training", 2025.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import ge, gt, in_, option, optional

CLIP = {
    "grpo": (0.2, 0.2),
    "bnpo": (0.2, 0.2),
    "dr-grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "cispo": (None, 4.0),
    "gspo": (3e-4, 4e-4),
}
"""(low, high) of each variant where none is given: as in its paper, for `cispo` as in ScaleRL (arXiv:2510.13786)."""
PROFILE = {
    "data.format": "prompt",
    "source.name": "rollout",
    "optimizer.learning_rate": 1e-5,
    "schedule.name": "constant",
    "adapter.rank": 16,
    "adapter.scale": 2.0,
    "layout.name": "prefix-shared",
}


@frozen
class GRPO:
    """Policy gradient of groups of sampled answers, with a clipped ratio.

    With A the advantage of an answer, r = π/π_old of each of its tokens, where π_old is the policy that sampled it, and
    l = 1 − clip_low, h = 1 + clip_high, a token's loss is

        −min(r · A, clip(r, l, h) · A)      grpo, bnpo, dr-grpo, dapo
        −min(r, h) · A · log π              cispo, the ratio a constant
        the first, with r the geometric mean of the ratios of the whole answer      gspo

    and what is minimised the mean over answers of their mean over tokens (grpo, gspo), their mean over all tokens of
    the step (bnpo, dapo, cispo), or their sum over all tokens divided by `max_tokens` for each answer (dr-grpo), plus
    beta times the same mean of KL, estimated for each token as π_ref/π − 1 − log π_ref/π (k3). With beta = 0 no
    reference is needed. For A < 0, r is at most `delta` where that is given.

    A is the source's: against the group's or the batch's mean, with or without the standard deviation, which dr-grpo
    leaves out by default (`[source] scale = "none"`). An answer counts with its weight: 0 for one that was cut off and
    is masked.

    With `importance_cap` each token counts min(π_old / π_sampler, importance_cap) times, for engines that sample with
    other numbers than training scores with (for gspo the geometric mean over the answer).
    """

    profile: ClassVar = PROFILE

    variant: str = option("grpo", help="which of the family", validator=in_(tuple(CLIP)))
    clip_low: float | None = option(
        None, help="how far the ratio may fall below 1; by default the variant's", validator=optional(gt(0.0))
    )
    clip_high: float | None = option(
        None, help="how far it may rise above 1; by default the variant's", validator=optional(gt(0.0))
    )
    delta: float | None = option(
        None, help="largest ratio of answers with A < 0, which nothing else bounds", validator=optional(gt(1.0))
    )
    beta: float = option(0.0, help="weight of the KL divergence from the reference", validator=ge(0.0))
    max_tokens: int | None = option(
        None, help="dr-grpo: what token sums are divided by, the most tokens of an answer", validator=optional(ge(1))
    )
    importance_cap: float | None = option(
        None, help="largest weight of a token by π_old / π_sampler; without it there is no such weight",
        validator=optional(gt(0.0)),
    )  # fmt: skip
    entropy: bool = option(True, help="measure the exact entropy of every token's distribution (a metric)")

    def __attrs_post_init__(self) -> None:
        if self.variant == "cispo" and (self.clip_low is not None or self.delta is not None):
            name = "delta" if self.clip_low is None else "clip_low"
            raise ValueError(f"{name} is {getattr(self, name)}, which variant 'cispo' does not use; leave it out")
        if (self.variant == "dr-grpo") != (self.max_tokens is not None):
            if self.max_tokens is None:
                raise ValueError("variant 'dr-grpo' needs max_tokens, the most tokens of an answer")
            raise ValueError(f"max_tokens is {self.max_tokens}, which variant {self.variant!r} does not use")
        low, high = self._bounds
        if low is not None and low >= 1:
            raise ValueError(f"clip_low must be below 1, found {low}")
        if self.delta is not None and self.delta <= 1 + high:
            raise ValueError(f"delta must be above 1 + clip_high = {1 + high:g}, found {self.delta}")

    @classmethod
    def examples(cls) -> Iterable[GRPO]:
        return (cls(variant="cispo"), cls(variant="gspo", beta=0.1), cls(variant="dr-grpo", max_tokens=16))

    @property
    def brings(self) -> dict[str, str]:
        """Advantages without the standard deviation belong to dr-grpo."""
        return {"source.scale": "none"} if self.variant == "dr-grpo" else {}

    @property
    def requires(self) -> frozenset[str]:
        optional = {"ref_logprobs": self.beta > 0, "sampler_logprobs": self.importance_cap, "entropy": self.entropy}
        return frozenset({"groups", "advantages", "old_logprobs", *(name for name, asked in optional.items() if asked)})

    @property
    def _bounds(self) -> tuple[float | None, float]:
        """clip_low and clip_high as they are in force."""
        low, high = CLIP[self.variant]
        given_high = self.clip_high if self.clip_high is not None else high
        return (self.clip_low if self.clip_low is not None else low), given_high

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        assert batch.old_logprobs is not None
        advantages = batch.advantages[batch.owner]  # [M]
        log_ratio = self._of_answer(scores.logprobs - batch.old_logprobs, batch)
        ratio = mx.exp(log_ratio)
        policy = self._policy(ratio, advantages, scores.logprobs)
        if self.importance_cap is not None:
            assert batch.sampler_logprobs is not None
            off = mx.exp(self._of_answer(batch.old_logprobs - batch.sampler_logprobs, batch))
            policy = mx.minimum(off, self.importance_cap) * policy
        output = LossOutput({"policy": self._reduced(policy, batch)}, self._metrics(ratio, advantages, scores, batch))
        if not self.beta:
            return output
        assert batch.ref_logprobs is not None
        below = batch.ref_logprobs - scores.logprobs
        kl = self._reduced(mx.exp(below) - 1 - below, batch)
        return LossOutput({**output.terms, "kl": kl}, output.metrics, {"kl": self.beta})

    def _of_answer(self, x: mx.array, batch: Batch) -> mx.array:
        """`[M]`: as it is, or of each token its answer's mean, where the variant goes by whole answers."""
        return batch.mean(x)[batch.owner] if self.variant == "gspo" else x

    def _policy(self, ratio: mx.array, advantages: mx.array, logprobs: mx.array) -> mx.array:
        """The loss of each token, `[M]`, without KL."""
        low, high = self._bounds
        if low is None:
            return -mx.stop_gradient(mx.minimum(ratio, 1 + high)) * advantages * logprobs
        clipped = mx.clip(ratio, 1 - low, 1 + high)
        if self.delta is not None:
            ratio = mx.where(advantages < 0, mx.minimum(ratio, self.delta), ratio)
        return -mx.minimum(ratio * advantages, clipped * advantages)

    def _reduced(self, x: mx.array, batch: Batch) -> tuple[mx.array, mx.array]:
        """(total, count) of `x [M]`, as the variant takes means."""
        sums, weights = batch.sum(x), batch.weights  # [C]
        if self.variant in ("grpo", "gspo"):
            weights = mx.where(batch.lengths > 0, weights, 0.0)
            return (weights * sums / mx.maximum(batch.lengths, 1.0)).sum(), weights.sum()
        each = batch.lengths if self.max_tokens is None else mx.array(float(self.max_tokens))
        return (weights * sums).sum(), (weights * each).sum()

    def _metrics(
        self, ratio: mx.array, advantages: mx.array, scores: TokenLogprobs, batch: Batch
    ) -> dict[str, tuple[mx.array, mx.array]]:
        """Means over tokens that count: how often the ratio was out of bounds on the side where that stops the
        gradient, the ratio, and the entropy."""
        low, high = self._bounds
        weights = batch.weights
        count = (weights * batch.lengths).sum()

        def mean(x: mx.array) -> tuple[mx.array, mx.array]:
            return (weights * batch.sum(x)).sum(), count

        above = (ratio > 1 + high) & ((advantages > 0) if low is not None else mx.array(True))
        found = {"clip_high": mean(above)}
        if low is not None:
            found["clip_low"] = mean((ratio < 1 - low) & (advantages < 0))
        assert batch.old_logprobs is not None
        change = scores.logprobs - batch.old_logprobs
        found |= {"ratio": mean(ratio), "policy_change": mean(mx.abs(change)), "surprise": mean(-scores.logprobs)}
        if self.entropy and scores.entropy is not None:
            found["entropy"] = mean(scores.entropy)
        return found

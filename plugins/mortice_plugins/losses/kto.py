"""KTO: desirable and undesirable answers, each by itself, measured from where the policy stands on the whole.

Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", 2024 (arXiv:2402.01306). What it leaves
out: a reference point for each prompt of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import ge, gt, in_, option
from mortice_plugins.losses.pairs import PROFILE, log_ratios

SOURCES = {"mismatched": "unrelated", "batch": "step", "none": None}


@frozen
class KTO:
    """Preference loss of single answers that are labelled desirable or not; no pairs.

    With R the summed log-ratio log π/π_ref of an answer and z = max(0, KL) the reference point, the loss is the mean
    over answers of

        desirable_weight · σ(beta · (z − R))       for a desirable answer
        undesirable_weight · σ(beta · (R − z))     for an undesirable one

    KL estimates the divergence of the policy from its reference, and has no gradient. `kl` says from what: the mean of
    log π/π_ref over answers to *other* prompts, one for each row (`"mismatched"`, as in the paper; one forward more
    over these), over the answers of the step themselves (`"batch"`; one forward more over the step), or 0 (`"none"`).
    It is one number for the whole step, or the whole validation, whatever the micro-batches are.

    Where one kind of answer is rarer, the paper weighs it so that desirable_weight · their number is 1 to 4/3 times
    undesirable_weight · theirs. Preference pairs train as well: their chosen answers are desirable, their rejected ones
    undesirable, and one that is both is left out. An answer counts with its record's weight.
    """

    profile: ClassVar = PROFILE

    beta: float = option(0.1, help="scale of rewards: how soon a difference saturates", validator=gt(0.0))
    desirable_weight: float = option(1.0, help="weight of desirable answers (λ_D in the paper)", validator=ge(0.0))
    undesirable_weight: float = option(1.0, help="weight of undesirable answers (λ_U)", validator=ge(0.0))
    kl: str = option(
        "mismatched",
        help='what the reference point is estimated from: "mismatched" (answers to other prompts), "batch" (the '
        'answers of the step), or "none" (it is 0)',
        validator=in_(tuple(SOURCES)),
    )

    def __attrs_post_init__(self) -> None:
        if not self.desirable_weight and not self.undesirable_weight:
            raise ValueError("desirable_weight and undesirable_weight are both 0: nothing would be learned")

    @classmethod
    def examples(cls) -> Iterable[KTO]:
        return (cls(desirable_weight=2.0, undesirable_weight=0.5),)

    @property
    def requires(self) -> frozenset[str]:
        own = frozenset({"labels", "ref_logprobs"})
        return own | {"unrelated"} if self.kl == "mismatched" else own

    @property
    def statistics_of(self) -> str | None:
        return SOURCES[self.kl]

    def statistics(self, scores: TokenLogprobs, batch: Batch, /) -> Mapping[str, tuple[mx.array, mx.array]]:
        return {"kl": ((batch.weights * batch.sum(log_ratios(scores, batch))).sum(), batch.weights.sum())}

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        ratios = batch.sum(log_ratios(scores, batch))  # [C]
        kl = batch.statistics["kl"] if self.statistics_of else mx.array(0.0)
        beyond = self.beta * (ratios - mx.maximum(kl, 0.0))
        good, bad = batch.labels == 1, batch.labels == 0
        loss = mx.where(good, self.desirable_weight * mx.sigmoid(-beyond), self.undesirable_weight * mx.sigmoid(beyond))
        means = batch.mean(scores.logprobs)
        metrics = {
            "accuracy": _mean(mx.where(good, beyond > 0, beyond < 0), good | bad, batch),
            "desirable": _mean(good, good | bad, batch),
        }
        for name, side in (("desirable", good), ("undesirable", bad)):
            metrics[f"reward_{name}"] = _mean(self.beta * ratios, side, batch)
            metrics[f"logprobs_{name}"] = _mean(means, side, batch)
        return LossOutput({"kto": _mean(loss, good | bad, batch)}, {**metrics, "kl": kl})


def _mean(x: mx.array, which: mx.array, batch: Batch) -> tuple[mx.array, mx.array]:
    """(total, count) of `x [C]` over completions, by their weights."""
    weights = mx.where(which, batch.weights, 0.0)
    return (weights * mx.where(which, x, 0.0)).sum(), weights.sum()

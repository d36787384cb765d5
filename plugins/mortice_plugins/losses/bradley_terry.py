"""The loss of a reward model: rewards whose difference is the log-odds that an answer is preferred.

Bradley and Terry, "Rank analysis of incomplete block designs", 1952; for language models Ouyang et al., 2022
(arXiv:2203.02155). The margin is that of Llama 2 (Touvron et al., 2023, arXiv:2307.09288), the centring that of
Eisenstein et al., 2023 (arXiv:2312.09244). What it leaves out: rankings of more than two answers at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice.batch import SCORE, Batch, LossOutput, TokenLogprobs
from mortice.options import ge, option
from mortice_plugins.losses.pairs import (
    clipped,
    clipped_share,
    max_loss_option,
    mean_over_pairs,
    sides,
    smoothed,
    smoothing_option,
)


@frozen
class BradleyTerry:
    """Loss of a reward model: −log σ of the reward margin of chosen against rejected; with the head `reward`.

    With r_c and r_r the rewards of chosen and rejected answer, ε = label_smoothing and m = r_c − r_r − `margin` · (the
    gap of their ratings), the loss is the mean over pairs of

        −(1−ε) log σ(m) − ε log σ(−m)  +  center_weight · (r_c + r_r)²

    A reward model may add any constant to its rewards; the second term makes them 0 on the average. `max_loss` bounds
    the first term of a pair. A pair counts with the weight of its chosen completion.
    """

    profile: ClassVar = {
        "head.name": "reward",
        "optimizer.learning_rate": 5e-5,
        "schedule.name": "cosine",
        "schedule.warmup": 0.03,
        "adapter.rank": 16,
        "adapter.scale": 2.0,
    }

    margin: float = option(
        0.0,
        help="how far apart rewards are to be for each point between the ratings; 0: no margin",
        validator=ge(0.0),
    )
    center_weight: float = option(0.0, help="weight of (r_c + r_r)², which centres rewards at 0", validator=ge(0.0))
    label_smoothing: float = smoothing_option()
    max_loss: float | None = max_loss_option()

    @classmethod
    def examples(cls) -> Iterable[BradleyTerry]:
        return (cls(center_weight=0.1, label_smoothing=0.1),)

    @property
    def requires(self) -> frozenset[str]:
        own = frozenset({"pairs", "values"})
        return own | {"scores"} if self.margin else own

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        assert scores.values is not None
        chosen, rejected = sides(batch.last(scores.values), batch)  # [N]
        margin = chosen - rejected
        wanted = margin
        if self.margin:
            high, low = sides(batch.extras[SCORE], batch)
            wanted = margin - self.margin * (high - low)
        loss = smoothed(wanted, self.label_smoothing)
        terms = {"preference": mean_over_pairs(clipped(loss, self.max_loss), batch)}
        if self.center_weight:
            terms["center"] = mean_over_pairs(mx.square(chosen + rejected), batch)
        metrics = {
            "reward": (chosen + rejected) / 2,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "margin": margin,
            "accuracy": margin > 0,
        }
        return LossOutput(
            terms,
            metrics={name: mean_over_pairs(value, batch) for name, value in metrics.items()}
            | clipped_share(loss, self.max_loss, batch),
            weights={"center": self.center_weight} if self.center_weight else {},
        )

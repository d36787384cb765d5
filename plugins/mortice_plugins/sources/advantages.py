"""Rewards of sampled answers to advantages.

GRPO: Shao et al., 2024 (arXiv:2402.03300). Leave one out: Ahmadian et al., 2024 (arXiv:2402.14740). Mean of the group,
deviation of the batch: Hu et al., "REINFORCE++", 2025 (arXiv:2501.03262).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BASELINES = ("group", "batch", "others")
SCALES = ("group", "batch", "none")
EPSILON = 1e-4


def advantages(rewards: Sequence[Sequence[float]], baseline: str = "group", scale: str = "group") -> list[list[float]]:
    """Of each group's answers: reward − baseline, divided by the sample standard deviation (n − 1) + 1e-4.

    `baseline` is the mean of the group, of the batch, or of the group's other answers; `scale` says whose deviation, or
    none. Where all rewards that are compared are equal the advantages are exactly 0.
    """
    groups = [np.asarray(group, dtype=np.float64) for group in rewards]
    everything = np.concatenate(groups)
    found = []
    for group in groups:
        if baseline == "others":
            centred = group - (group.sum() - group) / max(1, len(group) - 1)
        else:
            centred = group - (group if baseline == "group" else everything).mean()
        if np.ptp(everything if baseline == "batch" else group) == 0:
            centred = np.zeros_like(group)
        if scale != "none":
            spread = group if scale == "group" else everything
            centred = centred / ((spread.std(ddof=1) if len(spread) > 1 else 0.0) + EPSILON)
        found.append(centred.tolist())
    return found


def without_signal(rewards: Sequence[float]) -> bool:
    """Whether all answers of a group are rewarded alike, so that none is better than another."""
    return len(set(rewards)) <= 1


def best_and_worst(rewards: Sequence[float]) -> tuple[int, int] | None:
    """The first answer with the highest and the first with the lowest reward; None where all are equal."""
    if without_signal(rewards):
        return None
    return int(np.argmax(rewards)), int(np.argmin(rewards))

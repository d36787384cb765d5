"""Several answers to one prompt as a group with pairs: what formats of preferences share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mortice.batch import SCORE, Completion, Example, Group
from mortice.conversation import Split
from mortice.errors import DataError
from mortice_plugins.formats.conversational import kind_name, weight


def example(
    answers: Sequence[Split], pairs: Sequence[tuple[int, int]], record: Mapping[str, Any], source: str,
    scores: Sequence[float] | None = None, *, every: bool = False,
) -> Example:  # fmt: skip
    """The answers that pairs name, as a group; all of them where there is no pair, or with `every`.

    `pairs` are (chosen, rejected) indices into `answers`, `scores` their ratings.
    """
    used = range(len(answers)) if every or not pairs else sorted({k for pair in pairs for k in pair})
    place = {k: i for i, k in enumerate(used)}
    own, first = weight(record), answers[used[0]].prompt_ids
    completions = [
        Completion(
            answers[k].completion_ids, answers[k].loss_mask, own, answers[k].text,
            prompt_ids=None if answers[k].prompt_ids == first else answers[k].prompt_ids,
            extras={} if scores is None else {SCORE: scores[k]},
        )
        for k in used
    ]  # fmt: skip
    renumbered = tuple((place[c], place[r]) for c, r in pairs)
    return Example(Group(source, first, completions, renumbered, record), source)


def number(value: Any, where: str) -> float:
    """A finite number. Raises DataError naming the place for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"{where} must be a number, found {kind_name(value)}")
    return float(value)


def rated_pairs(scores: Sequence[float], which: str, min_gap: float = 0.0) -> list[tuple[int, int]]:
    """(chosen, rejected) indices of answers whose scores are apart, by at least `min_gap`.

    `which`: `best-worst` (one pair), `all`, or `adjacent` (each answer against the next lower one that is far enough
    away). Equal scores never make a pair; of answers that tie for a place the first takes it.
    """
    order = sorted(range(len(scores)), key=lambda k: -scores[k])  # stable: ties in the order of the record

    def apart(high: int, low: int) -> bool:
        return scores[high] > scores[low] and scores[high] - scores[low] >= min_gap

    if which == "best-worst":
        best = order[0]
        worst = min(range(len(scores)), key=lambda k: scores[k])
        return [(best, worst)] if apart(best, worst) else []
    if which == "all":
        return [(high, low) for high in order for low in order if apart(high, low)]
    found = [(high, next((low for low in order if apart(high, low)), None)) for high in order]
    return [(high, low) for high, low in found if low is not None]

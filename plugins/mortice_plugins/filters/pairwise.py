"""Filters that look at one pair at a time: at how its two answers differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import evolve, frozen

from mortice.batch import SCORE, Completion, Group
from mortice.errors import DataError
from mortice.options import ge, gt, option, optional


@frozen
class Identical:
    """Leaves out pairs whose two answers are the same: there is nothing to prefer."""

    requires: ClassVar[frozenset[str]] = frozenset({"pairs"})
    reason: ClassVar[str] = "chosen and rejected are identical"

    def __call__(self, groups: Sequence[Group], /) -> list[Group | None]:
        return [
            group.with_pairs([i for i, (c, r) in enumerate(sides(group)) if c.ids != r.ids]) for group in groups
        ]  # fmt: skip


@frozen
class LengthRatio:
    """Leaves out pairs of which one answer is more than `max` times as long as the other, in tokens."""

    requires: ClassVar[frozenset[str]] = frozenset({"pairs"})

    max: float = option(help="tokens of the longer answer for each of the shorter one", validator=ge(1.0))

    @property
    def reason(self) -> str:
        return f"one answer is more than {self.max:g} times as long as the other"

    def __call__(self, groups: Sequence[Group], /) -> list[Group | None]:
        def near(chosen: Completion, rejected: Completion) -> bool:
            short, long = sorted((len(chosen.ids), len(rejected.ids)))
            return long <= self.max * short

        return [group.with_pairs([i for i, pair in enumerate(sides(group)) if near(*pair)]) for group in groups]


@frozen
class ScoreGap:
    """Leaves out pairs whose scores are closer than `min`, or the wrong way round."""

    requires: ClassVar[frozenset[str]] = frozenset({"pairs"})

    min: float = option(help="least score of chosen − rejected", validator=ge(0.0))

    @property
    def reason(self) -> str:
        return f"chosen is rated less than {self.min:g} above rejected"

    def __call__(self, groups: Sequence[Group], /) -> list[Group | None]:
        return [
            group.with_pairs([i for i, gap in enumerate(found) if gap >= self.min])
            for group, found in zip(groups, gaps(groups))
        ]


@frozen
class GapWeight:
    """Weighs each pair by its score gap, on top of the record's own weight; pairs without a gap are left out.

    A loss divides by the sum of the weights of a step, so only their proportions within a step count: at a batch size
    of 1 they change nothing.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"pairs"})
    reason: ClassVar[str] = "chosen is not rated above rejected: a weight of 0"

    cap: float | None = option(None, help="larger gaps weigh as much as this one", validator=optional(gt(0.0)))

    def __call__(self, groups: Sequence[Group], /) -> list[Group | None]:
        weighed: list[Group | None] = []
        for group, found in zip(groups, gaps(groups)):
            own = group.pair_weights or (1.0,) * len(group.pairs)
            weights = [w * (gap if self.cap is None else min(gap, self.cap)) for w, gap in zip(own, found)]
            kept = [i for i, gap in enumerate(found) if gap > 0]
            weighed.append(evolve(group, pair_weights=tuple(weights)).with_pairs(kept))
        return weighed


def sides(group: Group) -> list[tuple[Completion, Completion]]:
    """Chosen and rejected of each pair."""
    return [(group.completions[c], group.completions[r]) for c, r in group.pairs]


def gaps(groups: Sequence[Group]) -> list[list[float]]:
    """Score of chosen − rejected, of each pair of each group. Raises DataError, naming rows that have no scores."""
    bare = [group.id for group in groups if any(SCORE not in c.extras for pair in sides(group) for c in pair)]
    if bare:
        more = f" and {len(bare) - 3} more" if len(bare) > 3 else ""
        raise DataError(f"{len(bare)} of {len(groups)} rows have no scores: {', '.join(bare[:3])}{more}")
    return [[c.extras[SCORE] - r.extras[SCORE] for c, r in sides(group)] for group in groups]

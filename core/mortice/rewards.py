"""Rewards of one answer: each by name, and their weighted sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from mortice.errors import CheckpointError, ConfigError, DataError
from mortice.protocols import Reward


@frozen
class NamedReward:
    """One of the rewards that are added up."""

    name: str
    """Its strategy's, numbered where several have one name."""
    reward: Reward


@frozen
class Rewarded:
    """What rewards gave one answer."""

    total: float
    """Σ weight · value."""
    values: Mapping[str, float]
    """By name, before their weights."""


def named(rewards: Sequence[tuple[str, Reward]]) -> tuple[NamedReward, ...]:
    """Rewards with names of their own: `regex`, `regex-2`, …"""
    counts: dict[str, int] = {}
    found = []
    for name, reward in rewards:
        counts[name] = counts.get(name, 0) + 1
        found.append(NamedReward(name if counts[name] == 1 else f"{name}-{counts[name]}", reward))
    return tuple(found)


def full_marks(rewards: Sequence[NamedReward]) -> float:
    """The total where every reward that counts for an answer gives 1, and none that counts against it anything."""
    return sum(max(0.0, r.reward.weight) for r in rewards)


def rewarded(
    rewards: Sequence[NamedReward], text: str, record: Mapping[str, Any], where: str,
    failed: Callable[[str, DataError], None] | None = None,
) -> Rewarded:  # fmt: skip
    """Score one answer to a record.

    A reward that raises or gives no finite number is told to `failed`, by its name and with the row, and counts as 0.
    Without `failed` it raises DataError, naming `where` and the reward.
    """
    values = {}
    for each in rewards:
        try:
            values[each.name] = _value(each, text, record, where)
        except DataError as error:
            if failed is None:
                raise
            failed(each.name, error)
            values[each.name] = 0.0
    return Rewarded(sum(each.reward.weight * values[each.name] for each in rewards), values)


def _value(each: NamedReward, text: str, record: Mapping[str, Any], where: str) -> float:
    try:
        value = each.reward(text, record)
    except DataError as error:
        raise DataError(f"{where}: reward {each.name}: {error}") from error
    except (CheckpointError, ConfigError):  # of the reward itself: no answer could be scored
        raise
    except Exception as error:  # the plugin boundary: a reward may be anyone's code
        raise DataError(f"{where}: reward {each.name} raised {type(error).__name__}: {error}") from error
    if isinstance(value, str) or not math.isfinite(value):
        raise DataError(f"{where}: reward {each.name} gave {value!r}, which is no finite number")
    return float(value)

"""Filters that compare rows with each other: what is there twice, and what contradicts itself."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import ClassVar

from attrs import frozen

from mortice.batch import Group


@frozen
class Duplicates:
    """Leaves out what an earlier row of the file has already: a pair, or a prompt with its answer. The first stays."""

    reason: ClassVar[str] = "the same stands in the file before"

    def __call__(self, groups: Sequence[Group], /) -> list[Group | None]:
        seen: set[Hashable] = set()

        def new(key: Hashable) -> bool:
            fresh = key not in seen
            seen.add(key)
            return fresh

        kept: list[Group | None] = []
        for group in groups:
            if group.pairs:
                kept.append(group.with_pairs([i for i, pair in enumerate(pair_keys(group)) if new(pair)]))
            else:
                answers = tuple((group.prompt_of(k), c.ids) for k, c in enumerate(group.completions))
                kept.append(group if new(answers) else None)
        return kept


@frozen
class Ambiguous:
    """Leaves out pairs that the file holds in both orders: the same answers, each preferred once. All of them go."""

    requires: ClassVar[frozenset[str]] = frozenset({"pairs"})
    reason: ClassVar[str] = "the same two answers are preferred in both orders"

    def __call__(self, groups: Sequence[Group], /) -> list[Group | None]:
        present = {pair for group in groups for pair in pair_keys(group)}
        return [
            group.with_pairs(
                [i for i, (c, r) in enumerate(pair_keys(group)) if c == r or (r, c) not in present]
            )  # identical answers are another filter's
            for group in groups
        ]  # fmt: skip


def pair_keys(group: Group) -> Iterator[tuple[Hashable, Hashable]]:
    """What makes each pair the same as another: prompt and answer of both sides."""
    for pair in group.pairs:
        chosen, rejected = ((group.prompt_of(k), group.completions[k].ids) for k in pair)
        yield chosen, rejected

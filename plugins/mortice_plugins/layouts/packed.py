"""Several groups in one row, up to a budget of tokens: fewer and longer products, no padding.

Groups are packed first-fit-decreasing (Johnson 1973): the longest first, each into the first row with room for it. A
row is a forest of spans, one tree for each prompt, so that no group sees another one, and each tree begins at position
0. What this leaves out: cutting a group in two, since a loss never sees part of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from attrs import define, field, frozen

from mortice.batch import Group, Limits, MicroBatch
from mortice.options import ge, option
from mortice.rows import RowBuilder, lay_separate, lay_shared


@frozen
class Packed:
    """Several groups in one row, up to a budget of tokens; every row is a micro-batch of its own.

    The gradients are those of `separate`. A group that is longer than the budget gets a row to itself. Groups whose
    completions come with different prompts keep each of these.
    """

    by_tokens: ClassVar = True
    leaner: ClassVar = {"row_tokens": (16384, 8192, 4096, 2048, 1024, 512)}

    row_tokens: int = option(4096, help="most tokens in one row that holds several groups", validator=ge(1))
    share_prefix: bool = option(True, help="a prompt runs once for all completions of its group; false: once for each")

    def __call__(self, groups: Sequence[Group], limits: Limits, /, *, prompt_targets: bool = False) -> list[MicroBatch]:
        bins = first_fit_decreasing([self._length(group) for group in groups], self.row_tokens)
        return [self._micro([groups[i] for i in places], prompt_targets) for places in bins]

    def _lay(self, group: Group) -> Callable[..., None]:
        return lay_shared if self.share_prefix and group.one_prompt else lay_separate

    def _length(self, group: Group) -> int:
        builder = RowBuilder()
        self._lay(group)(builder, group, 0, prompt_targets=False)
        return builder.length

    def _micro(self, groups: Sequence[Group], prompt_targets: bool) -> MicroBatch:
        builder = RowBuilder()
        first = 0
        for group in groups:
            self._lay(group)(builder, group, first, prompt_targets=prompt_targets)
            first += len(group.completions)
        return MicroBatch(groups, [builder.row()])


@define
class _Bin:
    room: int
    places: list[int] = field(factory=list)


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Places of the items of each bin. Longest first, ties in the order given; one that exceeds the budget is alone."""
    bins: list[_Bin] = []
    for place in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[place]
        home = next((b for b in bins if b.room >= length), None)
        if home is None:
            home = _Bin(max(budget, length))
            bins.append(home)
        home.room -= length
        home.places.append(place)
    return [b.places for b in bins]

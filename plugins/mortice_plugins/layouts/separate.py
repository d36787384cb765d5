"""One row for each completion: the plain twin of every layout that shares or packs."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from mortice.batch import Group, Limits, MicroBatch, Row
from mortice.rows import chunk_groups, separate_rows


@frozen
class Separate:
    """One row for each completion, with its own copy of the prompt."""

    def __call__(self, groups: Sequence[Group], limits: Limits, /, *, prompt_targets: bool = False) -> list[MicroBatch]:
        batches = []
        for chunk in chunk_groups(groups, limits):
            rows: list[Row] = []
            first = 0
            for group in chunk:
                rows += separate_rows(group, first, prompt_targets=prompt_targets)
                first += len(group.completions)
            batches.append(MicroBatch(chunk, rows))
        return batches

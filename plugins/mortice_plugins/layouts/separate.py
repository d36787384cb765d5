"""One row for each completion: the plain twin of every layout that shares or packs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from attrs import frozen

from mortice.batch import Group, Limits, MicroBatch
from mortice.rows import micro_batches, separate_rows


@frozen
class Separate:
    """One row for each completion, with its own copy of the prompt."""

    def __call__(self, groups: Sequence[Group], limits: Limits, /, *, prompt_targets: bool = False) -> list[MicroBatch]:
        return micro_batches(groups, limits, partial(separate_rows, prompt_targets=prompt_targets))

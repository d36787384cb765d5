"""One row a group: the prompt runs once and every completion branches from it.

A group whose completions were tokenized with different prompts cannot share one; it falls back to separate rows,
and `mortice` counts such groups when it reads the data.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from mortice.batch import Group, Limits, MicroBatch, Row
from mortice.rows import micro_batches, separate_rows, shared_row


@frozen
class PrefixShared:
    """One row a group: its prompt runs once, completions branch from it.

    The gradients are those of `separate`; the cost is that of one prompt instead of K. Groups whose completions
    come with different prompts fall back to separate rows.
    """

    def __call__(self, groups: Sequence[Group], limits: Limits, /, *, prompt_targets: bool = False) -> list[MicroBatch]:
        def rows_of(group: Group, first: int) -> list[Row]:
            if group.one_prompt:
                return [shared_row(group, first, prompt_targets=prompt_targets)]
            return separate_rows(group, first, prompt_targets=prompt_targets)

        return micro_batches(groups, limits, rows_of)

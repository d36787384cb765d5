"""Conformance of layouts: subclass `LayoutSuite` in a pytest file and set `layout`.

Everything is compared with the plain sequences `prompt + completion`.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from mortice.batch import Completion, Group, Limits, MicroBatch, Row
from mortice.protocols import Layout


def path(row: Row, index: int) -> list[int]:
    """The token ids that the hidden state at `index` has seen: its ancestors', then its own span's up to itself."""
    at = next(i for i, span in enumerate(row.spans) if span.start <= index < span.stop)
    seen = row.tokens[row.spans[at].start : index + 1].tolist()
    parent = row.spans[at].parent
    while parent is not None:
        span = row.spans[parent]
        seen = row.tokens[span.start : span.stop].tolist() + seen
        parent = span.parent
    return seen


class LayoutSuite:
    """What every layout must do. Set `layout` to the configured strategy."""

    layout: ClassVar[Layout]

    def groups(self) -> list[Group]:
        """Pairs, a single completion, one-token completions, masked tokens, and completions of different prompts."""
        return [
            Group("pair", [1, 2, 3], [Completion([4, 5, 6]), Completion([7])], ((0, 1),)),
            Group("one", [1], [Completion([8, 9])]),
            Group("masked", [1, 2], [Completion([3, 4, 5], [False, True, False]), Completion([6, 7])]),
            Group("prompts", [1, 2], [Completion([3, 4]), Completion([5, 6], prompt_ids=(9,))]),
        ]

    def _expected(self, groups: tuple[Group, ...], prompt_targets: bool) -> list[tuple]:
        """(owner, place, is_prompt, what is seen, target) of everything that must be scored."""
        found = []
        for owner, group, k, completion in MicroBatch(groups, ()).completions():
            prompt = list(group.prompt_of(k))
            if prompt_targets and k == 0:
                found += [(owner, j, True, tuple(prompt[:j]), prompt[j]) for j in range(1, len(prompt))]
            for j, (token, kept) in enumerate(zip(completion.ids, completion.loss_mask)):
                if kept or prompt_targets:
                    found.append((owner, j, not kept, (*prompt, *completion.ids[:j]), token))
        return sorted(found)

    @pytest.mark.parametrize("prompt_targets", [False, True])
    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_every_target_once_behind_what_precedes_it(self, size: int, prompt_targets: bool) -> None:
        groups = self.groups()
        micros = self.layout(groups, Limits(groups=size), prompt_targets=prompt_targets)
        laid = [id(group) for micro in micros for group in micro.groups]
        assert sorted(laid) == sorted(id(group) for group in groups), "each group once, as it was given"
        for micro in micros:
            found = [
                (int(owner), int(place), bool(is_prompt), tuple(path(row, int(index))), int(target))
                for row in micro.rows
                for index, target, owner, place, is_prompt in zip(
                    row.index, row.target, row.owner, row.place, row.is_prompt
                )
            ]
            assert sorted(found) == self._expected(micro.groups, prompt_targets)

    def test_spans_tile_the_row_and_positions_follow_their_parents(self) -> None:
        for micro in self.layout(self.groups(), Limits(groups=4), prompt_targets=False):
            for row in micro.rows:
                assert [span.start for span in row.spans] == [0, *(span.stop for span in row.spans[:-1])]
                assert row.spans[-1].stop == row.length
                for i, span in enumerate(row.spans):
                    if span.parent is None:
                        assert span.position == 0
                    else:
                        parent = row.spans[span.parent]
                        assert span.parent < i
                        assert span.position == parent.position + parent.length

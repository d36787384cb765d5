"""Building rows: where mask and target are shifted by one, once, for every layout.

A layout decides which prompts and completions share a row; `RowBuilder` lays them down. A completion's last
token is scored but never run, so a one-token completion has no span of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import evolve

from mortice.batch import Completion, Group, Limits, MicroBatch, Row, Span


class RowBuilder:
    """One row in the making. `prompt` opens a prompt, `completion` branches from it."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._spans: list[Span] = []
        self._scored: list[tuple[int, int, int, int, bool]] = []  # index, target, owner, place, is_prompt

    def _span(self, ids: Sequence[int], parent: int | None, position: int, key: str) -> int:
        start = len(self._tokens)
        self._tokens += ids
        self._spans.append(Span(start, start + len(ids), parent, position, key))
        return len(self._spans) - 1

    def prompt(self, group: Group, k: int, owner: int, *, targets: bool) -> int:
        """Lay down the prompt of completion k; with `targets` its tokens but the first are scored for `owner`."""
        ids = group.prompt_of(k)
        if not ids:
            raise ValueError(f"group {group.id!r}: a prompt needs at least one token to predict from")
        span = self._span(ids, None, 0, f"{group.id}/prompt")
        if targets:
            start = self._spans[span].start
            self._scored += [(start + j - 1, ids[j], owner, j, True) for j in range(1, len(ids))]
        return span

    def completion(self, group: Group, k: int, owner: int, parent: int, *, masked_targets: bool) -> None:
        """Lay down completion k behind the prompt `parent`; `masked_targets` scores tokens outside its mask too."""
        completion = group.completions[k]
        ids, before = completion.ids, self._spans[parent]
        start = len(self._tokens)
        if len(ids) > 1:
            self._span(ids[:-1], parent, before.position + before.length, f"{group.id}/{k}")
        for j, (target, kept) in enumerate(zip(ids, completion.loss_mask)):
            if kept or masked_targets:
                index = before.stop - 1 if j == 0 else start + j - 1
                self._scored.append((index, target, owner, j, not kept))

    @property
    def length(self) -> int:
        """Tokens laid down so far."""
        return len(self._tokens)

    def row(self) -> Row:
        columns = list(zip(*self._scored)) or [()] * 5
        return Row(self._tokens, self._spans, *columns)


def read_through(group: Group) -> Group:
    """The group for a head that reads the hidden state *of* each completion's last scored token.

    One target more stands behind that token, and it alone is scored: so every layout runs the token and scores its
    state. The target's id means nothing. What follows the last scored token is left out.
    """

    def ended(completion: Completion) -> Completion:
        stop = max((j + 1 for j, kept in enumerate(completion.loss_mask) if kept), default=0)
        ids, mask = (*completion.ids[:stop], 0), (*[False] * stop, stop > 0)
        return evolve(completion, ids=ids, loss_mask=mask, ref_logprobs=None, old_logprobs=None, sampler_logprobs=None)

    return group.with_completions([ended(completion) for completion in group.completions])


def prompt_owner(group: Group) -> int:
    """The completion that prompt targets belong to: the chosen one of the first pair, else the first."""
    return group.pairs[0][0] if group.pairs else 0


def lay_separate(builder: RowBuilder, group: Group, first: int, *, prompt_targets: bool) -> None:
    """Every completion behind its own copy of the prompt. The prompt's targets are scored behind its owner's alone."""
    for k in range(len(group.completions)):
        _lay_alone(builder, group, k, first, prompt_targets=prompt_targets)


def _lay_alone(builder: RowBuilder, group: Group, k: int, first: int, *, prompt_targets: bool) -> None:
    prompt = builder.prompt(group, k, first + k, targets=prompt_targets and k == prompt_owner(group))
    builder.completion(group, k, first + k, prompt, masked_targets=prompt_targets)


def lay_shared(builder: RowBuilder, group: Group, first: int, *, prompt_targets: bool) -> None:
    """The prompt once, every completion a branch of it."""
    owner = prompt_owner(group)
    prompt = builder.prompt(group, owner, first + owner, targets=prompt_targets)
    for k in range(len(group.completions)):
        builder.completion(group, k, first + k, prompt, masked_targets=prompt_targets)


def separate_rows(group: Group, first: int, *, prompt_targets: bool) -> list[Row]:
    """One row for each completion, with its own copy of the prompt, which is scored in its owner's row alone."""
    rows = []
    for k in range(len(group.completions)):
        builder = RowBuilder()
        _lay_alone(builder, group, k, first, prompt_targets=prompt_targets)
        rows.append(builder.row())
    return rows


def shared_row(group: Group, first: int, *, prompt_targets: bool) -> Row:
    """One row for the group: its prompt once, every completion a branch of it."""
    builder = RowBuilder()
    lay_shared(builder, group, first, prompt_targets=prompt_targets)
    return builder.row()


def micro_batches(
    groups: Sequence[Group], limits: Limits, rows_of: Callable[[Group, int], Sequence[Row]]
) -> list[MicroBatch]:
    """Whole groups, `limits.groups` at a time, in order. `rows_of(group, first)` lays out one group whose first
    completion is number `first` of its micro-batch."""
    batches = []
    for start in range(0, len(groups), limits.groups):
        chunk = groups[start : start + limits.groups]
        rows: list[Row] = []
        first = 0
        for group in chunk:
            rows += rows_of(group, first)
            first += len(group.completions)
        batches.append(MicroBatch(chunk, rows))
    return batches

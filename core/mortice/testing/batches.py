"""Small groups, batches and scores by hand, for tests of losses.

Scored tokens come in the order of the plain layout: for each completion, its prompt's targets where the group's first
completion owns them, then its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from mortice.batch import Batch, Completion, Group, MicroBatch, TokenLogprobs
from mortice.objective import make_batch as batch_of
from mortice.rows import separate_rows


def arrange(groups: Sequence[Group], requires: Iterable[str] = ()) -> MicroBatch:
    """The groups as one micro-batch, every completion in a row of its own."""
    rows = []
    first = 0
    for group in groups:
        rows += separate_rows(group, first, prompt_targets="prompt_logprobs" in frozenset(requires))
        first += len(group.completions)
    return MicroBatch(groups, rows)


def make_batch(groups: Sequence[Group], requires: Iterable[str] = ()) -> Batch:
    """What a loss with these requirements sees of the groups."""
    return batch_of(arrange(groups, requires), frozenset(requires))


def make_scores(
    groups: Sequence[Group],
    logprobs: Sequence[Sequence[Sequence[float]]],
    requires: Iterable[str] = (),
    *,
    prompts: Sequence[Sequence[float]] | None = None,
) -> TokenLogprobs:
    """Scores for `make_batch` of the same groups.

    `logprobs[group][completion]` holds one number for every token of the completion, `prompts[group]` one for every
    prompt token but the first; the latter are needed where `requires` holds `prompt_logprobs`.
    """
    micro = arrange(groups, requires)
    flat: list[float] = []
    places = [(g, k) for g, group in enumerate(groups) for k in range(len(group.completions))]
    for row, (g, k) in zip(micro.rows, places):
        prompt_stop = row.spans[0].stop
        for index, place in zip(row.index, row.place):
            if index < prompt_stop - 1:
                if prompts is None:
                    raise ValueError("prompt tokens are scored: give their log-probabilities as `prompts`")
                flat.append(prompts[g][place - 1])
            else:
                flat.append(logprobs[g][k][place])
    return TokenLogprobs(mx.array(flat, dtype=mx.float32))


def make_group(id: str, *lengths: int, prompt: int = 2, pairs: Sequence[tuple[int, int]] = ()) -> Group:
    """A group of completions of these lengths behind a prompt of `prompt` tokens, the ids counting up from 1."""
    completions = []
    start = 1 + prompt
    for length in lengths:
        completions.append(Completion(range(start, start + length)))
        start += length
    return Group(id, range(1, 1 + prompt), completions, tuple(pairs))

"""The types that travel from a record to an optimizer step. All frozen.

    record → Example → Group → Row(s) → hidden → TokenLogprobs → LossOutput → Gradients

Everything a loss needs is in `Batch`; no loss sees a model, a tokenizer or a file. Row and group
types hold plain Python and numpy; `Batch` and `TokenLogprobs` hold mlx arrays, so `mlx` is imported
by what makes those, never by this module's import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from attrs import evolve, field, frozen

if TYPE_CHECKING:
    import mlx.core as mx

Gradients: TypeAlias = "dict[str, mx.array]"
"""Named as Hugging Face spells the modules: `model.layers.0.self_attn.q_proj.lora_a`. float32."""


SCORE = "score"
"""The rating of an answer, where its record has one, among a completion's `extras`."""
LABEL = "label"
"""1 for a desirable answer, 0 for an undesirable one, where its record says so, among a completion's `extras`."""


def _tuple(value: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(value)


def _ids(value: Sequence[int]) -> tuple[int, ...]:
    """Token ids as whole numbers of 0 or more; arrays are taken as lists. Raises ValueError for anything else."""
    items = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(items, (str, bytes)):
        raise ValueError(f"token ids must be whole numbers, found {items!r}")
    ids = tuple(items)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, (int, np.integer)) or i < 0:
            raise ValueError(f"token ids must be whole numbers of 0 or more, found {i!r}")
    return tuple(int(i) for i in ids)


def _bools(value: Iterable[Any]) -> tuple[bool, ...]:
    return tuple(bool(v) for v in value)


def _floats(value: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if value is None else tuple(float(v) for v in value)


@frozen
class Completion:
    """One answer: its token ids (the end-of-turn id included where there is one) and what is known of it."""

    ids: tuple[int, ...] = field(converter=_ids)
    loss_mask: tuple[bool, ...] = field(converter=_bools)
    weight: float = 1.0
    text: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    """Set only where this completion was tokenized with another prompt than its group's."""
    ref_logprobs: tuple[float, ...] | None = field(default=None, converter=_floats)
    old_logprobs: tuple[float, ...] | None = field(default=None, converter=_floats)
    """Of the policy that sampled it, as training scores it."""
    sampler_logprobs: tuple[float, ...] | None = field(default=None, converter=_floats)
    """As the engine that sampled it gave them, at the temperature."""
    advantage: float | None = None
    reward: float | None = None
    finish_reason: str | None = None
    extras: Mapping[str, float] = field(factory=dict)
    """Numbers that a loss may want (a label, a score); they reach it as `batch.extras[name]`, `[C]`."""

    @loss_mask.default
    def _all_scored(self) -> tuple[bool, ...]:
        return (True,) * len(self.ids)

    def __attrs_post_init__(self) -> None:
        for name in ("loss_mask", "ref_logprobs", "old_logprobs", "sampler_logprobs"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.ids):
                raise ValueError(f"{name} has {len(value)} entries for {len(self.ids)} token ids")


@frozen
class Group:
    """One prompt with its K completions; the unit of a loss. SFT K=1, pairs K=2 (chosen first), GRPO K=G."""

    id: str
    prompt_ids: tuple[int, ...] = field(converter=_ids)
    completions: tuple[Completion, ...] = field(converter=_tuple)
    pairs: tuple[tuple[int, int], ...] = ()
    """(chosen, rejected) indices into `completions`. Empty where the group carries no preference."""
    record: Mapping[str, Any] | None = None
    """The record it came from, for rewards and for showing it."""
    pair_weights: tuple[float, ...] = field(default=(), converter=_tuple)
    """Of each pair, times the weight of its chosen completion; empty where all are 1."""
    unrelated: Group | None = None
    """The prompt before an answer to another one, for losses that estimate on such how far the policy has gone from its
    reference (`requires` `unrelated`)."""

    def __attrs_post_init__(self) -> None:
        if self.pair_weights and len(self.pair_weights) != len(self.pairs):
            raise ValueError(f"pair_weights has {len(self.pair_weights)} entries for {len(self.pairs)} pairs")

    def prompt_of(self, k: int) -> tuple[int, ...]:
        own = self.completions[k].prompt_ids
        return self.prompt_ids if own is None else own

    @property
    def one_prompt(self) -> bool:
        """Whether every completion follows the same prompt ids, so that they can share a prefix."""
        return all(c.prompt_ids is None or c.prompt_ids == self.prompt_ids for c in self.completions)

    @property
    def tokens(self) -> int:
        """Of the prompt, once, and all completions."""
        return len(self.prompt_ids) + sum(len(c.ids) for c in self.completions)

    @property
    def scored_tokens(self) -> int:
        return sum(sum(c.loss_mask) for c in self.completions)

    def with_completions(self, completions: Sequence[Completion]) -> Group:
        return evolve(self, completions=tuple(completions))

    def with_pairs(self, kept: Sequence[int]) -> Group | None:
        """The group with only these of its pairs, and without completions that only others name; None for no pair."""
        if len(kept) == len(self.pairs):
            return self
        used = sorted({k for i in kept for k in self.pairs[i]})
        place = {k: i for i, k in enumerate(used)}
        if not used:
            return None
        return evolve(
            self,
            completions=tuple(self.completions[k] for k in used),
            pairs=tuple((place[c], place[r]) for c, r in (self.pairs[i] for i in kept)),
            pair_weights=tuple(self.pair_weights[i] for i in kept) if self.pair_weights else (),
        )


@frozen
class Example:
    """One record after its chat template, before truncation: a group and where it came from."""

    group: Group
    source: str
    """`file:line`, for messages."""


@frozen
class Span:
    """A run of tokens in a row. It attends to its ancestors and causally to itself."""

    start: int
    stop: int
    parent: int | None
    """Index of the parent span in the row, always smaller than the own index."""
    position: int
    """Position of its first token (an ancestor's length, not the offset in the row)."""
    key: str = ""
    """Names the span for keyed randomness: `GROUP_ID/prompt` or `GROUP_ID/K`, the same in every layout."""

    @property
    def length(self) -> int:
        return self.stop - self.start


def _int32(value: Any) -> np.ndarray:
    return np.asarray(value, dtype=np.int32)


def _bool_array(value: Any) -> np.ndarray:
    return np.asarray(value, dtype=bool)


@frozen(eq=False)
class Row:
    """Flat token ids `[T]`, the spans that tile them, and what is scored. No padding.

    `index [M]` is the hidden state that predicts, `target [M]` the predicted id, `owner [M]` the completion
    (an index into the micro-batch), `place [M]` which token of that completion (or of the prompt) it is, and
    `is_prompt [M]` marks targets outside the loss mask: prompt tokens and, inside a completion, tokens that
    `loss_mask` leaves out. Several targets may read one hidden state.
    """

    tokens: np.ndarray = field(converter=_int32)
    spans: tuple[Span, ...] = field(converter=_tuple)
    index: np.ndarray = field(converter=_int32)
    target: np.ndarray = field(converter=_int32)
    owner: np.ndarray = field(converter=_int32)
    place: np.ndarray = field(converter=_int32)
    is_prompt: np.ndarray = field(converter=_bool_array)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def scored(self) -> int:
        return len(self.index)


@frozen(eq=False)
class MicroBatch:
    """The rows that together hold whole groups, as they were given: a loss never sees part of a group."""

    groups: tuple[Group, ...] = field(converter=_tuple)
    rows: tuple[Row, ...] = field(converter=_tuple)
    given: tuple[Group, ...] = field(converter=_tuple)
    """The same groups as they came, where what is laid out differs (`mortice.rows.read_through`)."""

    @given.default
    def _as_laid_out(self) -> tuple[Group, ...]:
        return self.groups

    def completions(self) -> Iterator[tuple[int, Group, int, Completion]]:
        """(index in the micro-batch, group, index in the group, completion), in the order of `owner`."""
        index = 0
        for group in self.groups:
            for k, completion in enumerate(group.completions):
                yield index, group, k, completion
                index += 1

    @property
    def tokens(self) -> int:
        return sum(row.length for row in self.rows)


@frozen
class Limits:
    """What a layout must keep to."""

    groups: int = 1
    """Groups in one micro-batch, for layouts that do not go by tokens."""


@frozen(eq=False)
class Batch:
    """What a loss sees beside the scores: M scored tokens of C completions, with N preference pairs."""

    owner: mx.array
    """`[M]` int32: the completion of each scored token. A prompt token belongs to its group's chosen completion, or
    the first one where there is no pair."""
    is_prompt: mx.array
    """`[M]` bool: targets outside the loss mask; present only where the loss requires `prompt_logprobs`."""
    pairs: mx.array
    """`[N, 2]` int32: (chosen, rejected) completions."""
    pair_weights: mx.array
    """`[N]` float32: the weight of each pair's chosen completion, times the pair's own."""
    group: mx.array
    """`[C]` int32: the group of each completion."""
    lengths: mx.array
    """`[C]` float32: scored completion tokens, prompt excluded."""
    advantages: mx.array
    """`[C]` float32; zeros where there are none."""
    weights: mx.array
    """`[C]` float32."""
    groups: int
    """How many groups the batch holds."""
    rewards: mx.array
    """`[C]` float32; zeros where there are none."""
    labels: mx.array
    """`[C]` float32: 1 for a desirable completion, 0 for an undesirable one, NaN where neither is known. What a record
    says, else: chosen is desirable and rejected is not."""
    owners: mx.array
    """`[C, M]` bool: which scored tokens each completion owns, prompt targets excluded."""
    old_logprobs: mx.array | None = None
    """`[M]` float32, zero at prompt targets."""
    ref_logprobs: mx.array | None = None
    """`[M]` float32, zero at prompt targets."""
    sampler_logprobs: mx.array | None = None
    """`[M]` float32, zero at prompt targets."""
    extras: Mapping[str, mx.array] = field(factory=dict)
    """`[C]` float32 each: what completions carry in `extras`; absent values are NaN."""
    statistics: Mapping[str, mx.array] = field(factory=dict)
    """Numbers that the loss goes by beyond this micro-batch, by name: see `mortice.protocols.Loss`."""

    def sum(self, x: mx.array) -> mx.array:
        """Sum of a per-token vector over the scored tokens of each completion: `[M] → [C]`, prompt excluded."""
        import mlx.core as mx

        return mx.where(self.owners, x[None, :].astype(mx.float32), 0.0).sum(axis=1)  # [C]

    def mean(self, x: mx.array) -> mx.array:
        """Mean over the scored tokens of each completion: `[M] → [C]`. A completion without any gives 0."""
        import mlx.core as mx

        return self.sum(x) / mx.maximum(self.lengths, 1.0)

    def last(self, x: mx.array) -> mx.array:
        """The value at the last scored token of each completion: `[M] → [C]`."""
        import mlx.core as mx

        place = mx.arange(1, x.shape[0] + 1)
        return x[mx.argmax(mx.where(self.owners, place[None, :], 0), axis=1)]


@frozen(eq=False)
class TokenLogprobs:
    """What a head returns for M scored tokens. Reductions over the vocabulary are float32."""

    logprobs: mx.array
    """`[M]` float32."""
    lse: mx.array | None = None
    """`[M]` float32: log-sum-exp of the (soft-capped, tempered) logits."""
    entropy: mx.array | None = None
    """`[M]` float32, a metric without gradient, when asked for."""
    dhidden: mx.array | None = None
    """`[M, D]` float32: ∂logprob/∂hidden, one row a token, when asked for."""
    values: mx.array | None = None
    """`[M]` float32: of a head that `provides` `values` instead of log-probabilities; `dhidden` is ∂value/∂hidden."""


Number: TypeAlias = "float | int | mx.array"


@frozen(eq=False)
class LossOutput:
    """Totals and counts of each term; the trainer divides, once a step.

    The loss of a step is Σ weight · total / count, every total and count summed over all micro-batches (and
    ranks) first. A metric is a (total, count) pair, or a number, which counts once for every group.
    """

    terms: Mapping[str, tuple[Number, Number]]
    metrics: Mapping[str, Number | tuple[Number, Number]] = field(factory=dict)
    weights: Mapping[str, float] = field(factory=dict)
    """Weight of each term, 1 where it is not named."""

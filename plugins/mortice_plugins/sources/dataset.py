"""Groups from files: each row once an epoch, in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from attrs import define, frozen

from mortice.batch import LABEL, Group
from mortice.data import DataCounts, load_groups, with_unrelated
from mortice.errors import DataError
from mortice.options import option
from mortice.protocols import SourceContext
from mortice.randomness import stable_seed


@frozen
class Dataset:
    """JSON Lines files: each row once an epoch, in a seeded order; the last step of an epoch may be smaller."""

    provides: ClassVar[frozenset[str]] = frozenset({"unrelated"})

    shuffle: bool = option(True, help="a new seeded order every epoch; false keeps the order of the file")

    def open(self, context: SourceContext, /) -> LiveDataset:
        """Read and check all data. Raises DataError for whatever is wrong with it."""
        data = context.data
        name = getattr(data, "format", "")
        if data.train is None:
            raise DataError("data.train is not set: which file is to be trained on?")

        def read(path: Any) -> list[Group]:
            groups, counts = load_groups(
                path, context.format, context.tokenizer, data, name=name, formats=context.formats,
                filters=context.filters,
            )  # fmt: skip
            _tell(context, path, counts, data.max_length)
            if "unrelated" not in context.requires:
                return groups
            try:
                return with_unrelated(groups, data.max_length, data.truncation, context.tokenizer.bos_id)
            except DataError as error:
                raise DataError(f"{path}: {error}") from error

        train = read(data.train)
        if "labels" in context.requires and (kind := _only_kind(train)):
            context.report(f"{data.train.name}: every answer is labelled {kind}: there is no other side to learn from")
        valid = read(data.valid) if data.valid is not None else []
        if not valid:
            context.report("evaluation is off: data.valid is not set")
        return LiveDataset(
            train, valid, context.batch_size, context.seed, self.shuffle, frozenset(context.format.provides)
        )


def _tell(context: SourceContext, path: Any, counts: DataCounts, max_length: int) -> None:
    for message, count in counts.messages(path, max_length):
        context.report(message, count=count)


def _only_kind(groups: Sequence[Group]) -> str | None:
    """`desirable` or `undesirable`, where all answers are labelled so."""
    labels = {c.extras.get(LABEL) for group in groups for c in group.completions}
    kinds: dict[float | None, str] = {1.0: "desirable", 0.0: "undesirable"}
    return kinds.get(labels.pop()) if len(labels) == 1 else None


@define(eq=False)
class LiveDataset:
    """The groups of step n are a function of n: nothing has to be remembered to go on from a step."""

    train: Sequence[Group]
    valid: Sequence[Group]
    batch_size: int
    seed: int
    shuffle: bool
    provides: frozenset[str]

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train) // self.batch_size)

    @property
    def can_validate(self) -> bool:
        return bool(self.valid)

    def known(self) -> Sequence[Group]:
        """Every group there will be, so that a run can be refused before its first step."""
        return [*self.train, *self.valid]

    def next(self, step: int, /) -> tuple[Sequence[Group], int]:
        epoch, place = divmod(step, self.steps_per_epoch)
        order = self.order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        return [self.train[i] for i in order], 1

    def order(self, epoch: int) -> Sequence[int]:
        """Row indices of an epoch, each once."""
        if not self.shuffle:
            return range(len(self.train))
        generator = np.random.Generator(np.random.PCG64(stable_seed(self.seed, "order", epoch)))
        return generator.permutation(len(self.train)).tolist()

    def validate(self, evaluate: Callable[[Sequence[Group]], dict[str, float]], /) -> dict[str, float]:
        return evaluate(self.valid)

    @cached_property
    def fingerprint(self) -> str:
        """Of all token ids, masks, pairs and weights, in the order of the files."""
        digest = hashlib.blake2b(digest_size=16)
        for group in (*self.train, *self.valid):
            completions = [(c.ids, c.loss_mask, c.weight, *sorted(c.extras.items())) for c in group.completions]
            digest.update(repr((group.prompt_ids, completions, group.pairs, group.pair_weights)).encode())
        return digest.hexdigest()

    def state(self) -> dict[str, Any]:
        return {"rows": len(self.train), "batch_size": self.batch_size, "fingerprint": self.fingerprint}

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Raises DataError where the data is not what the state was made with."""
        own = self.state()
        changed = [name for name, value in state.items() if own.get(name) != value]
        if changed:
            raise DataError(f"the data is not what this run was started with ({', '.join(changed)} changed)")

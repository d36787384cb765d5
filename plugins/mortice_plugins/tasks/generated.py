"""What generated tasks share: a finite space of problems, two splits of it, and an order by the seed.

A problem is in the test split if a hash of what makes it the same problem says so: so no problem, and no other spelling
of it, is ever in both splits, whatever the seed, and no list has to be kept.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from attrs import frozen

from mortice.errors import ConfigError
from mortice.options import option
from mortice.randomness import stable_seed

SPLITS = ("train", "test")
HELD_OUT = 10
"""One problem of so many is in the test split."""
LISTED = 1 << 17
"""Spaces up to this size are shuffled whole, and end; larger ones are drawn from."""


@frozen
class Generated:
    """Problems by number, from 0 to `size`."""

    repeat: bool = option(
        False, help="begin anew, in another order, when all problems of the training split were given"
    )

    @property
    def size(self) -> int:
        """How many problems there are."""
        raise NotImplementedError

    def problem(self, number: int) -> dict[str, Any]:
        """The record of a problem: `prompt`, `answer`, and what `check` goes by."""
        raise NotImplementedError

    def identity(self, number: int) -> Hashable:
        """Equal for problems of which one gives the other away."""
        return number

    def held_out(self, number: int) -> bool:
        return stable_seed(type(self).__name__, self.identity(number)) % HELD_OUT == 0

    def problems(self, split: str, seed: int, /) -> Iterator[Mapping[str, Any]]:
        """Each problem of a split once, in an order by the seed. Raises ConfigError when they are used up, unless the
        split is the test split, which ends, or `repeat` is set."""
        if split not in SPLITS:
            raise ConfigError(f"no split {split!r} (there are {', '.join(SPLITS)})")
        turn = given = 0
        while True:
            before = given
            for number in self._order(seed, turn):
                if self.held_out(number) == (split == "test"):
                    given += 1
                    yield self.problem(number)
            if split == "test":
                return
            if given == before or not self.repeat:
                raise ConfigError(
                    f"task {type(self).__name__.lower()} has no more than {given} {split} problems with these options; "
                    "ask for fewer, make them harder, or set task.repeat = true"
                )
            turn += 1

    def _order(self, seed: int, turn: int) -> Iterator[int]:
        draw = random.Random(stable_seed("task", type(self).__name__, seed, turn))
        if self.size <= LISTED:
            numbers = list(range(self.size))
            draw.shuffle(numbers)
            yield from numbers
            return
        seen: set[int] = set()
        while len(seen) < self.size // 2:  # beyond that most draws would be seen ones
            number = draw.randrange(self.size)
            if number not in seen:
                seen.add(number)
                yield number

"""Copying and sorting digits: tasks whose best score is known to be 1, and which a tiny model can learn."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

from attrs import frozen

from mortice.options import and_, ge, le, option
from mortice_plugins.tasks.generated import Generated


@frozen
class Copy(Generated):
    """{"prompt": "copy 3 1 4:", "answer": "3 1 4"}: digits, given back as they are.

    Three scores: `correct`, all of it; `share`, how many places hold the right digit; `format`, digits with spaces
    between, as many as were given.
    """

    verb: ClassVar[str] = "copy"

    length: int = option(3, help="digits", validator=and_(ge(1), le(12)))

    @property
    def size(self) -> int:
        return 10**self.length

    def _digits(self, number: int) -> str:
        return f"{number:0{self.length}d}"

    def answer(self, digits: str) -> str:
        return digits

    def problem(self, number: int) -> dict[str, Any]:
        digits = self._digits(number)
        return {"prompt": f"{self.verb} {' '.join(digits)}:", "answer": " ".join(self.answer(digits))}

    def completion(self, problem: Mapping[str, Any]) -> str:
        """The right answer in the right form."""
        return f" {problem['answer']}"

    def check(self, completion: str, problem: Mapping[str, Any], /) -> dict[str, float]:
        wanted, found = problem["answer"].split(), completion.split()
        shaped = len(found) == len(wanted) and all(len(x) == 1 and x.isdigit() for x in found)
        share = sum(a == b for a, b in zip(wanted, found)) / max(len(wanted), len(found))
        return {"format": float(shaped), "correct": float(found == wanted), "share": share}


@frozen
class Sort(Copy):
    """{"prompt": "sort 3 1 4:", "answer": "1 3 4"}: digits, given back in ascending order.

    Three scores: `correct`, all of it; `share`, how many places hold the right digit; `format`, digits with spaces
    between, as many as were given. Orders of the same digits are in the same split.
    """

    verb: ClassVar[str] = "sort"

    def answer(self, digits: str) -> str:
        return "".join(sorted(digits))

    def identity(self, number: int) -> Hashable:
        return self.answer(self._digits(number))

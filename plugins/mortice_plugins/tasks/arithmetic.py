"""Sums, differences and products of whole numbers."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

from attrs import frozen

from mortice.options import and_, ge, in_, le, option
from mortice_plugins.rewards.boxed import last_boxed
from mortice_plugins.tasks.generated import Generated

_NUMBER = re.compile(r"-?\d+")


@frozen
class Arithmetic(Generated):
    r"""{"prompt": "12 + 7 =", "answer": "19"}: two numbers of up to `digits` digits and an operation.

    `form` is what an answer should look like: the number alone (`"plain"`), or in a \boxed{…} (`"boxed"`). Two scores,
    apart: `format`, whether it looks so, and `correct`, whether its number is right: the boxed one where there is one,
    else the last one in the text.
    """

    digits: int = option(2, help="most digits of each number", validator=and_(ge(1), le(9)))
    operations: str = option("+-", help='among "+", "-" and "*"')
    form: str = option("plain", help='"plain" or "boxed"', validator=in_(("plain", "boxed")))
    prompt: str = option("{a} {operation} {b} =", help="text of the prompt, with {a}, {operation} and {b}")

    def __attrs_post_init__(self) -> None:
        wrong = set(self.operations) - set("+-*")
        if wrong or not self.operations or len(set(self.operations)) < len(self.operations):
            raise ValueError(f'operations must be some of "+", "-" and "*", each once, found {self.operations!r}')
        lacking = [name for name in ("{a}", "{operation}", "{b}") if name not in self.prompt]
        if lacking:
            raise ValueError(f"prompt must hold {', '.join(lacking)}, found {self.prompt!r}")

    @property
    def size(self) -> int:
        return len(self.operations) * 10 ** (2 * self.digits)

    def _parts(self, number: int) -> tuple[int, str, int]:
        rest, b = divmod(number, 10**self.digits)
        which, a = divmod(rest, 10**self.digits)
        return a, self.operations[which], b

    def identity(self, number: int) -> Hashable:
        a, operation, b = self._parts(number)
        return (a, operation, b) if operation == "-" else (min(a, b), operation, max(a, b))

    def problem(self, number: int) -> dict[str, Any]:
        a, operation, b = self._parts(number)
        answer = {"+": a + b, "-": a - b, "*": a * b}[operation]
        text = self.prompt.replace("{a}", str(a)).replace("{operation}", operation).replace("{b}", str(b))
        return {"prompt": text, "answer": str(answer)}

    def completion(self, problem: Mapping[str, Any]) -> str:
        """The right answer in the right form."""
        return rf"\boxed{{{problem['answer']}}}" if self.form == "boxed" else f" {problem['answer']}"

    def check(self, completion: str, problem: Mapping[str, Any], /) -> dict[str, float]:
        boxed = last_boxed(completion)
        if self.form == "boxed":
            shaped = boxed is not None and _NUMBER.fullmatch(boxed.strip()) is not None
        else:
            shaped = _NUMBER.fullmatch(completion.strip()) is not None
        found = _NUMBER.findall(completion if boxed is None else boxed)
        right = bool(found) and int(found[-1]) == int(problem["answer"])
        return {"format": float(shaped), "correct": float(right)}

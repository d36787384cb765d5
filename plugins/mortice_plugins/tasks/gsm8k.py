"""GSM8K: word problems of grade-school mathematics.

Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021 (arXiv:2110.14168).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from mortice.data import read_records
from mortice.errors import DataError
from mortice.options import option
from mortice_plugins.rewards.gsm8k import marked, right_answer, scores


@frozen
class GSM8K:
    """Word problems from a file as it is published: {"question", "answer"}, the answer ending in "#### 42".

    `format`: the text has "#### " and a number behind it. `correct`: that number is right, or, where there is none, the
    last number of the text. `strict`: both.
    """

    file: Path = option(help="JSON Lines, one split")
    suffix: str = option('\nThink step by step. End with "#### " and the number.', help="text put behind the question")

    def problems(self, split: str, seed: int, /) -> Iterator[Mapping[str, Any]]:
        """All rows of the file, in its order, whatever the split. Raises DataError for a bad row."""
        for where, record in read_records(self.file):
            if isinstance(record, DataError):
                raise DataError(f"{where}: {record}")
            if not isinstance(record, Mapping) or not isinstance(record.get("question"), str):
                raise DataError(f'{where}: expected {{"question", "answer"}}')
            try:
                right_answer(record, "answer")
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
            yield {**record, "prompt": record["question"] + self.suffix}

    def completion(self, problem: Mapping[str, Any]) -> str:
        return str(problem["answer"])

    def check(self, completion: str, problem: Mapping[str, Any], /) -> dict[str, float]:
        correct = scores(completion, right_answer(problem, "answer"), anywhere=True)
        shaped = marked(completion) is not None
        return {"format": float(shaped), "correct": float(correct), "strict": float(correct and shaped)}

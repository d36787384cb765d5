"""IFEval: prompts with instructions that can be verified.

Zhou et al., "Instruction-Following Evaluation for Large Language Models", 2023 (arXiv:2311.07911).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from mortice.data import read_records
from mortice.errors import DataError
from mortice.options import option
from mortice_plugins.rewards.ifeval_checks import followed, followed_loosely, instructions


@frozen
class IFEval:
    """Prompts from a file as it is published: {"prompt", "instruction_id_list", "kwargs"}.

    Four scores: how many prompts are followed in all instructions, and how many of all instructions are followed, each
    strictly and loosely (`mortice describe reward ifeval`).
    """

    file: Path = option(help="JSON Lines")

    def problems(self, split: str, seed: int, /) -> Iterator[Mapping[str, Any]]:
        """All rows of the file, in its order, whatever the split. Raises DataError for a bad row."""
        for where, record in read_records(self.file):
            if isinstance(record, DataError):
                raise DataError(f"{where}: {record}")
            if not isinstance(record, Mapping) or not isinstance(record.get("prompt"), str):
                raise DataError(f'{where}: expected {{"prompt", "instruction_id_list", "kwargs"}}')
            try:
                instructions(record)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
            yield record

    def check(self, completion: str, problem: Mapping[str, Any], /) -> dict[str, float]:
        strict, loose = followed(completion, problem), followed_loosely(completion, problem)
        return {
            "prompt_strict": float(all(strict)),
            "prompt_loose": float(all(loose)),
            "followed_strict": float(sum(strict)),
            "followed_loose": float(sum(loose)),
            "instructions": float(len(strict)),
        }

    def summary(self, scores: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """What the four scores are means of: prompts, and instructions."""
        found = {name: [each[name] for each in scores] for name in ("prompt_strict", "prompt_loose")}
        for kind in ("strict", "loose"):
            found[f"instruction_{kind}"] = [
                float(i < each[f"followed_{kind}"]) for each in scores for i in range(int(each["instructions"]))
            ]
        return found

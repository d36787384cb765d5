"""A reward for instructions that can be verified, as IFEval has them (`ifeval_checks`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from mortice.options import in_, option
from mortice_plugins.rewards.ifeval_checks import followed, followed_loosely


@frozen
class IFEval:
    """Which of the record's instructions the answer follows: the share of them, or 1 where it follows all.

    A record has `instruction_id_list` and `kwargs`, as IFEval's have. `loose`: an instruction also counts where it is
    followed without the answer's first or last line, or without asterisks.
    """

    level: str = option(
        "instruction",
        help='"instruction": the share of them; "prompt": 1 for all of them',
        validator=in_(("instruction", "prompt")),
    )
    loose: bool = option(False, help="count instructions that are followed loosely")
    weight: float = option(1.0, help="weight among the rewards")

    def __call__(self, completion: str, record: Mapping[str, Any], /) -> float:
        """Raises DataError for a record whose instructions cannot be checked."""
        found = (followed_loosely if self.loose else followed)(completion, record)
        return float(all(found)) if self.level == "prompt" else sum(found) / len(found)

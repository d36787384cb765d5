"""A reward from the checker of the run's own task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, field, frozen

from mortice.errors import DataError
from mortice.options import option
from mortice.protocols import Task


@frozen
class TaskReward:
    """One of the scores that the run's [task] gives an answer: `correct`, `format`, and whatever else it has."""

    score: str = option("correct", help="which score")
    weight: float = option(1.0, help="weight among the rewards")
    _task: Task | None = field(default=None, init=False)

    def bound(self, task: Task) -> TaskReward:
        """The reward for a run of this task."""
        found = evolve(self)
        object.__setattr__(found, "_task", task)
        return found

    def __call__(self, completion: str, record: Mapping[str, Any], /) -> float:
        """Raises DataError without a task, or for a score that it does not give."""
        if self._task is None:
            raise DataError('reward "task" goes by the checker of a [task], and this run has none')
        found = self._task.check(completion, record)
        if self.score not in found:
            raise DataError(f"the task gives no score {self.score!r} (it gives {', '.join(found)})")
        return found[self.score]

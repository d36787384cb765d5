"""A trained reward model as a reward: what `mortice pairs` and rollouts score answers with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from mortice.data import truncate
from mortice.errors import ConfigError, DataError
from mortice.options import ge, option
from mortice_plugins.formats.completion import CompletionFormat

if TYPE_CHECKING:
    from mortice.rating import Rater


@frozen
class RewardModel:
    """What a trained reward model says of the answer (`[head] name = "reward"`).

    The model is loaded with the first answer, beside the one that answers, and kept. Prompt and answer are put together
    as the format `completion` does, the answer with the end of its turn.
    """

    costly: ClassVar[bool] = True

    model: Path = option(help="model folder that the reward model was trained on")
    adapter: Path = option(help="adapter folder of the reward model")
    key: str = option("prompt", help="key of the prompt in the record: a string or a list of messages")
    max_length: int = option(2048, help="most tokens of prompt and answer together", validator=ge(2))
    weight: float = option(1.0, help="weight among the rewards")

    def __call__(self, completion: str, record: Mapping[str, Any], /) -> float:
        """Raises DataError for a record without a prompt, CheckpointError for a model that cannot be read."""
        if self.key not in record:
            raise DataError(f"no {self.key!r}, found {', '.join(map(repr, record))}")
        rater = _opened(self.model, self.adapter)
        assert rater.tokenizer is not None
        own = {**record, "prompt": record[self.key], "completion": completion}
        group = CompletionFormat()(own, rater.tokenizer, source="answer").group
        cut = truncate(group, self.max_length, "keep-end", rater.tokenizer.bos_id)
        if cut is None:
            raise DataError("the answer has no token to read a reward off")
        return rater.rate([cut])[0][0]


@lru_cache(maxsize=4)
def _opened(model: Path, adapter: Path) -> Rater:
    from mortice.rating import open_rater

    rater = open_rater(model, adapter)
    if rater.gives != "rewards":
        raise ConfigError(f"reward-model: {adapter} has no reward head; it was trained with another one")
    if rater.tokenizer is None:
        raise ConfigError(f"reward-model: {model} has no tokenizer.json")
    return rater

"""Keys of a `config.json`, read strictly: what is wrong is one message with the key's dotted name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from mortice.errors import CheckpointError


@frozen
class Keys:
    """A table of the config, and how its keys are called in messages."""

    family: str
    table: Mapping[str, Any]
    prefix: str = field(default="")

    def error(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(f"config.json: {self.prefix}{key} {message}")

    def lacks(self, key: str) -> CheckpointError:
        return CheckpointError(f"config.json lacks {self.prefix + key!r}, which a {self.family} model needs")

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number. Raises CheckpointError where it is something else, or needed and absent."""
        value = self.table.get(key)
        if value is None and default is None:
            raise self.lacks(key)
        if value is None:
            # null says that there is none where there can be none.
            return 0 if key in self.table and not least else default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"must be a whole number of {least} or more, found {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0. Raises CheckpointError where it is something else, or needed and absent."""
        value = self.table.get(key)
        value = default if value is None else value
        if value is None:
            raise self.lacks(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.error(key, f"must be a number above 0, found {value!r}")
        return float(value)

    def within(self, key: str, default: Mapping[str, Any] | None = None) -> Keys:
        """The table under a key."""
        value = self.table.get(key)
        value = default if value is None else value
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be a table, found {value!r}")
        return Keys(self.family, value, f"{self.prefix}{key}.")

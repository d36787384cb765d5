"""A reward from a Python function that the user wrote. It runs that code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from attrs import frozen

from mortice.errors import ConfigError
from mortice.options import option


@frozen
class PythonReward:
    """What a function of yours gives: `function(completion, record) → number`. **This imports and runs its module.**

    `function` is "module:name" of an importable module, or "path/to/file.py:name". Nothing else in mortice runs code
    that a run file names.
    """

    costly: ClassVar[bool] = True

    function: str = option(help='"module:name" or "file.py:name"')
    weight: float = option(1.0, help="weight among the rewards")

    @function.validator  # type: ignore[attr-defined]
    def _two_parts(self, attribute: Any, value: str) -> None:
        module, _, name = value.rpartition(":")
        if not module or not name.isidentifier():
            raise ValueError(f'must be "module:name" or "file.py:name", found {value!r}')

    def ready(self) -> None:
        """Raises ConfigError where there is no such function."""
        _function(self.function)

    def __call__(self, completion: str, record: Mapping[str, Any], /) -> float:
        return _function(self.function)(completion, record)


@cache
def _function(text: str) -> Callable[[str, Mapping[str, Any]], float]:
    """Raises ConfigError where it cannot be had."""
    place, _, name = text.rpartition(":")
    try:
        module = _of_file(Path(place).expanduser()) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise ConfigError(f"reward function {text}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"reward function {text}: {place} has no function {name!r}")
    return function


def _of_file(file: Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f"no file {file.absolute()}")
    name = f"mortice_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

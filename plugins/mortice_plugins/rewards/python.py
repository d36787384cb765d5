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

    `function` is "module:name" of an importable module, or with `file` the name alone. Nothing else in mortice runs
    code that a run file names.
    """

    costly: ClassVar[bool] = True

    function: str = option(help='"module:name", or the name in `file`')
    file: Path | None = option(None, help="Python file of the function")
    weight: float = option(1.0, help="weight among the rewards")

    def __attrs_post_init__(self) -> None:
        module, _, name = self.function.rpartition(":")
        if not name.isidentifier() or bool(module) == (self.file is not None):
            raise ValueError(
                f'function must be "module:name", or a name alone beside file, found {self.function!r} '
                f"{'with' if self.file is not None else 'without'} file"
            )

    def ready(self) -> None:
        """Raises ConfigError where there is no such function."""
        _function(self.function, self.file)

    def __call__(self, completion: str, record: Mapping[str, Any], /) -> float:
        return _function(self.function, self.file)(completion, record)


@cache
def _function(text: str, file: Path | None) -> Callable[[str, Mapping[str, Any]], float]:
    """Raises ConfigError where it cannot be had."""
    place, _, name = text.rpartition(":")
    try:
        module = importlib.import_module(place) if file is None else _of_file(file)
    except Exception as error:
        raise ConfigError(f"reward function {text}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"reward function {text}: {file or place} has no function {name!r}")
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

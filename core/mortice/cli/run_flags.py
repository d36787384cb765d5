"""Flags of every command that reads a run file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attrs import asdict, frozen
from cyclopts import Parameter

if TYPE_CHECKING:
    from mortice.config import RunConfig


@Parameter(name="*")
@frozen
class RunFlags:
    """One strategy or value for this run alone; a flag goes before the file."""

    set: Annotated[
        tuple[str, ...],
        Parameter(negative="", show_default=False, help="KEY=VALUE: any key, e.g. train.steps=10; repeatable"),
    ] = ()
    loss: Annotated[str | None, Parameter(help="Take this loss instead of the file's.")] = None
    head: Annotated[str | None, Parameter(help="Take this head instead of the file's.")] = None
    backward: Annotated[str | None, Parameter(help="Take this backward strategy instead of the file's.")] = None
    layout: Annotated[str | None, Parameter(help="Take this layout instead of the file's.")] = None
    adapter: Annotated[str | None, Parameter(help="Take this adapter instead of the file's.")] = None
    source: Annotated[str | None, Parameter(help="Take this source instead of the file's.")] = None
    optimizer: Annotated[str | None, Parameter(help="Take this optimizer instead of the file's.")] = None
    schedule: Annotated[str | None, Parameter(help="Take this schedule instead of the file's.")] = None

    def strategies(self) -> Mapping[str, str]:
        return {kind: name for kind, name in asdict(self).items() if kind != "set" and name is not None}


def load(file: Path, flags: RunFlags | None, run_path: Path | None = None) -> RunConfig:
    """The configuration in force."""
    from mortice.config import load_config

    flags = flags or RunFlags()
    return load_config(file, settings=flags.set, strategies=flags.strategies(), run_path=run_path)

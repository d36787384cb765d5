"""The reference of the run file, written from the classes.

python -m mortice.run_file_reference > docs/run-file.md
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import attrs
from attrs import frozen

from mortice import blas
from mortice.plugins import Plugins, load_plugins
from mortice.registry import Strategy
from mortice.runfile import toml_value
from mortice.structure import fields, kind_of, type_name
from mortice.tables import BESIDE, CORE_TABLES, LISTS, STRATEGY_TABLES

INTRODUCTION = """\
# The run file

A run is one TOML file. `mortice train run.toml` runs it; `mortice check run.toml` says what is wrong with it.

- A value given by a flag goes before the file, the file before the profile of the loss, and that before the default;
  also where the value is `false`, `0` or an empty list.
- `--set table.key=value` sets any key; a value is TOML, and what is no TOML is a string. `--loss NAME`, `--head NAME`
  and so on take another strategy for one run.
- Paths in the file are relative to the file, paths in flags to the working directory; `~` is the home folder.
- Unknown keys, numbers in quotes, booleans as numbers, NaN and values out of range are errors, all shown at once.
- The values in force, each with its origin, are written to `run.toml` in the run folder; that file gives the same run
  from anywhere.

This page is written from the classes by `python -m mortice.run_file_reference`.
"""


INIT = """
`init` is the folder of an adapter that the run starts from, mortice's, mlx-lm's or PEFT's. Its kind, rank, scale and
layers are then those of the folder; one that the file names, and that is another there, is an error."""


@frozen
class Option:
    """One key of a table, as a user reads it."""

    name: str
    type: str
    default: str
    """In TOML; `not set`, or empty where the key is required."""
    help: str


def options_of(cls: type) -> list[Option]:
    """The options of a strategy or a table, in the order of its fields."""
    return [
        Option(a.name, type_name(kind_of(a)), default_of(a), a.metadata.get("help", "")) for a in fields(cls).values()
    ]


def default_of(attribute: attrs.Attribute[Any]) -> str:
    default: Any = attribute.default
    if default is attrs.NOTHING:
        return ""
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        default = default.factory()
    return "not set" if default is None else toml_value(default)


def reference(plugins: Plugins, provider: str = "mortice") -> str:
    """The page: tables of the core, then every strategy that `provider` brings."""
    return "\n".join([INTRODUCTION, *_core(), *_strategies(plugins, provider)])


def _core() -> Iterator[str]:
    for name, cls in CORE_TABLES.items():
        yield f"## `[{name}]`\n\n{inspect.getdoc(cls)}\n\n{_table(cls)}"


def _strategies(plugins: Plugins, provider: str) -> Iterator[str]:
    for kind in ("data", *STRATEGY_TABLES):
        found = [s for s in plugins.registry.all(kind) if s.provider == provider]
        if not found:
            continue
        if kind == "data":
            yield "## `[data]`: formats\n\nChosen by `format`; options of a format stand in `[data]` too.\n"
        else:
            several = f", or several as `[[{kind}]]`" if kind in LISTS else ""
            weight = ", and `weight` (1.0)" if kind == "loss" else ""
            init = INIT if kind == "adapter" else ""
            yield f"## `[{kind}]`\n\n`name` chooses{several}; its options stand beside it{weight}.{init}\n"
            if kind in BESIDE:
                yield f"{inspect.getdoc(BESIDE[kind])}\n\n{_table(BESIDE[kind])}"
        for strategy in found:
            yield _strategy(strategy)


def _strategy(strategy: Strategy) -> str:
    cls = strategy.load()
    default = ", the default" if strategy.default else ""
    text = f"### {strategy.kind} `{strategy.name}`{default}\n\n{strategy.summary}\n\n{_table(cls)}"
    profile = getattr(cls, "profile", {})
    if profile:
        lines = "\n".join(f"{key} = {toml_value(value)}" for key, value in profile.items())
        text += f"\nIts profile, in force where the file does not say otherwise:\n\n```toml\n{lines}\n```\n"
    return text


def _table(cls: type) -> str:
    options = options_of(cls)
    if not options:
        return "No options.\n"
    rows = [f"| `{o.name}` | {o.type} | {_code(o.default)} | {o.help} |" for o in options]
    return "\n".join(["| key | value | default | |", "|---|---|---|---|", *rows, ""])


def _code(default: str) -> str:
    return {"": "required", "not set": "not set"}.get(default, f"`{default}`")


if __name__ == "__main__":
    blas.load()
    sys.stdout.write(reference(load_plugins(strict=True)))

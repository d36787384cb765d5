"""`mortice describe`: what a strategy does, its options, and the values it is best run with."""

from __future__ import annotations

import inspect
from typing import Any

import attrs

from mortice.cli.output import print_json, print_table
from mortice.errors import ConfigError, suggest
from mortice.hookspecs import HOOKS


def describe(kind: str, name: str, *, json: bool = False) -> None:
    """Show a strategy: its documentation and every option.

    Parameters
    ----------
    kind
        loss, head, backward, layout, …
    name
        Its name, or `dist:name`.
    json
        Print JSON.
    """
    from mortice import blas
    from mortice.plugins import load_plugins

    if kind not in HOOKS:
        raise ConfigError(f"unknown kind {kind!r}{suggest(kind, HOOKS)} (kinds: {', '.join(HOOKS)})")
    plugins = load_plugins()
    strategy = plugins.get(kind, name)
    blas.load()
    cls = strategy.load()
    options = option_rows(cls)
    profile = dict(getattr(cls, "profile", {}))
    doc = inspect.getdoc(cls) or strategy.summary
    if json:
        print_json(
            {"kind": kind, "name": strategy.name, "provider": strategy.provider, "plugin": strategy.plugin,
             "doc": doc, "options": options, "profile": profile}
        )  # fmt: skip
        return
    print(f"{kind} {strategy.name}, from {strategy.provider} (plugin {strategy.plugin})\n\n{doc}\n")
    if options:
        rows = [(o["name"], o["type"], o["default"], o["help"]) for o in options]
        print_table("options", ("name", "type", "default", ""), rows)
    else:
        print("no options")
    if profile:
        print("\nbest run with (defaults of a run that takes it):")
        for key, value in profile.items():
            print(f"  {key} = {value!r}")


def option_rows(cls: type) -> list[dict[str, Any]]:
    """Name, type, default and help of every option of a class."""
    from mortice.structure import fields, kind_of, type_name

    return [
        {
            "name": a.name,
            "type": "" if kind_of(a) is Any else type_name(kind_of(a)),
            "default": default_of(a),
            "help": a.metadata.get("help", ""),
        }
        for a in fields(cls).values()
    ]


def default_of(attribute: attrs.Attribute[Any]) -> str:
    """A default as it would stand in a run file."""
    value = attribute.default
    if value is attrs.NOTHING:
        return "required"
    if isinstance(value, attrs.Factory):  # type: ignore[arg-type]
        value = value.factory()
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(repr, value))}]"
    return str(value)

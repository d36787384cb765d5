"""`mortice describe`: what a strategy does, its options, and the values it is best run with; what a model holds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict

from mortice.cli.output import print_json, print_table
from mortice.errors import ConfigError, suggest
from mortice.hookspecs import HOOKS

if TYPE_CHECKING:
    from mortice.plugins import Plugins


def describe(kind: str, name: str, *, json: bool = False) -> None:
    """Show a strategy, its documentation and every option; or, as `describe model PATH`, what a checkpoint holds.

    Parameters
    ----------
    kind
        loss, head, backward, layout, …
    name
        Its name, or `dist:name`; of a model also a folder, a hub id or a GGUF file, of which only headers are read.
    json
        Print JSON.
    """
    from mortice import blas
    from mortice.plugins import load_plugins
    from mortice.run_file_reference import options_of
    from mortice.runfile import toml_value

    if kind not in HOOKS:
        raise ConfigError(f"unknown kind {kind!r}{suggest(kind, HOOKS)} (kinds: {', '.join(HOOKS)})")
    blas.load()
    plugins = load_plugins()
    if kind == "model" and _is_checkpoint(name, plugins):
        _show_model(name, plugins, json=json)
        return
    strategy = plugins.get(kind, name)
    cls = strategy.load()
    options = options_of(cls)
    profile = dict(getattr(cls, "profile", {}))
    doc = inspect.getdoc(cls) or strategy.summary
    if json:
        print_json(
            {"kind": kind, "name": strategy.name, "provider": strategy.provider, "plugin": strategy.plugin,
             "doc": doc, "options": [asdict(o) for o in options], "profile": profile}
        )  # fmt: skip
        return
    print(f"{kind} {strategy.name}, from {strategy.provider} (plugin {strategy.plugin})\n\n{doc}\n")
    if options:
        rows = [(o.name, o.type, o.default or "required", o.help) for o in options]
        print_table("options", ("name", "type", "default", ""), rows)
    else:
        print("no options")
    if profile:
        print("\nbest run with (defaults of a run that takes it):")
        for key, value in profile.items():
            print(f"  {key} = {toml_value(value)}")


def _is_checkpoint(name: str, plugins: Plugins) -> bool:
    """Whether this is a path or a hub id, and no model adapter's name."""
    if any(name in (s.name, s.qualified) for s in plugins.registry.all("model")):
        return False
    return "/" in name or "\\" in name or name.startswith((".", "~")) or Path(name).exists()


def _show_model(path: str, plugins: Plugins, *, json: bool) -> None:
    from mortice.inspection import inspect_model

    facts = inspect_model(path, plugins)
    if json:
        print_json(facts)
        return
    print_table(None, ("", ""), [(name, _told(name, value)) for name, value in facts.items()])


def _told(name: str, value: Any) -> str:
    """A fact in words."""
    from mortice.sizes import readable

    if name == "bytes":
        return readable(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_told(key, part)}" for key, part in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return " ".join(_told("", part) for part in value) or "none"
    return "none" if value is None else str(value)

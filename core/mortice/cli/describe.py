"""`mortice describe`: what a strategy does, its options, and the values it is best run with."""

from __future__ import annotations

import inspect

from attrs import asdict

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
    from mortice.run_file_reference import options_of
    from mortice.runfile import toml_value

    if kind not in HOOKS:
        raise ConfigError(f"unknown kind {kind!r}{suggest(kind, HOOKS)} (kinds: {', '.join(HOOKS)})")
    blas.load()
    plugins = load_plugins()
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

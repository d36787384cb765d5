"""`mortice list`: every strategy that is installed, by kind."""

from __future__ import annotations

from mortice.cli.output import print_json, print_table, warn
from mortice.errors import ConfigError, suggest
from mortice.hookspecs import HOOKS


def show(kind: str | None = None, *, json: bool = False) -> None:
    """List the strategies of all installed plugins.

    Parameters
    ----------
    kind
        One kind only: loss, head, backward, layout, …
    json
        Print JSON.
    """
    from mortice.plugins import load_plugins

    if kind is not None and kind not in HOOKS:
        raise ConfigError(f"unknown kind {kind!r}{suggest(kind, HOOKS)} (kinds: {', '.join(HOOKS)})")
    plugins = load_plugins()
    for plugin in plugins.failed:
        warn(plugin.failure())
    found = [s for k in HOOKS if kind in (None, k) for s in plugins.registry.all(k)]
    if json:
        print_json(
            [
                {"kind": s.kind, "name": s.name, "provider": s.provider, "plugin": s.plugin, "help": s.summary,
                 "default": s.default}
                for s in found
            ]
        )  # fmt: skip
        return
    rows = [(s.kind, s.name + (" *" if s.default else ""), s.provider, s.summary) for s in found]
    print_table(None, ("kind", "name", "from", ""), rows)
    print("\n* taken where a run file names none. mortice describe KIND NAME shows the options.")

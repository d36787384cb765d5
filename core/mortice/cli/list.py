"""`mortice list`: the strategies of the installed plugins. Imports no strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mortice.cli import output
from mortice.errors import ConfigError, suggest
from mortice.hookspecs import HOOKS
from mortice.plugins import load_plugins
from mortice.registry import Strategy


def known_kind(kind: str, kinds: Sequence[str] = tuple(HOOKS)) -> str:
    """The kind itself. Raises ConfigError where there is none of that name."""
    if kind not in kinds:
        raise ConfigError(f"unknown kind {kind!r}{suggest(kind, kinds)} (kinds: {', '.join(kinds)})")
    return kind


def list_strategies(kind: str | None = None, *, json: bool = False) -> None:
    """List strategies: losses, heads, layouts and the other kinds.

    Parameters
    ----------
    kind
        Only this kind.
    json
        For programs: a list of objects.
    """
    kinds = list(HOOKS) if kind is None else [known_kind(kind)]
    plugins = load_plugins()
    strategies = [s for k in kinds for s in plugins.registry.all(k)]
    if json:
        output.print_json([as_json(s) for s in strategies])
    elif strategies:
        rows = [(s.kind, s.name, s.provider, s.summary + (" (default)" if s.default else "")) for s in strategies]
        output.print_table(("kind", "name", "from", ""), rows)
    else:
        output.console().print(f"no installed plugin has a {kind}")
    for plugin in plugins.failed:
        output.warning(plugin.failure())


def as_json(strategy: Strategy) -> dict[str, Any]:
    return {
        "kind": strategy.kind,
        "name": strategy.name,
        "provider": strategy.provider,
        "plugin": strategy.plugin,
        "default": strategy.default,
        "help": strategy.summary,
    }

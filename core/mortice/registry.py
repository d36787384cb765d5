"""Names to strategies. Every strategy knows the distribution and the plugin it came from.

What this leaves out: finding plugins (`plugins.py`) and choosing options (`config.py`).
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from attrs import frozen

from mortice.errors import PluginImportFailed, StrategyClaimedTwice, UnknownStrategy, suggest


@frozen
class Strategy:
    """One registered name. The class is imported when it is first asked for."""

    kind: str
    name: str
    target: Any
    """The class, or `module:Class`."""
    provider: str
    """The distribution that registered it."""
    plugin: str
    """The entry point that registered it."""
    help: str = ""
    default: bool = False
    """Whether a run that names no strategy of this kind takes this one (lists of trackers: all of them)."""

    @property
    def qualified(self) -> str:
        return f"{self.provider}:{self.name}"

    def load(self) -> type:
        """The class. Imports its module on first use.

        Raises PluginImportFailed, with what was raised as its cause, where that fails.
        """
        if not isinstance(self.target, str):
            return self.target
        module, _, name = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (Exception, SystemExit) as error:  # the plugin boundary: whatever an import of it raises
            raise PluginImportFailed(
                f"{self.kind} {self.name!r} of {self.provider} (plugin {self.plugin!r}): "
                f"{self.target} cannot be imported: {type(error).__name__}: {error}"
            ) from error

    @property
    def summary(self) -> str:
        """One line for users: the `help` given at registration, else the first line of the class's docstring."""
        if self.help or isinstance(self.target, str):
            return self.help
        return (inspect.getdoc(self.target) or "").partition("\n")[0]


class Register:
    """What a `register_*` hook is called with: bound to a kind, a plugin and its distribution."""

    def __init__(self, kind: str, provider: str, plugin: str) -> None:
        self._kind, self._provider, self._plugin = kind, provider, plugin
        self.strategies: list[Strategy] = []

    def __call__(self, name: str, target: Any, *, help: str = "", default: bool = False) -> None:
        """Register `target` (a class, or `"module:Class"`, imported when needed) under `name`.

        Raises ValueError for a name that is not lowercase-with-hyphens, TypeError for a target that is neither.
        """
        if not name or name != name.lower() or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise ValueError(f"strategy name {name!r} must be lowercase words joined by hyphens")
        if not isinstance(target, type) and not (isinstance(target, str) and ":" in target):
            raise TypeError(f"strategy {name!r} must be a class or 'module:Class', found {target!r}")
        self.strategies.append(Strategy(self._kind, name, target, self._provider, self._plugin, help, default))


class Registry:
    """All strategies of the enabled plugins. Two claims on one name are kept, and refused when it is asked for."""

    def __init__(self) -> None:
        self._claims: dict[tuple[str, str], list[Strategy]] = {}

    def add(self, strategy: Strategy) -> None:
        self._claims.setdefault((strategy.kind, strategy.name), []).append(strategy)

    def names(self, kind: str) -> list[str]:
        return sorted(name for k, name in self._claims if k == kind)

    def all(self, kind: str | None = None) -> list[Strategy]:
        """Every claim, also those on a name that is claimed twice."""
        found = (s for claims in self._claims.values() for s in claims)
        return sorted((s for s in found if kind in (None, s.kind)), key=lambda s: (s.kind, s.name, s.provider))

    def claims(self, kind: str, name: str) -> list[Strategy]:
        """The strategies that answer to `name`, which may be `dist:name`."""
        provider, _, bare = name.rpartition(":")
        claims = self._claims.get((kind, bare), [])
        return [s for s in claims if not provider or s.provider == provider]

    def get(self, kind: str, name: str) -> Strategy:
        """The strategy of that name.

        Raises StrategyClaimedTwice where two distributions hold it, UnknownStrategy where none does.
        """
        claims = self.claims(kind, name)
        if not claims:
            names = self.names(kind)
            known = ", ".join(names) or f"none; no enabled plugin has a {kind}"
            raise UnknownStrategy(f"unknown {kind} {name!r}{suggest(name, names)} (available: {known})")
        if len(claims) > 1:
            claims = sorted(claims, key=lambda s: (s.provider, s.plugin))
            if len({s.provider for s in claims}) < len(claims):
                who = " and ".join(f"plugin {s.plugin!r} of {s.provider}" for s in claims)
                remedy = "disable one of them in [plugins]"
            else:
                who = " and ".join(s.qualified for s in claims)
                remedy = f'write the full name to choose one, for example name = "{claims[0].qualified}"'
            raise StrategyClaimedTwice(f"{kind} {name!r} is claimed twice, by {who}; {remedy}")
        return claims[0]

    def defaults(self, kind: str) -> list[Strategy]:
        return [s for s in self.all(kind) if s.default]

"""Discovery of plugins through entry points, and what can go wrong with it.

pluggy is used to register and to observe; the loop over entry points is our own, because pluggy's stops at
the first broken plugin and drops one of two equal names. Nothing is global: every call makes a new manager.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from typing import Any

import pluggy
from attrs import define, field, frozen

from mortice import hookspecs
from mortice.errors import (
    PluginImportFailed,
    PluginNotEnabled,
    PluginNotInstalled,
    UnknownStrategy,
    suggest,
)
from mortice.registry import Register, Registry, Strategy

ALWAYS = "basics"
"""The entry point of the plain strategies: on unless it is disabled by name."""


@frozen
class Entry:
    """One installed entry point of the group `mortice`."""

    name: str
    dist: str
    version: str
    value: str
    point: Any = field(eq=False, repr=False, default=None)

    @property
    def qualified(self) -> str:
        return f"{self.dist}:{self.name}"

    def called(self, name: str) -> bool:
        return name in (self.name, self.qualified)


@define
class Plugin:
    """An entry point and what became of it: `on`, `off` (not enabled) or `failed`."""

    entry: Entry
    status: str = "off"
    disabled: bool = False
    """Whether `[plugins] disable` names it."""
    error: BaseException | None = None
    strategies: list[Strategy] = field(factory=list)
    hooks: list[str] = field(factory=list)

    def failure(self) -> str:
        """One line for a warning."""
        kind = type(self.error).__name__
        return (
            f"plugin {self.entry.name!r} of {self.entry.dist} {self.entry.version} failed to load: {kind}: {self.error}"
        )

    def details(self) -> str:
        return "".join(traceback.format_exception(self.error)) if self.error else ""


def installed(entry_points: Iterable[Any] | None = None) -> list[Entry]:
    """Installed plugins, in an order that does not depend on the order of installation. Imports none of them."""
    points = metadata.entry_points(group=hookspecs.PROJECT) if entry_points is None else entry_points
    found = set()
    for point in points:
        dist = point.dist
        name, version = (dist.name, dist.version) if dist is not None else ("unknown", "?")
        found.add(Entry(point.name, name, version, point.value, point))
    return sorted(found, key=lambda e: (e.name, e.dist, e.value))


class Plugins:
    """The plugins of one run: a manager for observing, a registry for choosing."""

    def __init__(self, plugins: list[Plugin], manager: pluggy.PluginManager) -> None:
        self.plugins = plugins
        self.manager = manager
        self.registry = Registry()
        for plugin in plugins:
            for strategy in plugin.strategies:
                self.registry.add(strategy)

    @property
    def hook(self) -> Any:
        return self.manager.hook

    @property
    def failed(self) -> list[Plugin]:
        return [p for p in self.plugins if p.status == "failed"]

    def get(self, kind: str, name: str) -> Strategy:
        """The strategy of that name, or the error that says why it is out of reach.

        Raises StrategyClaimedTwice, PluginImportFailed, PluginNotEnabled or UnknownStrategy.
        """
        if self.registry.claims(kind, name):
            return self.registry.get(kind, name)
        bare = name.rpartition(":")[2]
        for plugin in self.failed:
            if plugin.entry.called(name) or plugin.entry.name == bare:
                raise PluginImportFailed(f"{kind} {name!r}: {plugin.failure()}") from plugin.error
        provider = self.provider(kind, name)
        if provider is not None:
            disabled = any(p.disabled for p in self.plugins if p.entry == provider)
            state = (
                "disables; take it out of disable" if disabled else f'does not enable; add "{provider.name}" to enable'
            )
            where = f"plugin {provider.name!r} of {provider.dist}"
            raise PluginNotEnabled(f"{kind} {name!r} is in {where}, which this run {state} in [plugins]")
        try:
            return self.registry.get(kind, name)
        except UnknownStrategy as error:
            if not self.failed:
                raise
            broken = "; ".join(p.failure() for p in self.failed)
            raise UnknownStrategy(f"{error}; it may belong to a plugin that failed: {broken}") from self.failed[0].error

    def provider(self, kind: str, name: str) -> Entry | None:
        """Which plugin that is not enabled would register the name. Imports the others to look."""
        off = [p.entry for p in self.plugins if p.status == "off"]
        bare = name.rpartition(":")[2]
        for entry in sorted(off, key=lambda e: e.name != bare):
            other = _load(entry, _manager())
            if any(s.kind == kind and name in (s.name, s.qualified) for s in other.strategies):
                return entry
        return None

    def others(self) -> Iterator[Strategy]:
        """The strategies of plugins that are not enabled, for hints. Imports them to look."""
        for plugin in self.plugins:
            if plugin.status == "off":
                yield from _load(plugin.entry, _manager()).strategies


def load_plugins(
    enable: Sequence[str] | None = None,
    disable: Sequence[str] = (),
    *,
    strategies: Iterable[tuple[str, str]] = (),
    entry_points: Iterable[Any] | None = None,
    strict: bool = False,
) -> Plugins:
    """Import and register the plugins of a run.

    `enable` names entry points (`name` or `dist:name`); None enables all installed ones, and `basics` is on unless
    disabled. `strategies` are (kind, name) pairs that a flag asks for: their plugins are enabled too. A plugin that
    fails is rolled back and remembered; with `strict` it raises.

    Raises PluginNotInstalled for a name in `enable` or `disable` that nothing has.
    """
    entries = installed(entry_points)
    for key, names in (("enable", enable or ()), ("disable", disable)):
        for name in names:
            if not any(e.called(name) for e in entries):
                have = sorted({e.name for e in entries})
                raise PluginNotInstalled(
                    f"[plugins] {key}: no installed plugin is called {name!r}{suggest(name, have)} "
                    f"(installed: {', '.join(have) or 'none'})"
                )

    def unwanted(entry: Entry) -> bool:
        return any(entry.called(name) for name in disable)

    def wanted(entry: Entry) -> bool:
        if unwanted(entry):
            return False
        return enable is None or entry.name == ALWAYS or any(entry.called(name) for name in enable)

    manager = _manager()
    plugins = [_load(e, manager) if wanted(e) else Plugin(e, disabled=unwanted(e)) for e in entries]
    loaded = Plugins(plugins, manager)
    for kind, name in strategies:
        if loaded.registry.claims(kind, name):
            continue
        entry = loaded.provider(kind, name)
        if entry is not None and not unwanted(entry):
            plugins = [_load(entry, manager) if p.entry == entry else p for p in loaded.plugins]
            loaded = Plugins(plugins, manager)
    if strict and loaded.failed:
        first = loaded.failed[0]
        raise PluginImportFailed(first.failure()) from first.error
    return loaded


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _load(entry: Entry, manager: pluggy.PluginManager) -> Plugin:
    """Import one plugin and collect what it registers. On any exception nothing of it stays."""
    module = None
    try:
        module = entry.point.load()
        manager.register(module, name=entry.qualified)
        plugin = Plugin(entry, "on")
        for caller in manager.get_hookcallers(module) or []:
            if not caller.has_spec():
                known = [n for n in vars(hookspecs) if n.startswith(("register_", "on_"))]
                raise AttributeError(f"unknown hook {caller.name!r}{suggest(caller.name, known)}")
            plugin.hooks.append(caller.name)
        for kind, hook in hookspecs.HOOKS.items():
            for impl in getattr(manager.hook, hook).get_hookimpls():
                if impl.plugin is module:
                    register = Register(kind, entry.dist, entry.name)
                    impl.function(register)
                    plugin.strategies += register.strategies
        return plugin
    except (Exception, SystemExit) as error:  # the plugin boundary: whatever a plugin raises is kept and shown
        if module is not None and manager.is_registered(module):
            manager.unregister(module)
        return Plugin(entry, "failed", error=error)

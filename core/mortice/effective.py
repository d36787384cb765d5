"""The configuration in force, written as a run file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tomlkit

from mortice.runfile import Key, toml_item
from mortice.structure import fields, structure
from mortice.tables import CORE_TABLES, LISTS, STRATEGY_TABLES, PluginOptions

if TYPE_CHECKING:
    from mortice.config import RunConfig


def effective_toml(config: RunConfig) -> str:
    """The run as a file that reproduces it from any folder, with the origin of every value as a comment."""
    document = tomlkit.document()
    document.add(tomlkit.comment("The run as it was in force. The comment behind a value says where it came from."))

    def add(table: Any, key: Key, name: str, value: Any) -> None:
        origin = config.origins.get((*key, name)) or config.origins.get((key[0], name)) or "default"
        if value is None:
            table.add(tomlkit.comment(f"{name} is not set"))
            return
        item = toml_item(value)
        item.comment(origin)
        table.add(name, item)

    for kind in LISTS:
        if not config.all(kind) and kind in config.file.tables:
            document.add(kind, tomlkit.item([]).comment(config.origins.get((kind,), "default")))
    for name, cls in CORE_TABLES.items():
        if name == "plugins":
            values, _ = structure(PluginOptions, config.file.tables.get("plugins", {}))
        elif name == "run":
            continue
        else:
            values = getattr(config, name)
        table = tomlkit.table()
        for option_name in fields(cls):
            add(table, (name,), option_name, getattr(values, option_name))
        if name == "data":
            for option_name in fields(type(config.format)):
                add(table, ("data",), option_name, getattr(config.format, option_name))
        document.add(name, table)
    for kind in STRATEGY_TABLES:
        found = config.all(kind)
        many = kind in LISTS and (len(found) > 1 or isinstance(config.file.tables.get(kind), list))
        if many and not found:
            continue
        tables = tomlkit.aot() if many else None
        for i, chosen in enumerate(found):
            key: Key = (kind, str(i)) if many else (kind,)
            table = tomlkit.table()
            twice = len(config.plugins.registry.claims(kind, chosen.name)) > 1
            add(table, key, "name", f"{chosen.provider}:{chosen.name}" if twice else chosen.name)
            if kind == "loss" and "weight" not in fields(type(chosen.options)):
                add(table, key, "weight", chosen.weight)
            if chosen.init is not None:
                add(table, key, "init", chosen.init)
            for options in (chosen.options, chosen.beside) if chosen.beside is not None else (chosen.options,):
                for option_name in fields(type(options)):
                    add(table, key, option_name, getattr(options, option_name))
            if tables is None:
                document.add(kind, table)
            else:
                tables.append(table)
        if tables is not None:
            document.add(kind, tables)
    return tomlkit.dumps(document)

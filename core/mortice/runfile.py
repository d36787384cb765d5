"""The text of a run file: TOML to plain tables, with the line of every key, and values from the command line.

What this leaves out: what the keys mean (`config.py`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomlkit
from attrs import define, field

from mortice.errors import ConfigError, nearest

Key = tuple[str, ...]
"""A dotted key in parts; the place in a list of tables is a part of its own: `("loss", "0", "beta")`."""


@define
class RunFile:
    """Tables as they are in force, and where each value came from."""

    tables: dict[str, Any]
    base: Path
    """Folder that paths in the file are relative to."""
    label: str = "configuration"
    """The file's name, for messages."""
    origins: dict[Key, str] = field(factory=dict)
    """`run.toml:12`, `--set`, `--loss`, … of each key that was given."""
    notices: list[str] = field(factory=list)

    def where(self, key: Key) -> str:
        """`run.toml:12: ` of a key or of the nearest table around it, for the front of a message."""
        while key:
            if key in self.origins:
                return f"{self.origins[key]}: "
            key = key[:-1]
        return f"{self.label}: "

    def from_flag(self, key: Key) -> bool:
        return self.origins.get(key, "").startswith("--")

    def put(self, key: Key, value: Any, origin: str) -> None:
        """Set one key, making the tables on its way."""
        node: Any = self.tables
        for i, part in enumerate(key[:-1]):
            if isinstance(node, list):
                node = _item(node, part, ".".join(key))
            else:
                node = node.setdefault(part, {})
            if not isinstance(node, (dict, list)):
                raise ConfigError(f"{origin} {'.'.join(key)}: {'.'.join(key[: i + 1])} is a value, not a table")
        if isinstance(node, list):
            raise ConfigError(f"{origin} {'.'.join(key)}: {key[-2]} is a list of tables; name one by its place, from 0")
        node[key[-1]] = value
        self.origins[key] = origin

    def forget(self, key: Key) -> None:
        """Take one key of a plain table back, if it was given."""
        table = self.tables.get(key[0])
        if isinstance(table, dict):
            table.pop(key[1], None)
            self.origins.pop(key, None)

    def drop(self, key: Key) -> None:
        """Forget a table and all that is known of it."""
        self.tables.pop(key[0], None)
        self.origins = {k: v for k, v in self.origins.items() if k[: len(key)] != key}


def _item(node: list[Any], part: str, key: str) -> Any:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(f"{key}: there is no place {part!r} in this list of {len(node)} tables")
    return node[int(part)]


def read_run_file(path: str | Path) -> RunFile:
    """Raises ConfigError, with file and line, for a file that is missing or no TOML."""
    file = Path(path).expanduser().absolute()
    file = file.resolve() if ".." in file.parts else file
    try:
        content = file.read_bytes()
    except OSError as error:
        folder = file.parent
        names = [p.name for p in folder.iterdir() if p != file] if folder.is_dir() else []
        hit = nearest(file.name, names)
        hint = f"; did you mean {folder / hit}?" if hit else ""
        raise ConfigError(f"cannot read the run file {file}: {error.strerror}{hint}") from error
    notices = []
    if content.startswith(b"\xef\xbb\xbf"):
        content = content[3:]
        notices.append(f"{file.name} begins with a byte order mark (BOM), which was left out")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: not UTF-8") from error
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"\(at line (\d+), column \d+\)|\(at end of document\)", str(error))
        line = int(at[1]) if at and at[1] else text.count("\n") + 1
        reason = str(error).replace(at[0], "").strip() if at else str(error)
        source = text.split("\n")[line - 1].strip()
        raise ConfigError(f"{file}:{line}: {reason}: {source}") from error
    origins = {key: f"{file.name}:{line}" for key, line in key_lines(text).items()}
    return RunFile(tables, file.parent, file.name, origins, notices)


def from_tables(tables: Mapping[str, Any]) -> RunFile:
    """A run file from Python; paths in it are relative to the working directory."""
    return RunFile(_copied(tables), Path.cwd(), "configuration")


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def apply_settings(run: RunFile, settings: Sequence[str]) -> None:
    """`table.key=value` strings, in order. A value is TOML; what is no TOML is a string."""
    for setting in settings:
        name, equals, text = setting.partition("=")
        key = tuple(part.strip() for part in name.split("."))
        if not equals or len(key) < 2 or not all(key):
            raise ConfigError(f"--set {setting}: expected table.key=value, for example train.steps=100")
        try:
            value = tomllib.loads(f"value = {text.strip()}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        run.put(key, value, "--set")


def plain(value: Any) -> Any:
    """A value of an option as TOML can hold it."""
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    if attrs.has(type(value)):
        return {a.name: plain(getattr(value, a.name)) for a in attrs.fields(type(value))}
    return value


def toml_value(value: Any) -> str:
    """A value as it would stand behind `key =`."""
    return toml_item(value).as_string()


def toml_item(value: Any) -> Any:
    """The same as an item of a document; a table stands in one line."""
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        table.update(plain(value))
        return table
    return tomlkit.item(plain(value))


_HEADER = re.compile(r"^\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")


def key_lines(text: str) -> dict[Key, int]:
    """The line of every table header and key of a valid TOML text."""
    lines: dict[Key, int] = {}
    places: dict[Key, int] = {}
    table: Key = ()
    depth, quote = 0, ""
    for number, line in enumerate(text.split("\n"), start=1):
        if not depth and not quote:
            header = _HEADER.match(line)
            if header:
                *parents, last = _parts(header[2])
                table = (*_placed(parents, places), last)
                if header[1] == "[[":
                    places[table] = places.get(table, -1) + 1
                table = _placed([last], places, table[:-1])
                lines[table] = number
                continue
            key = _KEY.match(line)
            if key:
                full = (*table, *_parts(key[1]))
                lines[full] = number
                for inner in re.findall(r"[{,]\s*([A-Za-z0-9_-]+)\s*=", line[key.end() :]):
                    lines.setdefault((*full, inner), number)
                line = line[key.end() :]
        depth, quote = _open(line, depth, quote)
    return lines


def _placed(parts: Sequence[str], places: Mapping[Key, int], table: Key = ()) -> Key:
    """Parts of a header below `table`, with the current place behind each list of tables."""
    for part in parts:
        table = (*table, part)
        if table in places:
            table = (*table, str(places[table]))
    return table


def _parts(dotted: str) -> Key:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


def _open(line: str, depth: int, quote: str) -> tuple[int, str]:
    """Brackets and the multi-line string that are still open behind a line."""
    i = 0
    while i < len(line):
        if quote:
            if line[i] == "\\" and quote[0] == '"':
                i += 2
            elif line.startswith(quote, i):
                i, quote = i + len(quote), ""
            else:
                i += 1
        elif line.startswith(('"""', "'''"), i):
            quote, i = line[i : i + 3], i + 3
        elif line[i] in "\"'":
            quote, i = line[i], i + 1
        elif line[i] == "#":
            break
        else:
            depth += (line[i] in "[{") - (line[i] in "]}")
            i += 1
    return depth, quote if len(quote) == 3 else ""

"""What a run is made with: settings, files, plugins, versions. Written when it starts, compared when it goes on.

Settings are those in force. Data files are told apart by their whole content, files of weights by their size and
samples of it, since they are large. What this leaves out: the machine, whose kernels round in their own way.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mortice import atomic
from mortice.errors import CheckpointError
from mortice.fingerprint import SIZE, Files

if TYPE_CHECKING:
    from mortice.config import RunConfig

FILE = "provenance.json"
PACE = ("steps", "epochs", "validate_every", "save_every", "keep", "keep_every", "max_nonfinite", "cache_limit")
FREE = frozenset(f"train.{name}" for name in PACE)
"""Settings that a run may go on with changed: none of them changes what a step computes."""
SAMPLES, BLOCK = 32, 1 << 16
"""How many blocks of a file of weights are looked at, and of how many bytes."""


def provenance(config: RunConfig, total: int) -> dict[str, Any]:
    """JSON values by part: `settings`, `files`, `plugins`, `versions`, `total_steps`."""
    plugins = {f"{c.kind} {c.name}": _version(c.provider) for c in config.chosen}
    return {
        "settings": dict(flat(tomllib.loads(config.effective_toml()))),
        "files": dict(_files(config)),
        "plugins": dict(sorted(plugins.items())),
        "versions": {name: _version(name) for name in ("mortice", "mlx", "numpy", "tokenizers")},
        "total_steps": total,
    }


def _version(name: str) -> str:
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return name


def flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested tables; lists of tables are numbered."""
    for name, value in tables.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for i, item in enumerate(value):
                yield from flat(item, f"{key}.{i}.")
        else:
            yield key, value


def _files(config: RunConfig) -> Iterator[tuple[str, str]]:
    for name in ("train", "valid"):
        file = getattr(config.data, name)
        if file is not None and file.is_file():
            yield f"data.{name}", Files().of([file])
    folders = {"model.path": config.model.path, "adapter.init": config.adapter_init}
    if config.reference.policy not in ("initial", "base"):
        folders["reference.policy"] = config.reference.policy
    for key, folder in folders.items():
        if folder is not None and Path(folder).is_dir():
            yield key, of_weights(Path(folder))


def of_weights(folder: Path) -> str:
    """Of the small files of a model or an adapter, and of samples of its weights."""
    digest = hashlib.blake2b(digest_size=SIZE)
    for file in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".jinja", ".safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            if size <= SAMPLES * BLOCK:
                digest.update(content.read())
                continue
            for i in range(SAMPLES):
                content.seek(i * (size - BLOCK) // (SAMPLES - 1))
                digest.update(content.read(BLOCK))
    return digest.hexdigest()


def write(folder: Path, facts: Mapping[str, Any]) -> None:
    atomic.write_text(folder / FILE, json.dumps(facts, indent=1, default=str) + "\n")


def read(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError where the file is missing or damaged."""
    try:
        found = json.loads((folder / FILE).read_text("utf-8"))
        return {part: found[part] for part in ("settings", "files", "plugins", "versions", "total_steps")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / FILE} does not say what the run was made with: {error}") from error


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(what keeps a run from going on as it was, what merely changed), each in a line."""
    grave: list[str] = []
    light: list[str] = []
    new = json.loads(json.dumps(new, default=str))
    for part in ("settings", "files", "plugins", "versions"):
        for key in sorted(old[part].keys() | new[part].keys()):
            was, now = (side[part].get(key) for side in (old, new))
            if was == now:
                continue
            if part == "files":
                grave.append(f"{key}: the content has changed" if was and now else f"{key}: {_gone(was)}")
            else:
                free = part == "settings" and (key in FREE or key.startswith(("tracker.", "run.", "reference.cache")))
                (light if free else grave).append(f"{key}: {_told(was)} → {_told(now)}")
    return grave, light


def _told(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def _gone(was: Any) -> str:
    return "was there, and is not now" if was else "is there, and was not"

"""Files are written whole or not at all: to a temporary name beside the target, flushed, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp-"
"""Prefix of names that are being written; what a killed process left of them is never read."""
ASIDE = ".old-"
"""Prefix of a folder that is about to be replaced."""


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary(path: Path) -> Path:
    """The name under which `path` is written first."""
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content. Raises OSError; the old content is then untouched."""
    with writing(path) as part:
        part.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    """Replace a file's text, UTF-8. Raises OSError; the old content is then untouched."""
    write_bytes(path, content.encode("utf-8"))


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary file name to write to; at the end it is flushed and takes the place of `path`."""
    part = temporary(path)
    try:
        yield part
        _sync(part)
        os.replace(part, path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def writing_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill; at the end its files are flushed and it takes the place of `path`.

    A folder of that name is replaced: between the two renames it stands aside, from where `clean` brings it back.
    """
    part = temporary(path)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    old = path.with_name(f"{ASIDE}{path.name}")
    try:
        yield part
        for entry in part.rglob("*"):
            _sync(entry)
        _sync(part)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(path, old)
        os.replace(part, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        _settle(old, path)


def clean(folder: Path) -> None:
    """Clear what a killed process left in a folder: a replacement that it did not finish is undone."""
    for old in folder.glob(f"{ASIDE}*"):
        _settle(old, old.with_name(old.name.removeprefix(ASIDE)))
    for part in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(part) if part.is_dir() else part.unlink()


def _settle(old: Path, path: Path) -> None:
    """A folder that stands aside comes back, unless another has taken its place."""
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists():
        os.replace(old, path)

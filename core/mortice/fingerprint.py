"""Short names for contents: of arrays, of token ids, of files. Equal names, equal contents.

Files of weights are large, so what a file's content came to is remembered with its size and the time of its last
change, as git does: another look at it costs nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field

from mortice import atomic

if TYPE_CHECKING:
    import mlx.core as mx

    from mortice.batch import Group

SIZE = 16
"""Bytes of a fingerprint."""
RACY = 2 * 10**9
"""Nanoseconds since its last change within which a file may change again unseen."""


def of_text(*parts: object) -> str:
    """Of the parts' text, in order."""
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=SIZE).hexdigest()


def of_arrays(arrays: Mapping[str, mx.array]) -> str:
    """Of names, types, shapes and values."""
    import mlx.core as mx

    digest = hashlib.blake2b(digest_size=SIZE)
    for name in sorted(arrays):
        value = arrays[name]
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        plain = value.view(mx.uint16) if value.dtype == mx.bfloat16 else value  # which has no buffer of its own
        digest.update(np.ascontiguousarray(np.asarray(plain)).data)
    return digest.hexdigest()


def of_group(group: Group) -> bytes:
    """Of all token ids and masks of a group."""
    digest = hashlib.blake2b(digest_size=SIZE)
    for k, completion in enumerate(group.completions):
        for ids in (group.prompt_of(k), completion.ids, completion.loss_mask):
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(np.asarray(ids, np.int64).data)
    return digest.digest()


@define
class Files:
    """Fingerprints of files, remembered in a JSON file."""

    memory: Path | None = None
    _known: dict[str, Any] = field(factory=dict)
    _changed: bool = False

    def __attrs_post_init__(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(self.memory.read_text("utf-8")) if self.memory is not None else {}
            self._known = known if isinstance(known, dict) else {}

    def of(self, files: Iterable[Path]) -> str:
        """Of names and contents of these files."""
        found = of_text(*(f"{file.name} {self._of_file(file)}" for file in sorted(files)))
        self._remember()
        return found

    def _of_file(self, file: Path) -> str:
        status = file.stat()
        stamp = [status.st_size, status.st_mtime_ns]
        known = self._known.get(str(file.absolute()))
        if isinstance(known, list) and known[:2] == stamp and len(known) == 3:
            return str(known[2])
        with file.open("rb") as content:
            found = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=SIZE)).hexdigest()
        if time.time_ns() - status.st_mtime_ns > RACY:
            self._known[str(file.absolute())] = [*stamp, found]
            self._changed = True
        return found

    def _remember(self) -> None:
        if self.memory is None or not self._changed:
            return
        with contextlib.suppress(OSError):  # it saves time, no more
            self.memory.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(self.memory, json.dumps(self._known, indent=1) + "\n")
            self._changed = False

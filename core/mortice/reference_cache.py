"""Log-probabilities under a reference policy, kept in a file: numbers by the content of what was scored.

A file belongs to what its numbers depend on (`identity`: weights, adapter, types, strategies); a group is found in it
by its token ids and masks, so that other data, another template or another truncation finds what it shares and lacks
the rest. Runs may share a file: it is written whole, and takes in what another one has written. safetensors and
JSON, with a fingerprint of the numbers: nothing is unpickled, and a damaged file is told from a whole one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from mortice import atomic
from mortice.fingerprint import SIZE, of_text

FOLDER = Path(".mortice") / "reference"
"""Beside the training data, where the run file names no other place."""
KEEP = 8
"""Files that stay in a folder, those used last."""
OFTEN = 1000
"""Groups after whose scoring the file is written, so that a killed run has not scored them for nothing."""

Key = bytes
"""How it was scored (one byte), group, and what stood beside it in its micro-batch."""


class _Damaged(Exception):
    """A file that cannot be used, and why."""


@define(eq=False)
class ReferenceCache:
    """Scores by key. `file` None: in memory alone."""

    file: Path | None
    identity: Mapping[str, str]
    """What the scores depend on, name by name."""
    data: Mapping[str, str]
    """What the groups were made from and how: said where they are not the ones that were scored."""
    tell: Callable[[str], None] = lambda _: None
    was: Mapping[str, str] = field(factory=dict)
    """The `data` of the run that wrote the file."""
    _scores: dict[Key, np.ndarray] = field(factory=dict)
    _of_group: dict[bytes, Key] = field(factory=dict)
    """(way, group) → the key under which it was put last."""
    _unsaved: int = 0

    @classmethod
    def open(
        cls, folder: Path | None, identity: Mapping[str, str], data: Mapping[str, str], tell: Callable[[str], None]
    ) -> ReferenceCache:
        """What there is in a folder for this identity. What cannot be used is said: a damaged file, and one of the same
        data but of other weights, adapters or strategies."""
        if folder is None:
            return cls(None, identity, data, tell)
        cache = cls(folder / f"{of_text(*identity.items())}.safetensors", identity, data, tell)
        assert cache.file is not None
        if cache.file.exists():
            try:
                cache.was = cache._take_in()
                os.utime(cache.file)
            except (_Damaged, OSError) as reason:
                tell(f"reference: {cache.file} cannot be used ({reason}); it is made anew")
        elif (changes := cache._changes()) is not None:
            tell(f"reference: scored anew, since what is kept in {folder} is of another {changes}")
        return cache

    def find(self, way: bytes, group: bytes, beside: bytes, *, exact: bool) -> np.ndarray | None:
        """Scores of all completions of a group, one after the other. `exact`: of one that was scored in this very
        micro-batch; else, where there is none, in any."""
        found = self._scores.get(way + group + beside)
        if found is None and not exact and way + group in self._of_group:
            found = self._scores[self._of_group[way + group]]
        return found

    def put(self, way: bytes, group: bytes, beside: bytes, scores: np.ndarray) -> None:
        self._put(way + group + beside, scores.astype(np.float32))
        self._unsaved += 1
        if self._unsaved >= OFTEN:
            self.save()

    def _put(self, key: Key, scores: np.ndarray) -> None:
        self._scores[key] = scores
        self._of_group[key[: 1 + SIZE]] = key

    def save(self) -> None:
        """Write the file, with what other runs have put there meanwhile. Where that cannot be, it is said once."""
        if self.file is None or not self._unsaved:
            return
        self._unsaved = 0
        own = dict(self._scores)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if self.file.exists():
                with contextlib.suppress(_Damaged):  # it is about to be replaced
                    self._take_in()
            for key, scores in own.items():
                self._put(key, scores)
            with atomic.writing(self.file) as part:
                save_file(self._tensors(), part, {"mortice": json.dumps(self._facts())})
        except OSError as error:
            self.tell(f"reference: scores are not kept: cannot write {self.file}: {error.strerror or error}")
            self.file = None
            return
        with contextlib.suppress(OSError):  # another run may be tidying up too
            self._retain()

    def differences(self) -> str:
        """What of the data is not as it was for the run that wrote the file; empty where nothing is known to be."""
        return _differences(self.was, self.data)

    def _tensors(self) -> dict[str, np.ndarray]:
        keys = list(self._scores)
        values = [self._scores[key] for key in keys]
        return {
            "keys": np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1),
            "lengths": np.asarray([len(v) for v in values], np.int64),
            "scores": np.concatenate([*values, np.zeros(0, np.float32)]),
        }

    def _facts(self) -> dict[str, Any]:
        content = _content(self._tensors())
        return {"identity": dict(self.identity), "data": dict(self.data), "content": content}

    def _take_in(self) -> Mapping[str, str]:
        """The scores of the file into this cache, and the `data` in it. Raises _Damaged."""
        assert self.file is not None
        facts = _read_facts(self.file)
        try:
            tensors = load_file(self.file)
            keys, lengths, scores = tensors["keys"], tensors["lengths"], tensors["scores"]
        except (SafetensorError, KeyError, ValueError) as error:
            raise _Damaged(f"damaged: {error}") from error
        if facts.get("content") != _content(tensors):
            raise _Damaged("damaged: its content is not what was written")
        if facts.get("identity") != dict(self.identity):
            raise _Damaged("its name belongs to another one")
        for key, part in zip(keys, np.split(scores, np.cumsum(lengths)[:-1])):
            self._put(key.tobytes(), part)
        return dict(facts.get("data", {}))

    def _changes(self) -> str | None:
        """What the nearest of the folder's other files of the same data differ in; None where there is none."""
        assert self.file is not None
        nearest: str | None = None
        fewest = len(self.identity) + 1
        for file in self.file.parent.glob("*.safetensors"):
            try:
                facts = _read_facts(file)
            except (_Damaged, OSError):
                continue
            if facts.get("data", {}).get("data.train") != self.data.get("data.train"):
                continue
            other = facts.get("identity", {})
            count = sum(other.get(name) != value for name, value in self.identity.items())
            if count < fewest:
                fewest, nearest = count, _differences(other, self.identity)
        return nearest

    def _retain(self) -> None:
        assert self.file is not None
        found = sorted(self.file.parent.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
        for file in [file for file in found if file != self.file][: max(0, len(found) - KEEP)]:
            file.unlink(missing_ok=True)


def _content(tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=SIZE)
    for name in ("keys", "lengths", "scores"):
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()


def _read_facts(file: Path) -> dict[str, Any]:
    """What a file says of itself. Raises _Damaged."""
    try:
        with safe_open(file, framework="numpy") as opened:
            facts = json.loads((opened.metadata() or {})["mortice"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise _Damaged(f"damaged: {error}") from error
    if not isinstance(facts, dict):
        raise _Damaged("damaged: its description is no table")
    return facts


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    changed = [name for name in now if before.get(name) != now[name]] if before else []
    return ", ".join(f"{name} ({before.get(name, 'none')} → {now[name]})" for name in changed)


def flat(scores: Sequence[Sequence[float]]) -> np.ndarray:
    """Scores of each completion as one vector."""
    return np.asarray([value for completion in scores for value in completion], np.float32)

"""The header of a GGUF file: metadata, and where each tensor lies and how it is packed.

Read apart from `mx.load`, which does not say how a tensor was packed, leaves out types that it does not know, reads
Q4_K wrongly and maps a file that was cut short without a word.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

from attrs import frozen

from mortice.errors import CheckpointError

READABLE = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q6_K": (256, 210),
}  # fmt: skip
"""Types that `mx.load` reads rightly: (weights, bytes) of a block."""
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""ggml's numbers of tensor types."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@frozen
class Tensor:
    """One entry of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """Innermost dimension first, as GGUF has it."""
    kind: str
    offset: int
    """In bytes from the beginning of the data."""

    @property
    def size(self) -> int:
        """Bytes, of a readable type."""
        weights, size = READABLE[self.kind]
        return math.prod(self.shape) // weights * size


@frozen
class Header:
    """Everything before the data."""

    metadata: dict[str, Any]
    tensors: tuple[Tensor, ...]
    data: int
    """Where the data begins, in bytes."""


def read_header(file: Path) -> Header:
    """Raises CheckpointError for a file that is missing, of another kind, cut short, or packed in a type that cannot be
    read; the message names the types."""
    if not file.is_file():
        raise CheckpointError(f"GGUF file not found: {file.absolute()}")
    try:
        with file.open("rb") as opened:
            header = _header(opened, file)
    except (struct.error, UnicodeDecodeError, KeyError, MemoryError) as error:
        raise CheckpointError(f"{file} is damaged or cut short: its header cannot be read ({error!r})") from error
    unreadable = sorted({t.kind for t in header.tensors if t.kind not in READABLE})
    if unreadable:
        raise CheckpointError(
            f"{file} is packed as {', '.join(unreadable)}, which cannot be read (readable: {', '.join(READABLE)}); "
            "take the Q8_0 or F16 file of the same model"
        )
    end = max((header.data + t.offset + t.size for t in header.tensors), default=header.data)
    if file.stat().st_size < end:
        raise CheckpointError(f"{file} is cut short: {file.stat().st_size} bytes of {end}")
    return header


def _header(opened: BinaryIO, file: Path) -> Header:
    if opened.read(4) != b"GGUF":
        raise CheckpointError(f"{file} is no GGUF file")
    version = _scalar(opened, "I")
    if version not in (2, 3):
        raise CheckpointError(f"{file}: GGUF version {version} is not supported (supported: 2, 3)")
    tensors, entries = _scalar(opened, "Q"), _scalar(opened, "Q")
    metadata = {}
    for _ in range(entries):
        key = _string(opened)
        metadata[key] = _value(opened, _scalar(opened, "I"))
    table = tuple(_tensor(opened) for _ in range(tensors))
    alignment = metadata.get("general.alignment", 32)
    return Header(metadata, table, -(-opened.tell() // alignment) * alignment)


def _scalar(opened: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", opened.read(struct.calcsize(f"<{code}")))[0]


def _string(opened: BinaryIO) -> str:
    return opened.read(_scalar(opened, "Q")).decode("utf-8")


def _value(opened: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(opened)
    if kind != _ARRAY:
        return _scalar(opened, _SCALARS[kind])
    inner, count = _scalar(opened, "I"), _scalar(opened, "Q")
    if inner in (_STRING, _ARRAY):
        return [_value(opened, inner) for _ in range(count)]
    code = f"<{count}{_SCALARS[inner]}"
    return list(struct.unpack(code, opened.read(struct.calcsize(code))))


def _tensor(opened: BinaryIO) -> Tensor:
    name, dims = _string(opened), _scalar(opened, "I")
    shape = tuple(_scalar(opened, "Q") for _ in range(dims))
    kind = _scalar(opened, "I")
    return Tensor(name, shape, TYPES.get(kind, f"type {kind}"), _scalar(opened, "Q"))

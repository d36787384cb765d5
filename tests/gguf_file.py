"""A minimal writer of GGUF files, with ggml's block packings, for tests."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}


def pack(weight: np.ndarray, kind: str) -> tuple[bytes, np.ndarray]:
    """The bytes of `weight [rows, columns]` in a ggml type, and the floats that they stand for."""
    if kind == "F32":
        return weight.astype(np.float32).tobytes(), weight
    if kind == "F16":
        half = weight.astype(np.float16)
        return half.tobytes(), half.astype(np.float32)
    if kind == "BF16":
        bits = (weight.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return bits.tobytes(), (bits.astype(np.uint32) << 16).view(np.float32)
    blocks = weight.reshape(-1, 32).astype(np.float32)
    if kind == "Q8_0":
        scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
        q = np.clip(np.round(blocks / scale.astype(np.float32)), -127, 127).astype(np.int8)
        raw, floats = np.concatenate([scale.view(np.uint8), q.view(np.uint8)], 1), q * scale.astype(np.float32)
    else:  # Q4_1: scale, offset, then 16 bytes with weight i in the low half and weight i + 16 in the high one
        low = blocks.min(1, keepdims=True).astype(np.float16)
        scale = ((blocks.max(1, keepdims=True) - low) / 15).astype(np.float16)
        q = np.clip(np.round((blocks - low) / scale.astype(np.float32)), 0, 15).astype(np.uint8)
        halves = q[:, :16] | (q[:, 16:] << 4)
        raw = np.concatenate([scale.view(np.uint8), low.view(np.uint8), halves], 1)
        floats = q * scale.astype(np.float32) + low.astype(np.float32)
    return raw.tobytes(), floats.reshape(weight.shape)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    """Type number, then the value."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def write(file: Path, metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], str, bytes]]) -> Path:
    """`tensors`: name → (shape as numpy has it, type, bytes)."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    header += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        header += _string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        header += struct.pack("<IQ", KINDS[kind], len(data))
        data += raw + bytes(-len(raw) % 32)
    file.write_bytes(header + bytes(-len(header) % 32) + data)
    return file

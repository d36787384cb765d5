"""Keyed randomness: every random number is a function of names, never of what was drawn before.

A run draws from (seed, step, pass, group, completion, module, …), so a recomputed forward, another layout and a
resumed run draw the same numbers, and draws made elsewhere change nothing.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx


def stable_seed(*names: object) -> int:
    """A 63-bit number from the names' text; the same on every machine and in every process."""
    text = "\x1f".join(str(name) for name in names)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def stable_key(*names: object) -> mx.array:
    """An mlx random key from names, as `mx.random.key(stable_seed(...))`."""
    import mlx.core as mx

    return mx.random.key(stable_seed(*names))

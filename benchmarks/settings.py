"""What a run of the benchmarks is asked for, and what every section needs of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from benchmarks.measurement import Contender, Journal, Measurement, interleaved
from mortice.blas import Blas
from mortice.plugins import Plugins


@frozen
class Settings:
    """The command line, read."""

    out: Path
    journal: Journal
    plugins: Plugins
    blas: Blas
    repeats: int
    quick: bool = False
    model: Path | None = None
    pairs: Path | None = None
    peers: str | None = None
    """A Python that has mlx-lm and mlx-lm-lora."""
    width: int = 576
    """Hidden size of the heads section."""
    memory_limit: int = 12 * 10**9
    """Bytes above which a cell of full logits is left out."""
    cache_limit: int = 32 * 10**6
    """Bytes that MLX's allocator may keep unused, on both sides."""
    say: Callable[[str], None] = field(default=lambda _: None)

    def measure(self, section: str, cell: Mapping[str, Any], contenders: Sequence[Contender]) -> list[Measurement]:
        return interleaved(section, cell, contenders, self.repeats, self.journal, self.say)

    def names(self, kind: str) -> list[str]:
        """Every registered strategy of a kind, so that a plugin joins by being registered."""
        return self.plugins.registry.names(kind)

    @property
    def peer_blas(self) -> dict[str, str | None]:
        """What a peer's process needs in order to multiply with the same library."""
        return {"blas": self.blas.path, "threading": os.environ.get("MKL_THREADING_LAYER")}

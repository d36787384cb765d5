"""`mortice convert`: a GGUF file to a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def convert(
    source: Path,
    target: Path,
    *,
    dequantize: bool = False,
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
) -> None:
    """Convert a GGUF file to a model folder that mortice and mlx-lm load.

    Parameters
    ----------
    source
        GGUF file.
    target
        Folder to write; must not exist or be empty.
    dequantize
        Write float weights instead of packed ones.
    dtype
        Type of dequantized weights, float16 by default.
    """
    from mortice.errors import ConfigError

    if dtype is not None and not dequantize:
        raise ConfigError("--dtype is the type of dequantized weights; it goes with --dequantize")

    from rich.console import Console

    from mortice import blas

    blas.load()
    from mortice.gguf import convert_gguf

    console = Console(highlight=False)
    with console.status(f"converting {source}"):
        made = convert_gguf(source, target, dequantize=dequantize, dtype=dtype or "float16")
    kind = "packed" if made.quantized else "float"
    console.print(f"{made.path}: {made.tensors} {kind} tensors, {made.bytes / 1e6:.1f} MB", soft_wrap=True)

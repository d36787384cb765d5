"""`mortice convert`: a model in another packing, from a folder, a hub id or a GGUF file."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from mortice.conversion import Converted, Packing

FEW = 8
"""Matrices that are named one by one."""


def convert(
    source: str,
    target: Path,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    mode: Literal["affine", "mxfp4", "nvfp4", "mxfp8"] | None = None,
    rule: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    dequantize: bool = False,
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    json: bool = False,
) -> None:
    """Write a model folder that mortice and mlx-lm load: quantized, dequantized, or out of a GGUF file.

    Parameters
    ----------
    source
        Model folder, hub id, or GGUF file.
    target
        Folder to write; must not exist or be empty.
    bits
        Quantize to 2, 3, 4 (the default), 5, 6 or 8 bits.
    group_size
        Weights that share a scale: 32, 64 (the default) or 128.
    mode
        Packing: affine, or one of the floating-point modes, whose bits and groups are fixed.
    rule
        What differs for some matrices, PATTERN=BITS, PATTERN=BITS:GROUP, PATTERN=MODE or PATTERN=none, such as
        "layers.0.*=8" or "lm_head=none"; the first that matches counts. May be given several times.
    dequantize
        Write float weights.
    dtype
        Type of float weights, and of the scales of packed ones (default: as stored, that of the scales for what is
        unpacked; of a GGUF file float16).
    json
        Print JSON.
    """
    from mortice import blas
    from mortice.cli.output import print_json
    from mortice.errors import ConfigError
    from mortice.sizes import readable

    packs = bits is not None or group_size is not None or mode is not None or bool(rule)
    if packs and dequantize:
        raise ConfigError("--dequantize writes float weights; it does not go with --bits, --group-size, --mode, --rule")
    blas.load()
    from mortice.conversion import Packing

    packing = Packing.of(bits, group_size, mode or "affine", rule) if packs else None
    made = _convert(source, target, packing, dequantize, dtype, quiet=json)
    if json:
        print_json({"path": str(made.path), "tensors": made.tensors, "bytes": made.bytes, "quantized": made.quantized,
                    "bits_per_weight": made.bits_per_weight, "left": list(made.left),
                    "left_out": made.left_out})  # fmt: skip
        return
    from rich.console import Console

    console = Console(highlight=False)
    kind = f"{made.quantized} packed matrices" if made.quantized else "float weights"
    size = f"{made.bits_per_weight:.2f} bits a weight, {readable(made.bytes)}"
    console.print(f"{made.path}: {made.tensors} tensors, {kind}, {size}", soft_wrap=True)
    if made.left:
        console.print(f"not packed, since no group divides their rows: {_counted(made.left)}", soft_wrap=True)
    if made.left_out:
        console.print(made.left_out, soft_wrap=True)


def _counted(names: Sequence[str]) -> str:
    """A few names, or how many there are of each kind."""
    if len(names) <= FEW:
        return ", ".join(names)
    kinds = Counter(name.rpartition(".")[2] for name in names)
    return ", ".join(f"{kind} ({count})" for kind, count in kinds.items())


def _convert(
    source: str, target: Path, packing: Packing | None, dequantize: bool, dtype: str | None, *, quiet: bool
) -> Converted:  # fmt: skip
    from mortice.cli.output import bar
    from mortice.conversion import convert_checkpoint
    from mortice.errors import ConfigError
    from mortice.gguf import convert_gguf

    file = Path(source).expanduser()
    is_gguf = file.is_file()
    if is_gguf and packing is None:
        if dtype is not None and not dequantize:
            raise ConfigError("--dtype is the type of dequantized weights of a GGUF file; it goes with --dequantize")
        with bar(f"converting {source}", quiet=quiet) as progress:
            return convert_gguf(file, target, dequantize=dequantize, dtype=dtype or "float16", progress=progress)
    if packing is None and not dequantize and dtype is None:
        raise ConfigError("nothing to change: give --bits, --mode, --rule, --dequantize or --dtype")
    with bar(f"converting {source}", quiet=quiet) as progress:
        if not is_gguf:
            return convert_checkpoint(
                source, target, packing=packing, dequantize=dequantize, dtype=dtype, progress=progress
            )
        target = target.expanduser().absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tmp-") as between:
            stored = convert_gguf(file, Path(between) / "model").path
            return convert_checkpoint(stored, target, packing=packing, dtype=dtype or "float16", progress=progress)

"""How the matrices of a checkpoint are packed: what config.json says of it and what shapes say, which must agree.

What this leaves out: the packings of other tools, which are refused by name, and packing itself (`conversion`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mortice.errors import CheckpointError, suggest
from mortice.linear import FLOATS, PACKABLE, Quantization, quantized

if TYPE_CHECKING:
    import mlx.core as mx

    from mortice.model import Model

MODES = {"affine": (4, 64), "mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
"""Bits and group size of each mode where none are given; only `affine` has a choice."""
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
KEYS = ("quantization", "quantization_config")
"""Where config.json may say how weights are packed, in order of preference."""

_FLOATS = "take the float weights that they were made of, and pack those with mortice convert"
_METHODS = {"awq": "mlx_lm.convert writes MLX's packing of them, which is read; or take the float weights"}
"""What to do with the packings of other tools; with all others, `_FLOATS`."""
_SIGNS = {
    ".qweight": "GPTQ or AWQ", ".qzeros": "GPTQ or AWQ", ".absmax": "bitsandbytes", ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes", ".weight_packed": "compressed-tensors", ".weight_scale": "fp8 or compressed-tensors",
    ".weight_scale_inv": "fp8", ".weight_scale_2": "ModelOpt", ".global_scale": "nvfp4 with one more scale for all",
}  # fmt: skip
"""Ends of tensor names that only other packings have."""


def stated_packing(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of the packing: common keys, and entries of modules by their path. Empty for nothing.

    Raises CheckpointError for the packing of another tool, and for a table that is none.
    """
    inner = config.get("text_config")
    for table, prefix in ((config, ""), (inner if isinstance(inner, Mapping) else {}, "text_config.")):
        for key in KEYS:
            found = table.get(key)
            if found is None:
                continue
            if not isinstance(found, Mapping):
                raise CheckpointError(f"config.json: {prefix}{key} must be a table, found {found!r}")
            _refuse_other_tools(f"{prefix}{key}", found)
            if found:
                return found
    return {}


def _refuse_other_tools(key: str, table: Mapping[str, Any]) -> None:
    method = table.get("quant_method")
    if method is not None:
        advice = _METHODS.get(str(method).lower(), _FLOATS)
        raise CheckpointError(f"config.json: {key}: weights packed by {str(method)!r} are not read; {advice}")
    mode = table.get("mode", "affine")
    if mode not in MODES:
        raise CheckpointError(
            f"config.json: {key}.mode {mode!r} is unknown{suggest(str(mode), MODES)} (modes: {', '.join(MODES)})"
        )


def place_packed(model: Model, stated: Mapping[str, Any], stored: Mapping[str, mx.array]) -> None:
    """Packed twins for the modules of a model whose weights are stored with scales.

    Bits, group size and mode follow from shapes and types. A module's own entry in `stated` must agree with them, and
    what is common to all others with one of those at least, as files with a layer or two of their own are about that
    do not name them. Raises CheckpointError where they do not, or for a packing that is not MLX's.
    """
    for name in stored:
        tool = next((tool for end, tool in _SIGNS.items() if name.endswith(end)), None)
        if tool is not None:
            raise CheckpointError(f"{name} is of a packing that is not read ({tool}); {_FLOATS}")
    entries = {own_path(model, key): value for key, value in stated.items() if isinstance(value, (Mapping, bool))}
    ends = (".scales", ".weight")
    packed_names = any(name.endswith(".scales") for name in stored)
    if not packed_names and not stated:
        return
    tensors = model.sanitize({name: value for name, value in stored.items() if name.endswith(ends)})
    common: dict[str, Quantization] = {}
    for name, module, put in list(model.named_modules()):
        if not isinstance(module, PACKABLE):
            continue
        weight, scales = tensors.get(f"{name}.weight"), tensors.get(f"{name}.scales")
        own = entries.get(name, entries.get(model.mlx_lm_name(name)))
        if scales is None:
            if isinstance(own, Mapping) and weight is not None and weight.dtype in FLOATS:
                raise CheckpointError(f"{name} is stored in floats, config.json says {_listed(own)} for it")
            continue
        if own is False:
            raise CheckpointError(f"{name} is stored packed, config.json says false for it")
        found = _found(name, module.weight.shape, weight, scales)
        if isinstance(own, Mapping):
            _check(name, found, own)
        else:
            common[name] = found
        put(quantized(module, found))
    model.invalidate()
    if not packed_names:
        raise CheckpointError(
            f"config.json says that weights are packed ({_listed(stated)}), but all are stored in floats; "
            "remove `quantization` and `quantization_config` from it"
        )
    _check_common(common, stated)


def own_path(model: Model, path: str) -> str:
    """A module's own path, of one that transformers or mlx-lm use."""
    return model.own_name(f"{path}.weight").removesuffix(".weight")


def _found(name: str, shape: tuple[int, ...], weight: mx.array | None, scales: mx.array) -> Quantization:
    """How a matrix, or a stack of them, of this shape is packed."""
    if weight is None or not weight.ndim == scales.ndim == len(shape) or not scales.shape[-1]:
        at = "none" if weight is None else list(weight.shape)
        raise CheckpointError(
            f"{name}.scales is {list(scales.shape)} and {name}.weight {at}: no packed matrix of {list(shape)}"
        )
    bits, group = weight.shape[-1] * 32 / shape[-1], shape[-1] / scales.shape[-1]
    if scales.dtype in FLOATS:
        mode = "affine"
        known = bits in BITS and group in GROUPS
    else:
        mode = next((m for m, rule in MODES.items() if m != "affine" and rule == (bits, group)), "bytes as scales")
        known = mode in MODES
    if not known:
        raise CheckpointError(
            f"{name} is packed with {bits:g} bits in groups of {group:g} by its shape ({mode}), "
            "which is no packing of MLX; is config.json that of these weights?"
        )
    return Quantization(int(bits), int(group), mode)


def _wrong(found: Quantization, stated: Mapping[str, Any]) -> str | None:
    """The first key that is stated otherwise. Without `mode` affine is meant."""
    said = {"mode": "affine"} | dict(stated)
    keys = ("mode", "bits", "group_size")
    return next((key for key in keys if said.get(key, getattr(found, key)) != getattr(found, key)), None)


def _check(name: str, found: Quantization, stated: Mapping[str, Any]) -> None:
    key = _wrong(found, stated)
    if key is not None:
        said = stated.get(key, "affine")
        raise CheckpointError(f"{name} is stored with {key} {getattr(found, key)}, config.json says {said} for it")


def _check_common(found: Mapping[str, Quantization], stated: Mapping[str, Any]) -> None:
    if not found or not any(key in stated for key in ("mode", "bits", "group_size")):
        return
    if all(_wrong(q, stated) for q in found.values()):
        name, q = next(iter(found.items()))
        raise CheckpointError(
            f"config.json says that weights are packed with {_listed(stated)}, but no matrix is: "
            f"{name} has {q.bits} bits in groups of {q.group_size} ({q.mode})"
        )


def _listed(stated: Mapping[str, Any]) -> str:
    said = [f"{key} {stated[key]}" for key in ("bits", "group_size", "mode") if key in stated]
    return ", ".join(said) or "packed"

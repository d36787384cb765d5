"""A checkpoint in another packing: quantized, dequantized or cast, under the names that mortice and mlx-lm read.

Tensors go through one by one and are written in shards, so that memory holds one shard and one tensor. What this leaves
out: calibration (rounding is plain), folding adapters in.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, field, frozen

from mortice import atomic
from mortice.errors import CheckpointError, ConfigError, suggest
from mortice.linear import FLOATS, PACKABLE, Packed, Quantization, unpacked_dtype
from mortice.matching import matches
from mortice.packed_weights import BITS, GROUPS, KEYS, MODES
from mortice.pretrained import DTYPES, load

if TYPE_CHECKING:
    from mortice.model import Model
    from mortice.plugins import Plugins

SHARD = 5 * 10**9
"""Bytes of a file from which on another one begins."""
BLOCK = 2**21
"""Numbers that are packed or unpacked at once."""
TYPES = ("torch_dtype", "dtype")
"""Keys of config.json that name the type of the weights; transformers writes the second since version 5."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".pickle", ".h5", ".msgpack", ".onnx", ".index.json")
"""Ends of files that hold weights; all others of a folder are copied."""


@frozen
class Packing:
    """How matrices are to be packed."""

    common: Quantization
    rules: tuple[tuple[str, Quantization | None], ...] = ()
    """(pattern of names, how; None: not at all); the first that matches counts."""

    @classmethod
    def of(
        cls, bits: int | None = None, group_size: int | None = None, mode: str = "affine", rules: Sequence[str] = ()
    ) -> Packing:
        """`rules`: `PATTERN=BITS`, `PATTERN=BITS:GROUP`, `PATTERN=MODE` or `PATTERN=none`. Raises ConfigError."""
        common = packing(bits, group_size, mode)
        return cls(common, tuple(_rule(text, common) for text in rules))

    def choose(self, name: str, own: Mapping[str, int]) -> Quantization | None:
        """How the module of this full name is packed. `own`: bits by pattern, as its model asks for them."""
        for pattern, rule in self.rules:
            if matches(pattern, name):
                return rule
        for pattern, bits in own.items():
            if matches(pattern, name) and self.common.mode == "affine":
                return Quantization(max(bits, self.common.bits), self.common.group_size)
        return self.common


def packing(bits: int | None, group_size: int | None, mode: str) -> Quantization:
    """Raises ConfigError for what MLX cannot pack."""
    if mode not in MODES:
        raise ConfigError(f"unknown mode {mode!r}{suggest(mode, MODES)} (modes: {', '.join(MODES)})")
    own_bits, own_group = MODES[mode]
    found = Quantization(own_bits if bits is None else bits, own_group if group_size is None else group_size, mode)
    if mode != "affine" and (found.bits, found.group_size) != MODES[mode]:
        raise ConfigError(
            f"{mode} has {own_bits} bits in groups of {own_group}, asked for {found.bits} and {group_size}"
        )
    if mode == "affine" and found.bits not in BITS:
        raise ConfigError(f"bits must be one of {', '.join(map(str, BITS))}, found {found.bits}")
    if mode == "affine" and found.group_size not in GROUPS:
        raise ConfigError(f"group size must be one of {', '.join(map(str, GROUPS))}, found {found.group_size}")
    return found


def _rule(text: str, common: Quantization) -> tuple[str, Quantization | None]:
    pattern, sign, how = text.rpartition("=")
    if not sign or not pattern:
        raise ConfigError(
            f"rule {text!r} is not of the form PATTERN=BITS, PATTERN=BITS:GROUP, PATTERN=MODE or PATTERN=none"
        )
    if how == "none":
        return pattern, None
    if how in MODES:
        return pattern, packing(None, None, how)
    bits, _, group = how.partition(":")
    if not bits.isdigit() or (group and not group.isdigit()):
        known = ("none", *MODES)
        raise ConfigError(f"rule {text!r}: {how!r} is neither bits, a mode nor none{suggest(how, known)}")
    own = common.group_size if common.mode == "affine" else MODES["affine"][1]
    return pattern, packing(int(bits), int(group) if group else own, "affine")


@frozen
class Converted:
    """What a conversion made."""

    path: Path
    tensors: int
    bytes: int
    """Of all files."""
    quantized: int
    """Packed matrices."""
    bits_per_weight: float
    left: tuple[str, ...] = ()
    """Matrices whose rows no group divides, and that are not packed."""
    left_out: str = ""
    """On weights of the source that the model does not use."""


Progress = Callable[[int, int, str], None]
"""(tensors done, all of them, the name of the next)."""


def convert_checkpoint(
    source: str | Path, target: str | Path, *, packing: Packing | None = None, dequantize: bool = False,
    dtype: str | None = None, plugins: Plugins | None = None, progress: Progress = lambda *_: None, shard: int = SHARD,
) -> Converted:  # fmt: skip
    """Write the checkpoint in `source`, a folder or a hub id, to the folder `target`.

    `packing` None leaves packed matrices as they are, unless `dequantize`; `dtype` is that of all float tensors, of
    packed ones' scales too (None: as stored; what is unpacked gets the type of its scales, bfloat16 where those are
    bytes, which is exact).

    Raises CheckpointError for a source that does not load or a target that is not empty, ConfigError for a rule that
    matches nothing.
    """
    folder = empty_target(target)
    found = load(source, plugins=plugins)
    assert found.path is not None
    if folder == found.path:
        raise CheckpointError(f"{folder} is the source")
    model = found.model
    plan = _plan(model, packing, dequantize)
    names = _leading(model, plan)
    with atomic.writing_folder(folder) as part:
        writer = Shards(part, shard)
        for done, (name, tensors) in enumerate(_tensors(model, plan, None if dtype is None else DTYPES[dtype])):
            progress(done, len(names), name)
            writer.add({model.mlx_lm_name(n): value for n, value in tensors.items()})
        writer.finish()
        table = {model.mlx_lm_name(n): q for n, q in plan.after.items()}
        _write(part / "config.json", _config(model.mlx_lm_config, table, dtype))
        copy_others(found.path, part)
        size = sum(f.stat().st_size for f in part.rglob("*") if f.is_file())
    return Converted(
        folder, writer.count, size, len(plan.after), 8 * writer.bytes / found.size, tuple(plan.left), found.left_out
    )  # fmt: skip


def empty_target(target: str | Path) -> Path:
    """The folder to write, absolute. Raises CheckpointError where there is something already."""
    folder = Path(target).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; the target is a folder")
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} exists and is not empty")
    return folder


@frozen
class _Plan:
    before: Mapping[str, Quantization]
    """Of modules that are packed in the source."""
    after: Mapping[str, Quantization]
    left: Sequence[str]


def _plan(model: Model, packing: Packing | None, dequantize: bool) -> _Plan:
    modules = {name: module for name, module, _ in model.named_modules() if isinstance(module, (*PACKABLE, Packed))}
    before = {name: m.quantization for name, m in modules.items() if isinstance(m, Packed)}
    if packing is None:
        return _Plan(before, {} if dequantize else before, ())
    for pattern, _ in packing.rules:
        if not any(matches(pattern, name) for name in modules):
            near = suggest(pattern, sorted({name.rpartition(".")[2] for name in modules}))
            raise ConfigError(f"rule for {pattern!r} matches no matrix of the model{near}")
    after, left = {}, []
    for name, module in modules.items():
        columns = (module.shape if isinstance(module, Packed) else module.weight.shape)[-1]
        chosen = packing.choose(name, model.packing_rules)
        # MLX's CPU unpacks nvfp4 in pairs of groups, rows that are looked up alone too
        if chosen is not None and columns % max(chosen.group_size, 32):
            left.append(name)
        elif chosen is not None:
            after[name] = chosen
    return _Plan(before, after, left)


def _leading(model: Model, plan: _Plan) -> list[str]:
    """Parameters but the scales and offsets of packed ones, which go with these."""
    parts = [name.rpartition(".") for name in model.named_parameters()]
    return [f"{stem}.{last}" for stem, _, last in parts if stem not in plan.before or last not in ("scales", "biases")]


def _tensors(model: Model, plan: _Plan, dtype: mx.Dtype | None) -> Iterator[tuple[str, dict[str, mx.array]]]:
    """(name, tensors to write) for each module's parameters, none held on to."""
    names, arrays = _leading(model, plan), dict(model.named_parameters())
    model.bind({name: mx.zeros((1,)) for name in arrays})  # else the model would keep what was read

    def cast(x: mx.array) -> mx.array:
        return x.astype(dtype) if dtype is not None and x.dtype in FLOATS else x

    for name in names:
        stem, _, last = name.rpartition(".")
        value = arrays.pop(name)
        before, after = (table.get(stem) if last == "weight" else None for table in (plan.before, plan.after))
        if before is None and after is None:
            made = {name: cast(value)}
        else:
            rest = [arrays.pop(f"{stem}.{part}", None) for part in ("scales", "biases")]
            stored = [value, *(part for part in rest if part is not None)]
            del value, rest
            parts = [cast(p) for p in stored] if before == after else _repacked(stored, before, after, cast)
            made = {f"{stem}.{key}": part for key, part in zip(("weight", "scales", "biases"), parts)}
        mx.eval(list(made.values()))
        yield name, made


def _repacked(
    stored: Sequence[mx.array], before: Quantization | None, after: Quantization | None,
    cast: Callable[[mx.array], mx.array],
) -> list[mx.array]:  # fmt: skip
    """A matrix, or a stack of them, in another packing, in blocks of rows: MLX's CPU takes twenty times the memory of
    the numbers that it packs in the modes with bytes as scales."""
    lead = stored[0].shape[:-1]
    flat = [part.reshape(-1, part.shape[-1]) for part in stored]
    mx.eval(flat)
    count, columns = flat[0].shape
    height = max(1, BLOCK // (columns if before is None else columns * 32 // before.bits))

    def block(start: int) -> list[mx.array]:
        rows = [part[start : start + height] for part in flat]
        if before is None:
            floats = cast(rows[0])
        else:
            floats = cast(before.dequantize(*rows).astype(unpacked_dtype(rows[1])))
        if after is None:
            return [floats]
        return list(mx.quantize(floats, group_size=after.group_size, bits=after.bits, mode=after.mode))

    blocks = []
    for start in range(0, count, height):
        made = block(start)
        mx.eval(made)
        blocks.append(made)
    return [mx.concatenate(list(parts)).reshape(*lead, -1) for parts in zip(*blocks)]


@define
class Shards:
    """Tensors gathered into files, and the index over them."""

    folder: Path
    limit: int
    count: int = 0
    bytes: int = 0
    _held: dict[str, mx.array] = field(factory=dict)
    _files: list[list[str]] = field(factory=list)

    def add(self, tensors: dict[str, mx.array]) -> None:
        held = sum(value.nbytes for value in self._held.values())
        if self._held and held + sum(value.nbytes for value in tensors.values()) > self.limit:
            self._flush()
        self._held |= tensors
        self.count += len(tensors)
        self.bytes += sum(value.nbytes for value in tensors.values())

    def _flush(self) -> None:
        self._files.append(list(self._held))
        mx.save_safetensors(str(self.folder / self._part(len(self._files))), self._held, metadata={"format": "mlx"})
        self._held = {}

    def _part(self, number: int) -> str:
        return f"part-{number}.safetensors"

    def finish(self) -> None:
        self._flush()
        total = len(self._files)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files, 1):
            name = "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
            (self.folder / self._part(number)).rename(self.folder / name)
            weight_map |= dict.fromkeys(names, name)
        if total > 1:
            index = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
            _write(self.folder / "model.safetensors.index.json", index)


def _config(config: Mapping[str, Any], packed: Mapping[str, Quantization], dtype: str | None) -> dict[str, Any]:
    made = _restated(config, dtype)
    if isinstance(made.get("text_config"), Mapping):
        made["text_config"] = _restated(made["text_config"], dtype)
    if packed:
        made["quantization"] = made["quantization_config"] = quantization_table(packed)
    if dtype is not None and not any(key in made for key in TYPES):
        made["torch_dtype"] = dtype
    return made


def _restated(table: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """Without a packing, and with another type where there is one."""
    kept = {key: value for key, value in table.items() if key not in KEYS}
    return kept if dtype is None else kept | {key: dtype for key in TYPES if key in kept}


def quantization_table(packed: Mapping[str, Quantization]) -> dict[str, Any]:
    """mlx's `quantization` key: the commonest rule, and what differs from it by layer."""
    rules = list(packed.values())
    common = max(set(rules), key=rules.count)
    table: dict[str, Any] = {"group_size": common.group_size, "bits": common.bits, "mode": common.mode}
    for name, rule in packed.items():
        if rule != common:
            table[name] = {"group_size": rule.group_size, "bits": rule.bits, "mode": rule.mode}
    return table


def copy_others(source: Path, target: Path) -> None:
    """Tokenizer, templates, licences: all files of a model folder but its config and weights."""
    for entry in sorted(source.iterdir()):
        if entry.name.startswith(".") or entry.name == "config.json" or entry.name.endswith(WEIGHTS):
            continue
        if entry.is_dir():
            if entry.name == "additional_chat_templates":
                shutil.copytree(entry, target / entry.name)
        else:
            shutil.copyfile(entry, target / entry.name)


def _write(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")

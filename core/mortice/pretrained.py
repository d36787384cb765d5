"""Loading a model from a folder: safetensors and config.json, checked before memory is spent.

Weights are mapped, not read: MLX reads each when it is first computed with, and those that are to be cast before the
first forward, one after the other (`Model.read`). Nothing is unpickled.
"""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import evolve, field, frozen
from safetensors import SafetensorError, safe_open

from mortice import hub
from mortice.errors import CheckpointError, ConfigError, suggest
from mortice.linear import FLOATS, Packed, on_cpu
from mortice.model import Model
from mortice.modules import wrapped
from mortice.packed_weights import place_packed, stated_packing
from mortice.randomness import stable_key

if TYPE_CHECKING:
    from mortice.plugins import Plugins
    from mortice.protocols import Adapter, Head, ModelAdapter, Params
    from mortice.registry import Strategy
    from mortice.tokenizer import Tokenizer

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@frozen(eq=False, slots=False)
class Pretrained:
    """A model and what was found beside its weights."""

    model: Model
    config: Mapping[str, Any]
    path: Path | None
    """The folder, absolute."""
    family: str
    """Name of the model adapter."""
    ignored: tuple[str, ...] = ()
    """Weights in the files that the model has no place for."""
    adapter: Adapter | None = None
    """The strategy that the given adapter folder was opened with."""
    params: Params = field(factory=dict)
    """Of that adapter, by full name."""
    names: frozenset[str] = frozenset()
    """Of the base weights."""
    size: int = 0
    """Base weights, quantized ones counted unpacked."""

    @property
    def left_out(self) -> str:
        """One line on the ignored weights, counted by the module that they belong to; empty where there are none."""
        modules = Counter(name.removeprefix("model.").partition(".")[0] for name in self.ignored)
        if not modules:
            return ""
        return f"weights that the model does not use are left out: {some(f'{m} ({n})' for m, n in modules.items())}"

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None where the folder has no tokenizer.json."""
        from mortice.tokenizer import Tokenizer

        if self.path is None or not (self.path / "tokenizer.json").exists():
            return None
        return Tokenizer.load(self.path)


def load(
    path: str | Path, *, plugins: Plugins | None = None, dtype: str = "auto", adapter: str | Path | None = None
) -> Pretrained:
    """A model from a folder or a hub id, with an adapter folder (mortice, mlx-lm or PEFT) on top.

    `dtype` `auto` keeps weights as they are stored and computes in float32 on the CPU, in the checkpoint's type on a
    GPU; another one casts the float weights.

    Raises CheckpointError for a folder that is missing, damaged or of another shape than its config says, ConfigError
    for an unknown `dtype`.
    """
    from mortice import blas
    from mortice.plugins import load_plugins

    blas.load()
    _check_dtype(dtype)
    plugins = plugins or load_plugins()
    folder = resolve(path)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder} is an adapter, not a model: give the model that it was trained on, and it on top"
        )
    config = read_json(folder / "config.json")
    stated = stated_packing(config)
    family, builder = find_adapter(plugins, config)
    model = builder.build(config)
    stored = open_weights(folder)
    place_packed(model, stated, stored)
    ignored = put_weights(model, stored, dtype, folder)
    base = Pretrained(
        model, config, folder, family, ignored, names=frozenset(model.named_parameters()), size=_size(model)
    )
    if adapter is None:
        return base
    strategy, params = open_adapter(plugins, Path(adapter).expanduser(), model)
    model.mark_trainable(params)
    return evolve(base, adapter=strategy, params=params)


def random_model(
    config: str | Path | Mapping[str, Any], seed: int, *, plugins: Plugins | None = None, dtype: str = "auto"
) -> Pretrained:
    """A model of a config's shape with random weights: matrices normal with the config's `initializer_range` (0.02),
    norms one, biases zero. Each weight is keyed by `seed` and its name. `config` is a mapping, a config.json or its
    folder; a tokenizer beside it is used."""
    from mortice.plugins import load_plugins

    _check_dtype(dtype)
    plugins = plugins or load_plugins()
    folder = None
    if not isinstance(config, Mapping):
        file = Path(config).expanduser().absolute()
        file = file / "config.json" if file.is_dir() else file
        folder, config = file.parent, read_json(file)
    family, builder = find_adapter(plugins, config)
    model = builder.build(config)
    spread = config.get("initializer_range") or 0.02
    target = DTYPES.get(dtype, mx.float32)

    def draw(name: str, place: mx.array) -> mx.array:
        if place.ndim >= 2:
            return spread * mx.random.normal(place.shape, dtype=target, key=stable_key(seed, "weights", name))
        return (mx.zeros if name.endswith("bias") else mx.ones)(place.shape, target)

    model.bind({name: draw(name, place) for name, place in model.named_parameters().items()})
    model.dtype = target
    return Pretrained(
        model, config, folder, family, names=frozenset(model.named_parameters()), size=_size(model)
    )  # fmt: skip


def _check_dtype(dtype: str) -> None:
    allowed = ("auto", *DTYPES)
    if dtype not in allowed:
        raise ConfigError(f"dtype {dtype!r} is none of {', '.join(allowed)}{suggest(dtype, allowed)}")


def resolve(path: str | Path) -> Path:
    """An existing folder, absolute; a hub id is fetched. Raises CheckpointError naming the path that was tried."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.absolute()
    if folder.exists():
        raise CheckpointError(f"{folder.absolute()} is a file; a model is a folder with config.json and safetensors")
    if isinstance(path, str) and hub.looks_like_hub_id(path) and not folder.parent.is_dir():
        return hub.fetch(path)
    parent = folder.absolute().parent
    near = difflib.get_close_matches(folder.name, [p.name for p in parent.iterdir()] if parent.is_dir() else [], n=1)
    hint = f"; did you mean {parent / near[0]}?" if near else ""
    raise CheckpointError(f"model folder not found: {folder.absolute()}{hint}")


def read_json(file: Path) -> dict[str, Any]:
    """Raises CheckpointError for a file that is missing or no JSON object."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} not found") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def find_adapter(plugins: Plugins, config: Mapping[str, Any]) -> tuple[str, ModelAdapter]:
    """The one model adapter that claims a config; one with `fallback` counts where no other claims it.

    Raises CheckpointError where none or several do.
    """
    strategies = plugins.registry.all("model")
    adapters = [(s, s.load()()) for s in strategies]
    claims = [(s, a) for s, a in adapters if not getattr(a, "fallback", False) and a.handles(config)]
    claims = claims or [(s, a) for s, a in adapters if getattr(a, "fallback", False) and a.handles(config)]
    kind = config.get("model_type")
    if not claims:
        have = ", ".join(f"{s.name} ({s.summary.rstrip('.')})" for s, _ in adapters) or "none"
        raise CheckpointError(f"no model adapter handles model_type {kind!r} (available: {have})")
    if len(claims) > 1:
        names = " and ".join(s.qualified for s, _ in claims)
        raise CheckpointError(f"model_type {kind!r} is claimed by {names}; disable one in [plugins]")
    return claims[0][0].name, claims[0][1]


def open_weights(folder: Path, *names: str) -> dict[str, mx.array]:
    """Every tensor of a folder's safetensors files by name, mapped. Headers and lengths are checked first.

    `names` are the files to look for, in order of preference; by default `model.safetensors`, the shards of an index,
    `model*.safetensors`, or whatever there is.
    """
    index = folder / "model.safetensors.index.json"
    patterns = names or ("model.safetensors", "model*.safetensors", "*.safetensors")
    if index.exists() and not names:
        files = _shards(index)
        missing = [f.name for f in files if not f.exists()]
        if missing:
            raise CheckpointError(f"{folder}: {len(missing)} of {len(files)} shards missing: {some(missing)}")
    else:
        files = next((found for p in patterns if (found := sorted(folder.glob(p)))), [])
    if not files:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pickle"))
        if pickles:
            raise CheckpointError(
                f"{folder} holds pickled weights only ({some(pickles)}), which are never read, since a pickle can run "
                "code; convert them to safetensors"
            )
        raise CheckpointError(f"{folder} has no *.safetensors file")
    weights: dict[str, mx.array] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as header:
                header.keys()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged or cut short: {error}") from error
        try:
            tensors: Any = mx.load(str(file))
        except RuntimeError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        twice = sorted(weights.keys() & tensors.keys())
        if twice:
            raise CheckpointError(f"{file}: {len(twice)} tensors are in another file of {folder} too: {some(twice)}")
        weights |= tensors
    return weights


def _shards(index: Path) -> list[Path]:
    """The files that an index names. Raises CheckpointError for one of another form, or that leads elsewhere."""
    wanted = read_json(index).get("weight_map")
    if not isinstance(wanted, dict) or not wanted:
        raise CheckpointError(f"{index} lacks weight_map: a table of tensors and their files")
    names = sorted({str(name) for name in wanted.values()})
    strange = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if strange:
        raise CheckpointError(f"{index} names files that are no *.safetensors beside it: {some(strange)}")
    return [index.parent / name for name in names]


def put_weights(model: Model, stored: dict[str, mx.array], dtype: str, folder: Path) -> tuple[str, ...]:
    """Bind stored weights after checking every name and shape; returns names that the model has no place for.

    Raises CheckpointError that lists what is missing or of another shape.
    """
    weights = model.sanitize(stored)
    places = model.named_parameters()
    missing = sorted(name for name in places if name not in weights)
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} weights missing: {some(missing)}")
    wrong = [
        f"{name} is {list(weights[name].shape)}, config.json asks for {list(place.shape)}"
        for name, place in places.items()
        if weights[name].shape != place.shape
    ]
    if wrong:
        raise CheckpointError(f"{folder}: {len(wrong)} weights of another shape: {some(wrong)}")
    kept = {name: weights[name] for name in places}
    strange = [
        f"{name} ({str(value.dtype).rpartition('.')[2]})"
        for name, value in kept.items()
        if value.dtype not in FLOATS and places[name].dtype in FLOATS and not name.endswith(".scales")
    ]
    if strange:
        raise CheckpointError(
            f"{folder}: {len(strange)} weights are stored as whole numbers where floats are due: {some(strange)} "
            "(packings of other tools are not read; use float weights or MLX's own packing)"
        )
    packed = {name.removesuffix(".scales") + ".weight" for name in kept if name.endswith(".scales")}
    stored_floats = {w.dtype for name, w in kept.items() if w.dtype in FLOATS and w.ndim >= 2}
    if dtype in DTYPES:
        model.dtype, model.unread = DTYPES[dtype], True
        kept = {n: w.astype(model.dtype) if w.dtype in FLOATS and not _of(n, packed) else w for n, w in kept.items()}
    elif not on_cpu() and len(stored_floats) == 1:
        model.dtype = stored_floats.pop()
    model.bind(kept)
    return tuple(sorted(name for name in weights if name not in places))


def _of(name: str, packed: Iterable[str]) -> bool:
    """Whether a tensor is the scales or offsets of a packed weight."""
    return name.rpartition(".")[0] + ".weight" in packed and name.endswith((".scales", ".biases"))


def _size(model: Model) -> int:
    return sum(parameter_count(part) for part in model.parts)


def parameter_count(module: Any) -> int:
    """Numbers below a module, packed ones counted unpacked."""
    if isinstance(module, Packed):
        return math.prod(module.shape) + (module["bias"].size if "bias" in module else 0)
    children = module.items() if isinstance(module, dict) else enumerate(module)
    held = [value for key, value in children if not str(key).startswith("_")]
    held += [wrapped(module)] if wrapped(module) else []
    return sum(
        value.size if isinstance(value, mx.array) else parameter_count(value)
        for value in held
        if isinstance(value, (mx.array, dict, list))
    )


def open_adapter(plugins: Plugins, path: Path, model: Model) -> tuple[Adapter, Params]:
    """Attach a saved adapter to a model: the strategy that claims the folder, and its parameters.

    Raises CheckpointError for a folder that is missing or that no adapter strategy claims.
    """
    folder = path.absolute()
    cls: Any = adapter_strategy(plugins, folder).load()
    return cls.from_folder(folder, model)


def adapter_strategy(plugins: Plugins, folder: Path) -> Strategy:
    """The adapter strategy that claims a folder. Raises CheckpointError where the folder is missing, or none does."""
    if not folder.is_dir():
        raise CheckpointError(f"adapter folder not found: {folder}")
    strategies = plugins.registry.all("adapter")
    for strategy in strategies:
        claims = getattr(strategy.load(), "claims", None)
        if claims is not None and claims(folder):
            return strategy
    have = ", ".join(s.name for s in strategies) or "none"
    raise CheckpointError(f"{folder} is no adapter that can be read (adapter kinds: {have})")


def open_head(plugins: Plugins, folder: Path, model: Model) -> tuple[Head, Params] | None:
    """The head whose weights lie in an adapter's folder, put into the model, and these weights; None where no head
    claims the folder. Raises CheckpointError for weights that do not fit."""
    for strategy in plugins.registry.all("head"):
        cls: Any = strategy.load()
        if hasattr(cls, "claims") and cls.claims(folder):
            return cls.from_folder(folder, model)
    return None


def some(names: Iterable[str], most: int = 8) -> str:
    """The first few names and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more

"""The reference policy of a run, from its configuration: which model it is, and under what its scores are kept."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx
from attrs import evolve

from mortice import blas
from mortice.errors import ConfigError
from mortice.fingerprint import Files, of_arrays, of_text
from mortice.pretrained import Pretrained, load, open_adapter, random_model
from mortice.protocols import Adapter, LiveSource, Params
from mortice.reference import Other, Reference, check_tokenizer, is_model, reference_params
from mortice.reference_cache import FOLDER, ReferenceCache
from mortice.step import Engine
from mortice.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mortice.config import RunConfig


def reference_of_run(
    config: RunConfig, pretrained: Pretrained, adapter: Adapter, params: Params, engine: Engine, source: LiveSource,
    tokenizer: Tokenizer, tell: Callable[[str], None],
) -> Reference:  # fmt: skip
    """The reference policy of a run; `params` are the adapter's own. Nothing is loaded.

    Raises ConfigError where it cannot be had.
    """
    policy, known = config.reference.policy, hasattr(source, "known")
    values = reference_params(policy, adapter, pretrained.model, params)
    if values is None and policy == "base" and set(params) <= pretrained.names and config.adapter_init is None:
        values = dict(params)  # all weights train, and they are the base's
    whole = values is not None and set(values) & pretrained.names
    other = None
    if values is None:
        other = _other(config, pretrained)
        if policy != "base" and other.adapter is None:
            check_tokenizer(tokenizer, other.path)
    if not known and (other is not None or whole):
        what = "another model" if other is not None else "a second copy of all weights"
        raise ConfigError(
            f"reference.policy = {policy!r} would be {what} in memory during training, since the source "
            f"{config.all('source')[0].name!r} does not know its groups before the run; train an adapter (lora) and "
            'compare with "initial" or "base"'
        )
    reference = Reference(engine, values, known, other)

    def open_cache() -> ReferenceCache:
        return _reference_cache(config, pretrained, adapter, params, reference, tokenizer, tell)

    reference.open_cache = open_cache
    return reference


def _other(config: RunConfig, pretrained: Pretrained) -> Other:
    """The reference that the run's own model cannot be."""
    plugins, dtype, own = config.plugins, config.model.dtype, config.model.path
    path = None if config.reference.policy == "base" else Path(config.reference.policy)
    if path is not None and is_model(path):
        return Other(lambda: load(path, plugins=plugins, dtype=dtype), path)

    def below() -> Pretrained:
        if config.model.init == "random":
            assert config.model.config is not None
            base = random_model(config.model.config, config.train.seed, plugins=plugins, dtype=dtype)
        else:
            assert own is not None
            base = load(own, plugins=plugins, dtype=dtype)
        if path is None:
            return base
        _, params = open_adapter(plugins, path, base.model)
        base.model.mark_trainable(params)
        return evolve(base, params=params)

    return Other(below, pretrained.path or Path(), path)


def _reference_cache(
    config: RunConfig, pretrained: Pretrained, adapter: Adapter, params: Params, reference: Reference,
    tokenizer: Tokenizer, tell: Callable[[str], None],
) -> ReferenceCache:  # fmt: skip
    """What is kept of earlier runs under the same reference, found by all that its numbers depend on."""
    data, place = config.data, config.reference.cache
    if isinstance(place, str):
        folder: Path | None = Path(place)
    else:
        folder = data.train.parent / FOLDER if place and data.train is not None else None
    if folder is None:
        return ReferenceCache(None, {}, {})
    files = Files(folder / "files.json")

    def weights(path: Path) -> str:
        return f"{path.name} {files.of([path / 'config.json', *path.glob('*.safetensors')])[:12]}"

    other, engine = reference.other, reference.engine
    if other is not None and other.path != (pretrained.path or Path()):
        model = weights(other.path)
    elif config.model.init == "random":
        model = f"random {of_text(pretrained.config, config.train.seed)[:12]}"
    else:
        assert pretrained.path is not None
        model = weights(pretrained.path)

    identity = {
        "model": model,
        "reference": _values_of(reference, pretrained, adapter, params, config, files),
        "dtype": f"{config.model.dtype}, {pretrained.model.dtype}",
        "temperature": str(engine.temperature),
        "layout": _options(engine.layout),
        "head": _options(engine.head),
        "backward": "none" if other is not None else _options(engine.backward),
        "context": f"attention_chunk {engine.attention_chunk}, mlp_chunk {engine.mlp_chunk}",
        "targets": "prompts too" if "prompt_logprobs" in engine.requires else "answers",
        "device": f"{mx.default_device()}, mlx {metadata.version('mlx')}, {blas.load().name}",
    }
    made_from = {"data.train": "none" if data.train is None else data.train.name}
    for name in ("train", "valid"):
        file = getattr(data, name)
        made_from[f"content of data.{name}"] = "none" if file is None else files.of([file])[:12]
    made_from |= {f"data.{name}": str(getattr(data, name)) for name in ("max_length", "truncation", "limit")}
    made_from["data.format"] = _options(config.format)
    made_from["chat template"] = of_text(tokenizer.template, sorted(tokenizer.variables.items()))[:12]
    return ReferenceCache.open(folder, identity, made_from, tell)


def _adapter_files(files: Files, folder: Path) -> str:
    return files.of([folder / "adapter_config.json", *folder.glob("*.safetensors")])


def _options(strategy: object) -> str:
    """A strategy with its options; one that is no attrs class has none that could be told."""
    return repr(strategy) if attrs.has(type(strategy)) else type(strategy).__qualname__


def _values_of(
    reference: Reference, pretrained: Pretrained, adapter: Adapter, params: Params, config: RunConfig, files: Files
) -> str:
    """What the reference is beside the model's weights. An adapter that changes nothing yet is the base."""
    if reference.other is not None:
        folder = reference.other.adapter
        return "base" if folder is None else f"adapter {_adapter_files(files, folder)[:12]}"
    values = dict(reference.params or {})
    try:
        base = adapter.base(params)
        if all(mx.array_equal(value, base[name]).item() for name, value in values.items()):
            return "base"
    except ConfigError:
        pass
    own = {name: value for name, value in values.items() if name not in pretrained.names}
    parts = [of_arrays(own)] if own else []
    if len(own) < len(values) and config.adapter_init is not None:
        parts.append(_adapter_files(files, config.adapter_init))
    if parts:
        return f"adapter {of_text(*parts)[:12]}"
    return "base" if len(own) == len(values) else "base, in float32"  # all weights train, and are held as they train

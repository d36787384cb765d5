"""What a model folder or a GGUF file holds, told from headers and JSON: no weight is read.

What this leaves out: whether the weights are any good.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mortice.errors import CheckpointError, MorticeError
from mortice.linear import PACKABLE, Packed
from mortice.model import Block
from mortice.pretrained import find_adapter, load, parameter_count

if TYPE_CHECKING:
    from mortice.model import Model
    from mortice.plugins import Plugins
    from mortice.pretrained import Pretrained
    from mortice.tokenizer import Tokenizer

SHAPE = {
    "width": "hidden_size", "heads": "num_attention_heads", "key and value heads": "num_key_value_heads",
    "head width": "head_dim", "MLP width": "intermediate_size", "experts": "num_experts", "window": "sliding_window",
    "context": "max_position_embeddings",
}  # fmt: skip
"""What the keys of a config are called."""
ROTARY = ("rope_theta", "rope_type", "type", "factor", "partial_rotary_factor")
SAMPLE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def inspect_model(path: str | Path, plugins: Plugins) -> dict[str, Any]:
    """Facts of a model by name, as JSON can hold them.

    Raises CheckpointError for what cannot be loaded.
    """
    file = Path(path).expanduser()
    if file.is_file() and file.suffix == ".gguf":
        return _gguf(file, plugins)
    found = load(path, plugins=plugins)
    assert found.path is not None
    return {
        "path": str(found.path),
        "family": found.family,
        **_shape(found.config, found.model),
        "parameters": found.size,
        "parameters by part": _parts(found.model),
        **_storage(found),
        "trains by default": _default_adapter(path, plugins),
        **_text(found),
        "left out": _left_out(found),
    }


def _shape(config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    text: Mapping[str, Any] = {**config, **(config.get("text_config") or {})}
    shape = {name: text[key] for name, key in SHAPE.items() if text.get(key) is not None}
    rotary = text.get("rope_parameters") or text.get("rope_scaling") or {}
    tables = rotary if any(isinstance(v, Mapping) for v in rotary.values()) else {"": rotary}
    rope = {
        f"{name}.{key}".strip("."): table[key]
        for name, table in tables.items()
        if isinstance(table, Mapping)
        for key in ROTARY
        if key in table
    }
    if "rope_theta" in text:
        rope.setdefault("rope_theta", text["rope_theta"])
    return {
        "model type": config.get("model_type"),
        "layers": model.num_layers,
        "vocabulary": model.output.vocab,
        "tied": not any("lm_head" in name for name in model.named_parameters()),
        **shape,
        "rotary positions": rope,
    }


def _parts(model: Model) -> dict[str, int]:
    """Parameters of embedding, layers, and what lies behind them, unpacked."""
    before, _ = model.parts_around()
    counts: Counter[str] = Counter()
    for part in model.parts:
        name = "layers" if isinstance(part, Block) else "embedding" if part in before else "norm and output"
        counts[name] += parameter_count(part)
    return dict(counts)


def _storage(found: Pretrained) -> dict[str, Any]:
    assert found.path is not None
    arrays = found.model.named_parameters()
    packed = {name: m.quantization for name, m, _ in found.model.named_modules() if isinstance(m, Packed)}
    plain = [name for name, m, _ in found.model.named_modules() if isinstance(m, PACKABLE)]
    bytes_ = sum(array.nbytes for array in arrays.values())
    facts: dict[str, Any] = {
        "bytes": bytes_,
        "bits a weight": round(8 * bytes_ / found.size, 2),
        "files": len(list(found.path.glob("*.safetensors"))),
        "types": dict(Counter(str(array.dtype).removeprefix("mlx.core.") for array in arrays.values())),
    }
    if packed:
        kinds = Counter(f"{q.mode} {q.bits} bits in groups of {q.group_size}" for q in packed.values())
        common = kinds.most_common(1)[0][0]
        others: dict[str, list[str]] = {}
        for name, q in packed.items():
            kind = f"{q.mode} {q.bits} bits in groups of {q.group_size}"
            if kind != common:
                others.setdefault(kind, []).append(name)
        facts["packed"] = {"matrices": len(packed), "as": common, "others": others, "not packed": plain}
    return facts


def _default_adapter(path: str | Path, plugins: Plugins) -> dict[str, Any] | None:
    """What the adapter that a run takes by default would train."""
    defaults = plugins.registry.defaults("adapter")
    if len(defaults) != 1:
        return None
    model = load(path, plugins=plugins).model  # another one: attaching changes it
    try:
        params = defaults[0].load()().attach(model, 0)
    except MorticeError as error:
        return {"adapter": defaults[0].name, "error": str(error)}
    modules = dict.fromkeys(name.rpartition(".")[0] for name in params)
    kinds = Counter(module.rpartition(".")[2] for module in modules)
    count = sum(array.size for array in params.values())
    return {"adapter": defaults[0].name, "parameters": count, "modules": len(modules), "by name": dict(kinds)}


def _text(found: Pretrained) -> dict[str, Any]:
    tokenizer = found.tokenizer
    if tokenizer is None:
        return {"tokenizer": None}
    special = {name: [text, tokenizer.backend.token_to_id(text)] for name, text in tokenizer.special.items()}
    return {
        "tokenizer": {"tokens": tokenizer.vocab_size, "adds BOS": tokenizer.adds_bos, "special": special},
        "ends a sequence": {str(i): tokenizer.backend.id_to_token(i) for i in tokenizer.eos_ids},
        "chat templates": list(tokenizer.templates),
        "a conversation": _sample(tokenizer),
    }


def _sample(tokenizer: Tokenizer) -> str | None:
    if not tokenizer.has_template:
        return None
    try:
        return tokenizer.apply_chat_template(SAMPLE)
    except MorticeError as error:
        return f"(the template refuses one: {error})"


def _left_out(found: Pretrained) -> dict[str, int]:
    return dict(Counter(name.removeprefix("model.").partition(".")[0] for name in found.ignored))


def _gguf(file: Path, plugins: Plugins) -> dict[str, Any]:
    from mortice.gguf import make_config
    from mortice.gguf_header import read_header

    header = read_header(file)
    config = make_config(header.metadata)
    tables = {tensor.name: tensor for tensor in header.tensors}
    if "token_embd.weight" not in tables:
        raise CheckpointError(f"{file} has no token_embd.weight")
    config["vocab_size"] = tables["token_embd.weight"].shape[-1]
    config["tie_word_embeddings"] = "output.weight" not in tables
    family, builder = find_adapter(plugins, config)
    model = builder.build(config)
    return {
        "path": str(file.absolute()),
        "family": family,
        **_shape(config, model),
        "parameters": sum(math.prod(tensor.shape) for tensor in header.tensors),
        "bytes": file.stat().st_size,
        "types": dict(Counter(tensor.kind for tensor in header.tensors)),
        "chat templates": ["default"] if "tokenizer.chat_template" in header.metadata else [],
        "to use it": f"mortice convert {file.name} FOLDER",
    }

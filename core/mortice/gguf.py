"""A GGUF file to a model folder: config.json, model.safetensors, tokenizer.json and a chat template.

Q4_0, Q4_1 and Q8_0 are MLX's own packing (groups of 32) bit for bit and stay packed; F32, F16, BF16, Q2_K and Q6_K
become floats. Llama-like models with a byte-level BPE tokenizer. What cannot be mapped is refused by name. MLX reads
such a file whole: memory is that of the file and of a shard to write.

llama.cpp keeps the rows of q and k in another order (interleaved pairs for its rotary positions); they are put back.
The order of rows is not visible in a shape: without it a model answers, only badly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mortice import atomic
from mortice.conversion import SHARD, Converted, Progress, Shards, empty_target, quantization_table
from mortice.errors import CheckpointError
from mortice.gguf_header import read_header
from mortice.linear import Quantization

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
GROUP = 32
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CONTROL, USER_DEFINED = 3, 4
"""Of `tokenizer.ggml.token_type`."""
SPLITS = {"smollm": None, "gpt-2": _GPT2, "default": _GPT2, "llama-bpe": _LLAMA3, "qwen2": _QWEN2}
"""How text is cut before BPE, by the file's `tokenizer.ggml.pre`."""


def convert_gguf(
    source: str | Path, target: str | Path, *, dequantize: bool = False, dtype: str = "float16",
    progress: Progress = lambda *_: None, shard: int = SHARD,
) -> Converted:  # fmt: skip
    """Write the model in `source` to the folder `target`. `dtype` is that of dequantized weights.

    Raises CheckpointError for a file that cannot be read or mapped, or a target that exists and is not empty.
    """
    file, folder = Path(source).expanduser(), empty_target(target)
    metadata = read_header(file).metadata
    config = make_config(metadata)
    arrays: dict[str, mx.array] = mx.load(str(file), format="gguf")  # type: ignore[assignment]
    config["vocab_size"] = arrays["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in arrays
    weights = rename(arrays, config)
    packed = {
        name.removesuffix(".scales"): _quantization(weights, name) for name in weights if name.endswith(".scales")
    }
    del arrays  # each is let go of once it is written
    count = sum(_numbers(name, array, packed) for name, array in weights.items())
    whole = len(weights)
    if dequantize:
        config["torch_dtype"] = dtype
    elif packed:
        config["quantization"] = config["quantization_config"] = quantization_table(packed)
    with atomic.writing_folder(folder) as part:
        writer = Shards(part, shard)
        tensors = unpacked(weights, packed, DTYPES[dtype]) if dequantize else _drained(weights)
        for name, array in tensors:
            progress(whole - len(weights), whole, name)
            mx.eval(array)
            writer.add({name: array})
            del array
        writer.finish()
        _write(part / "config.json", config)
        _write(part / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id") if k in config})
        write_tokenizer(part, metadata)
        size = sum(f.stat().st_size for f in part.iterdir())
    return Converted(folder, writer.count, size, 0 if dequantize else len(packed), 8 * writer.bytes / count)


def _numbers(name: str, array: mx.array, packed: Mapping[str, Quantization]) -> int:
    """Base weights in a tensor, unpacked."""
    stem, _, suffix = name.rpartition(".")
    if stem not in packed:
        return array.size
    return array.size * 32 // packed[stem].bits if suffix == "weight" else 0


def _drained(weights: dict[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
    for name in list(weights):
        yield name, weights.pop(name)


def make_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """config.json from the metadata, with the rotary keys that older readers know too.

    Raises CheckpointError for an architecture or a rotary scaling that is not supported.
    """
    kind = metadata.get("general.architecture")
    if kind != "llama":
        raise CheckpointError(f"GGUF architecture {kind!r} is not supported (supported: 'llama')")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise CheckpointError(f"GGUF rope scaling {scaling!r} is not supported")

    def need(key: str) -> Any:
        if key not in metadata:
            raise CheckpointError(f"the GGUF metadata lacks {key!r}")
        return metadata[key]

    heads = need("llama.attention.head_count")
    head_dim = metadata.get("llama.attention.key_length", need("llama.embedding_length") // heads)
    rotated = metadata.get("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise CheckpointError(f"GGUF rope over {rotated} of {head_dim} dimensions is not supported")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": need("llama.embedding_length"),
        "intermediate_size": need("llama.feed_forward_length"),
        "num_hidden_layers": need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": round(need("llama.attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "max_position_embeddings": metadata.get("llama.context_length", 2048),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float16",
    }
    for name in ("bos", "eos"):
        if f"tokenizer.ggml.{name}_token_id" in metadata:
            config[f"{name}_token_id"] = metadata[f"tokenizer.ggml.{name}_token_id"]
    return config


def rename(arrays: Mapping[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    """Hugging Face names, and the rows of q and k in their order."""
    weights, unknown = {}, []
    for name, array in arrays.items():
        parts = name.split(".")
        layer = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
        stem, suffix = parts[-2:]
        if stem not in NAMES or suffix not in ("weight", "scales", "biases"):
            unknown.append(name)
            continue
        if stem in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
            array = unpermute(array, heads)
        weights[f"{layer}{NAMES[stem]}.{suffix}"] = array
    if unknown:
        raise CheckpointError(f"GGUF tensors without a counterpart: {', '.join(unknown[:8])}")
    return weights


def unpermute(rows: mx.array, heads: int) -> mx.array:
    """llama.cpp's order of the rows of q and k `[heads · d, …]` back to Hugging Face's. Exact on packed rows."""
    count = rows.shape[0]
    pairs = rows.reshape(heads, count // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _quantization(weights: Mapping[str, mx.array], scales: str) -> Quantization:
    """MLX reads every packed type of GGUF as groups of 32."""
    stem = scales.removesuffix(".scales")
    columns = weights[scales].shape[1] * GROUP
    return Quantization(weights[f"{stem}.weight"].shape[1] * 32 // columns, GROUP)


def unpacked(
    weights: dict[str, mx.array], packed: Mapping[str, Quantization], dtype: mx.Dtype
) -> Iterator[tuple[str, mx.array]]:
    """Every weight as floats, taken out of `weights` one by one."""
    for name in list(weights):
        stem, _, suffix = name.rpartition(".")
        if stem not in packed:
            yield name, weights.pop(name).astype(dtype)
        elif suffix == "weight":
            parts = [weights.pop(f"{stem}.{part}", None) for part in ("weight", "scales", "biases")]
            yield name, packed[stem].dequantize(*(part for part in parts if part is not None)).astype(dtype)


def write_tokenizer(folder: Path, metadata: Mapping[str, Any]) -> None:
    """tokenizer.json and tokenizer_config.json. Raises CheckpointError for a tokenizer of another kind."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in SPLITS:
        raise CheckpointError(
            f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported "
            f"(supported: 'gpt2' with {', '.join(SPLITS)})"
        )
    if "tokenizer.ggml.tokens" not in metadata:
        raise CheckpointError("the GGUF metadata lacks 'tokenizer.ggml.tokens'")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    llama3 = pre == "llama-bpe"  # takes whole words from the vocabulary, and begins with BOS unless told not to
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=llama3))
    split = SPLITS[pre]
    if split is None:
        steps: list[Any] = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    else:
        steps = [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, metadata.get("tokenizer.ggml.token_type", [])):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", llama3):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (i := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[i]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    if "llama.context_length" in metadata:
        config["model_max_length"] = metadata["llama.context_length"]
    _write(folder / "tokenizer_config.json", config)


def _write(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")

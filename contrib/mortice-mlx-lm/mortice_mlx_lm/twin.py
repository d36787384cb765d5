"""The proof that a model was taken apart rightly: a small twin with random weights against mlx-lm's own forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mortice.batch import Row, Span
from mortice.context import CacheContext, Context, SpanContext
from mortice.model import Model
from mortice_mlx_lm.refusal import Refused

TOLERANCE = 1e-5
"""Of a twin's logits, relative to the largest."""
SMALL = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "intermediate_size": 96, "ffn_hidden_size": 96, "vocab_size": 97,
    "head_dim": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "sliding_window": 5, "sliding_window_size": 5,
    "attention_window_size": 5, "block_dim": 64, "max_position_embeddings": 256, "attention_chunk_size": 5,
    "floor_scale": 4, "index_topk": 4,
}  # fmt: skip
"""Sizes of a twin, windows and thresholds small enough for its rows to reach; keys that a config lacks stay absent."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
DENSE = ("first_k_dense_replace", "num_dense_layers", "n_dense_layers")
"""How many layers come before the first mixture of experts."""
TOKENS = (3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28)
PROMPT = 6


def small_twin(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same architecture with few and narrow layers, every kind of layer among them."""
    twin = dict(config) | {key: value for key, value in SMALL.items() if config.get(key) is not None}
    layers = next((config[key] for key in LAYERS if isinstance(config.get(key), int)), 2)
    few = _few(config, layers)
    for key, value in config.items():
        if key in LAYERS and value == layers:
            twin[key] = few
        elif _by_layer(value, layers):
            twin[key] = value[:few]
        elif _layer_numbers(key, value, layers):
            twin[key] = [number for number in value if number < few]
    heads = config.get("num_attention_heads", config.get("n_head"))
    kv = config.get("num_key_value_heads", heads)
    for key in ("num_attention_heads", "n_head"):
        if key in config:
            twin[key] = 4
    if config.get("num_key_value_heads") is not None:
        twin["num_key_value_heads"] = 4 if kv == heads else 2
    if (config.get("n_group") or 1) > 1:
        twin |= {"n_group": 2, "topk_group": 1}
    if config.get("query_pre_attn_scalar") is not None:
        twin["query_pre_attn_scalar"] = 16
    width = int(16 * (config.get("partial_rotary_factor") or 1.0)) // 2
    for key in ("rope_scaling", "rope_parameters"):
        scaling = config.get(key)
        if isinstance(scaling, Mapping):
            twin[key] = {k: v[:width] if isinstance(v, list) else v for k, v in scaling.items()}
            if "llama_4_scaling_beta" in scaling:  # queries grow with their position's multiple of this
                twin[key]["original_max_position_embeddings"] = 4
    if isinstance(config.get("text_config"), Mapping):
        twin["text_config"] = small_twin(config["text_config"])
    twin.pop("quantization", None)
    twin.pop("quantization_config", None)
    return twin


def with_few_words(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same sizes with a small vocabulary."""
    text = config.get("text_config")
    inside = {"text_config": with_few_words(text)} if isinstance(text, Mapping) else {}
    return dict(config) | ({"vocab_size": SMALL["vocab_size"]} if "vocab_size" in config else {}) | inside


def _few(config: Mapping[str, Any], layers: int) -> int:
    """The first layers among which every kind of layer is, as far as the config says so."""
    needed = [2]
    for key, value in config.items():
        if _by_layer(value, layers):
            needed.append(1 + max(value.index(kind) for kind in value))
        elif _layer_numbers(key, value, layers):
            needed.append(1 + value[0])
        elif _cycle(key, value):
            needed.append(value if isinstance(value, int) else len(value))
        elif key in DENSE and type(value) is int:
            needed.append(1 + value)
    return min(layers, max(needed))


def _by_layer(value: Any, layers: int) -> bool:
    """Whether a value has an entry for each layer: a list, or a word with a letter for each."""
    return isinstance(value, (list, str)) and len(value) == layers


def _cycle(key: str, value: Any) -> bool:
    """Whether a value says after how many layers their kinds repeat: a number, or the kinds themselves."""
    if key.endswith(("_pattern", "_interval", "_period")):
        return type(value) in (int, str)
    listed = isinstance(value, list) and bool(value) and all(isinstance(kind, str) for kind in value)
    return listed and ("layer" in key or "block" in key)


def _layer_numbers(key: str, value: Any, layers: int) -> bool:
    """Whether a value lists some of the layers by number."""
    named = "layer" in key or "idx" in key
    return named and isinstance(value, list) and bool(value) and all(type(n) is int and n < layers for n in value)


def prove(theirs: nn.Module, taken_apart: Callable[[], Model]) -> None:
    """Compare mlx-lm's model with what was made of the same one. Raises Refused where they differ: on a plain row, on
    one where two completions branch off a prompt, and decoded token by token."""
    ours = taken_apart()
    weights = random_weights(theirs)
    theirs.load_weights(list(weights.items()))
    places = ours.named_parameters()
    missing = sorted(weights.keys() - places.keys())
    if missing:
        raise Refused(f"parameter {missing[0]} has no place among its embedding, layers, norm and head")
    ours.bind(weights)
    ids = list(TOKENS)
    expected = theirs(mx.array([ids]))[0].astype(mx.float32)
    _same(expected, _logits(ours, *_on([(ids, None)])), "its logits on a plain row")
    first, second = ids[PROMPT:11], ids[11:]
    branched = _logits(ours, *_on([(ids[:PROMPT], None), (first, 0), (second, 0)]))
    alone = theirs(mx.array([ids[:PROMPT] + second]))[0].astype(mx.float32)
    what = "its logits on a row that branches (positions or attention that it keeps to itself)"
    _same(mx.concatenate([expected[:11], alone[PROMPT:]]), branched, what)
    _same(_decoded_by_mlx_lm(theirs, ids), _decoded(ours, ids), "its logits token by token")


def random_weights(model: nn.Module) -> dict[str, mx.array]:
    """Every parameter drawn by its place, large enough that no part of the model is near doing nothing."""
    drawn = {}
    for i, (name, value) in enumerate(tree_flatten(model.parameters())):
        noise = mx.random.normal(value.shape, key=mx.random.key(i))
        drawn[name] = 0.15 * noise if value.ndim > 1 else 1 + 0.2 * noise if name.endswith("weight") else 0.2 * noise
    return drawn


def _on(spans: list[tuple[list[int], int | None]]) -> tuple[Context, mx.array]:
    """A row of (tokens, parent), spans beginning behind their parents: its context, and its tokens."""
    tokens: list[int] = []
    found: list[Span] = []
    for ids, parent in spans:
        position = 0 if parent is None else found[parent].position + found[parent].length
        found.append(Span(len(tokens), len(tokens) + len(ids), parent, position))
        tokens += ids
    ctx = SpanContext(Row(tokens, found, [], [], [], [], []))
    return ctx, ctx.tokens


def _decoded(model: Model, ids: list[int]) -> mx.array:
    """A prompt at once, then one token after the other."""
    ctx, logits = CacheContext(), []
    for chunk in _chunks(ids):
        logits.append(_logits(model, ctx, mx.array(chunk)))
        ctx.advance(len(chunk))
    return mx.concatenate(logits)


def _decoded_by_mlx_lm(model: nn.Module, ids: list[int]) -> mx.array:
    """The same with mlx-lm's own caches: its code for one token may round otherwise than that for many."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    return mx.concatenate([model(mx.array([chunk]), cache=cache)[0].astype(mx.float32) for chunk in _chunks(ids)])


def _chunks(ids: list[int]) -> list[list[int]]:
    return [ids[:PROMPT], *([token] for token in ids[PROMPT:])]


def _logits(model: Model, ctx: Context, tokens: mx.array) -> mx.array:
    output = model.output
    return output.finish(output.project(model.hidden(ctx, tokens)))


def _same(expected: mx.array, found: mx.array, what: str) -> None:
    apart = mx.abs(expected - found).max() / mx.maximum(mx.abs(expected).max(), 1e-6)
    if not apart.item() < TOLERANCE:
        raise Refused(f"{what} differ by {apart.item():.1e} of the largest")

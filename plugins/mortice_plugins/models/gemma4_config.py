"""What `config.json` says of a Gemma 4 text decoder, in both spellings.

Google's files name the width and the key heads of full layers once (`global_head_dim`, `num_global_key_value_heads`);
transformers from 5.24 on writes them for each layer (`per_layer_config`). Keys that are absent mean what they mean to
transformers. Multimodal configs hold the text decoder's in `text_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from attrs import frozen

from mortice.errors import CheckpointError, suggest
from mortice_plugins.models.config_keys import Keys
from mortice_plugins.models.llama import Rope

FAMILY = "Gemma 4"
TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")
MULTIMODAL_TYPES = ("gemma4", "gemma4_unified")
SLIDING, FULL = "sliding_attention", "full_attention"
ACTIVATION = "gelu_pytorch_tanh"
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
"""Where the config says nothing."""


@frozen
class Layer:
    """One decoder layer."""

    window: int | None
    """None for full attention."""
    head_dim: int
    kv_heads: int
    k_is_v: bool
    """Values are the raw keys, under the values' norm."""
    donor: int | None
    """The layer whose keys and values this one attends to; None for its own."""
    passes_on: bool
    """Whether a later layer attends to the same keys and values."""
    intermediate: int
    rope: Rope


@frozen
class Experts:
    """Of a mixture-of-experts layer."""

    count: int
    chosen: int
    """By each token."""
    intermediate: int


@frozen
class Gemma4Config:
    """The keys of `config.json` that shape the text decoder."""

    multimodal: bool
    hidden: int
    heads: int
    vocab: int
    eps: float
    tied: bool
    bias: bool
    softcap: float | None
    per_layer: int
    """Width of a layer's own input; 0 for none."""
    per_layer_vocab: int
    experts: Experts | None
    layers: tuple[Layer, ...]
    ropes: Mapping[str, Any]
    """As the config has them, or would."""

    @property
    def spelled_out(self) -> dict[str, Any]:
        """Every key whose absence others read otherwise, with widths and key heads named once for all full layers."""
        full = self.layers[-1]
        sliding = next((layer for layer in self.layers if layer.window is not None), full)
        shared = sum(layer.donor is not None for layer in self.layers)
        keys: dict[str, Any] = {
            "layer_types": [FULL if layer.window is None else SLIDING for layer in self.layers],
            "head_dim": sliding.head_dim,
            "global_head_dim": full.head_dim,
            "num_key_value_heads": sliding.kv_heads,
            "num_kv_shared_layers": shared,
            "use_double_wide_mlp": full.intermediate != self.layers[0].intermediate,
            "attention_k_eq_v": full.k_is_v,
            "hidden_size_per_layer_input": self.per_layer,
            "final_logit_softcapping": self.softcap,
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocab,
            "rms_norm_eps": self.eps,
            "rope_parameters": dict(self.ropes),
        }
        if sliding.window is not None:
            keys["sliding_window"] = sliding.window
        if full.k_is_v:
            keys["num_global_key_value_heads"] = full.kv_heads
        if self.per_layer:
            keys["vocab_size_per_layer_input"] = self.per_layer_vocab
        return keys

    @property
    def path(self) -> str:
        """Prefix of the decoder's parameter names."""
        return "model.language_model" if self.multimodal else "model"

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Gemma4Config:
        """Raises CheckpointError for a key that is missing or that this adapter does not know how to honour."""
        nested = config.get("model_type") in MULTIMODAL_TYPES
        text = config.get("text_config") if nested else config
        if not isinstance(text, Mapping):
            raise CheckpointError(f"config.json lacks 'text_config', which a {config.get('model_type')} model needs")
        keys = Keys(FAMILY, text, "text_config." if nested else "")
        for key, allowed in (
            ("hidden_activation", (None, ACTIVATION)),
            ("use_bidirectional_attention", (None, "vision", False)),
        ):
            if text.get(key) not in allowed:
                raise keys.error(key, f"{text[key]!r} is not supported (supported: {allowed[1]!r})")
        vocab = keys.size("vocab_size")
        per_layer = keys.size("hidden_size_per_layer_input", 256, least=0)
        experts = None
        if text.get("enable_moe_block"):
            experts = Experts(
                keys.size("num_experts"), keys.size("top_k_experts"), keys.size("moe_intermediate_size")
            )  # fmt: skip
            if experts.chosen > experts.count:
                raise keys.error("top_k_experts", f"is {experts.chosen}, num_experts only {experts.count}")
        return cls(
            multimodal=nested,
            hidden=keys.size("hidden_size"),
            heads=keys.size("num_attention_heads"),
            vocab=vocab,
            eps=keys.number("rms_norm_eps", 1e-6),
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))),
            bias=bool(text.get("attention_bias", False)),
            softcap=None if text.get("final_logit_softcapping") is None else keys.number("final_logit_softcapping"),
            per_layer=per_layer,
            per_layer_vocab=keys.size("vocab_size_per_layer_input", vocab) if per_layer else 0,
            experts=experts,
            layers=_layers(keys),
            ropes=ROPES | dict(keys.within("rope_parameters", ROPES).table),
        )


def _layers(keys: Keys) -> tuple[Layer, ...]:
    count = keys.size("num_hidden_layers")
    kinds = _kinds(keys, count)
    donors = _donors(keys, kinds)
    own = _own_keys(keys, count)
    head_dim, kv_heads = keys.size("head_dim", 256), keys.size("num_key_value_heads")
    k_is_v = bool(keys.table.get("attention_k_eq_v", False))
    full_dim = keys.size("global_head_dim", head_dim if "per_layer_config" in keys.table else 512)
    full_heads = keys.size("num_global_key_value_heads", kv_heads) if k_is_v else kv_heads
    window = keys.size("sliding_window", 512)
    narrow = keys.size("intermediate_size")
    wide = 2 * narrow if keys.table.get("use_double_wide_mlp") else narrow
    ropes = keys.within("rope_parameters", ROPES)
    layers = []
    for i, (kind, donor) in enumerate(zip(kinds, donors)):
        full = kind == FULL
        width = own[i].size("head_dim", full_dim if full else head_dim)
        source = i if donor is None else donor
        layers.append(
            Layer(
                window=None if full else window,
                head_dim=width,
                kv_heads=own[i].size("num_key_value_heads", full_heads if full else kv_heads),
                k_is_v=full and k_is_v,
                donor=donor,
                passes_on=source in donors[i + 1 :],
                intermediate=narrow if donor is None else wide,
                rope=_rope(ropes.within(kind, ROPES[kind]), width),
            )
        )
    return tuple(layers)


def _kinds(keys: Keys, count: int) -> Sequence[str]:
    """The attention of each layer; five sliding ones and a full one in turn where the config does not say."""
    kinds = keys.table.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if (i + 1) % 6 else FULL for i in range(count)]
        return [*kinds[:-1], FULL]
    if not isinstance(kinds, list):
        raise keys.error("layer_types", f"must be a list, found {kinds!r}")
    if len(kinds) != count:
        raise keys.error("layer_types", f"names {len(kinds)} layers, num_hidden_layers is {count}")
    for kind in kinds:
        if kind not in ROPES:
            raise keys.error("layer_types", f"{kind!r} is not supported (supported: {', '.join(ROPES)})")
    if kinds[-1] != FULL:
        raise keys.error("layer_types", f"ends with {kinds[-1]!r}; the last layer must be {FULL!r}")
    return kinds


def _donors(keys: Keys, kinds: Sequence[str]) -> list[int | None]:
    """Of each layer the one whose keys and values it shares: the last of its kind before all sharers."""
    shared = keys.size("num_kv_shared_layers", 0, least=0)
    first = len(kinds) - shared
    donors: list[int | None] = [None] * min(first, len(kinds))
    for i in range(max(first, 0), len(kinds)):
        found = [j for j in range(first) if kinds[j] == kinds[i]]
        if not found:
            raise keys.error("num_kv_shared_layers", f"is {shared}, which leaves layer {i} no {kinds[i]} to share with")
        donors.append(found[-1])
    return donors


def _own_keys(keys: Keys, count: int) -> list[Keys]:
    """What `per_layer_config` says of each layer. Its keys are layer numbers, maybe with zeros in front."""
    every = keys.within("per_layer_config", {})
    tables = [Keys(FAMILY, {}) for _ in range(count)]
    for number in every.table:
        if not str(number).isdigit() or int(number) >= count:
            raise every.error(str(number), f"is none of the {count} layers")
        table = every.within(number)
        allowed = ("head_dim", "num_key_value_heads")
        for key in table.table:
            if key not in allowed:
                raise table.error(key, f"is not supported{suggest(key, allowed)} (supported: {', '.join(allowed)})")
        tables[int(number)] = table
    return tables


def _rope(keys: Keys, dims: int) -> Rope:
    kind = keys.table.get("rope_type", "default")
    theta, partial = keys.number("rope_theta"), keys.number("partial_rotary_factor", 1.0)
    if kind not in ("default", "proportional"):
        raise keys.error("rope_type", f"{kind!r} is not supported (supported: default, proportional)")
    if partial > 1 or (kind == "default" and partial != 1):
        raise keys.error("partial_rotary_factor", f"{partial} is not supported with rope type {kind!r}")
    if kind == "default":
        return Rope(dims, theta, None, 1.0, False)
    return Rope(dims, None, proportional_freqs(dims, theta, partial), 1.0 / keys.number("factor", 1.0), False)


def proportional_freqs(dims: int, base: float, partial: float) -> mx.array:
    """Wavelength divisors `[dims / 2]`: `base^(2i / dims)` of the first `partial` of the pairs, infinite for the rest,
    which do not turn. Pairs are (i, i + dims / 2) of the whole head."""
    turning = int(partial * dims // 2)
    freqs = base ** (mx.arange(0, 2 * turning, 2).astype(mx.float32) / dims)
    return mx.concatenate([freqs, mx.full(dims // 2 - turning, mx.inf)])

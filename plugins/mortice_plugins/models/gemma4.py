"""Gemma 4's text decoder: E2B, E4B, 12B, 31B and the mixture of experts 26B-A4B.

Sliding and full attention have head sizes and rotary positions of their own; the last layers of E2B and E4B attend to
the keys and values of earlier ones; E2B and E4B give every layer an input of its own. In a multimodal checkpoint the
vision and audio towers are left out: their weights are among those that loading reports as ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from attrs import frozen

from mortice.context import Context
from mortice.elementwise import geglu
from mortice.linear import Embedding, Linear, Packed
from mortice.model import Block, Carry, Model, Output, Part, output_of
from mortice.modules import slots
from mortice_plugins.models.gemma4_config import FULL, MULTIMODAL_TYPES, SLIDING, TEXT_TYPES, Gemma4Config
from mortice_plugins.models.gemma4_experts import Experts, Routed, Router
from mortice_plugins.models.llama import OutputPart, RMSNorm

PER_LAYER = "per_layer_inputs"
"""`[T, layers, width]`: a constant of the context, or in the carry where something that makes it trains."""
TRANSFORMERS, MLX_LM = "model.language_model.", "language_model.model."
"""Prefixes of the decoder's weights in multimodal checkpoints."""


class Attention(nn.Module):
    """Attention with norms on queries, keys and values and no scale; a layer with a donor has queries only."""

    def __init__(self, config: Gemma4Config, index: int) -> None:
        super().__init__()
        c, spec = config, config.layers[index]
        self._heads, self._eps, self._spec = c.heads, c.eps, spec
        self._cached = index if spec.donor is None else spec.donor
        self.q_proj = Linear(c.hidden, c.heads * spec.head_dim, c.bias)
        self.q_norm = RMSNorm(spec.head_dim, c.eps)
        if spec.donor is None:
            self.k_proj = Linear(c.hidden, spec.kv_heads * spec.head_dim, c.bias)
            self.k_norm = RMSNorm(spec.head_dim, c.eps)
            if not spec.k_is_v:
                self.v_proj = Linear(c.hidden, spec.kv_heads * spec.head_dim, c.bias)
        self.o_proj = Linear(c.heads * spec.head_dim, c.hidden, c.bias)

    def keys_and_values(self, x: mx.array, ctx: Context) -> tuple[mx.array, mx.array]:
        """Normed, and keys at their positions: `[T, D]` → `[T, Hk, d]` each."""
        shape = (x.shape[0], self._spec.kv_heads, self._spec.head_dim)
        raw = self.k_proj(x)
        v = raw if self._spec.k_is_v else self.v_proj(x)
        k = self._spec.rope(self.k_norm(raw.reshape(shape)), ctx)
        return k, mx.fast.rms_norm(v.reshape(shape), None, self._eps)

    def __call__(self, x: mx.array, k: mx.array, v: mx.array, ctx: Context) -> mx.array:
        spec = self._spec
        q = self.q_norm(self.q_proj(x).reshape(x.shape[0], self._heads, spec.head_dim))
        out = ctx.attend(spec.rope(q, ctx), k, v, scale=1.0, window=spec.window, layer=self._cached)
        return self.o_proj(out.reshape(x.shape[0], -1))


class AttentionBlock(Block):
    """Attention between two norms. Keys and values that later layers share travel in the carry."""

    def __init__(self, config: Gemma4Config, index: int) -> None:
        super().__init__(f"{config.path}.layers.{index}", index)
        self._donor, self._passes_on = config.layers[index].donor, config.layers[index].passes_on
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)

    def __call__(self, carry: Carry, ctx: Context) -> Carry:
        source = self.layer if self._donor is None else self._donor
        names = f"k{source}", f"v{source}"
        h = carry["h"]
        x = self.input_layernorm(h)
        k, v = self.self_attn.keys_and_values(x, ctx) if self._donor is None else (carry[name] for name in names)
        rest = {name: value for name, value in carry.items() if name not in names}
        if self._passes_on:
            rest |= dict(zip(names, (k, v)))
        return rest | {"h": h + self.post_attention_layernorm(self.self_attn(x, k, v, ctx))}


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))


class MLPBlock(Block):
    """MLP, and experts beside it where there are any; then the layer's own input; then the layer's scalar."""

    def __init__(self, config: Gemma4Config, index: int) -> None:
        super().__init__(f"{config.path}.layers.{index}", index)
        c = config
        self._experts, self._per_layer = c.experts is not None, c.per_layer > 0
        self._last = index + 1 == len(c.layers)
        self.pre_feedforward_layernorm = RMSNorm(c.hidden, c.eps)
        self.mlp = MLP(c.hidden, c.layers[index].intermediate)
        self.post_feedforward_layernorm = RMSNorm(c.hidden, c.eps)
        if self._experts:
            self.router, self.experts = Router(c), Experts(c)
            self.post_feedforward_layernorm_1 = RMSNorm(c.hidden, c.eps)
            self.pre_feedforward_layernorm_2 = RMSNorm(c.hidden, c.eps)
            self.post_feedforward_layernorm_2 = RMSNorm(c.hidden, c.eps)
        if self._per_layer:
            self.per_layer_input_gate = Linear(c.hidden, c.per_layer)
            self.per_layer_projection = Linear(c.per_layer, c.hidden)
            self.post_per_layer_input_norm = RMSNorm(c.hidden, c.eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(self, carry: Carry, ctx: Context) -> Carry:
        h = carry["h"]
        h = h + self.post_feedforward_layernorm(self._feed_forward(h, ctx))
        if self._per_layer:
            inputs = carry[PER_LAYER] if PER_LAYER in carry else ctx.constants[PER_LAYER]
            gated = geglu(self.per_layer_input_gate(h), inputs[:, self.layer])  # [T, width]
            h = h + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        rest = {name: value for name, value in carry.items() if not (self._last and name == PER_LAYER)}
        return rest | {"h": h * self.layer_scalar.astype(h.dtype)}

    def _feed_forward(self, h: mx.array, ctx: Context) -> mx.array:
        y = ctx.tokenwise(self.mlp, self.pre_feedforward_layernorm(h))
        if not self._experts:
            return y
        routed = ctx.tokenwise(Routed(self.router, self.pre_feedforward_layernorm_2, self.experts), h)
        return self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(routed)


class EmbeddingPart(Part):
    """Token embeddings times √D, and what makes the layers' own inputs."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(config.path)
        c = config
        self._c = c
        self.embed_tokens = Embedding(c.vocab, c.hidden)
        if c.per_layer:
            width = len(c.layers) * c.per_layer
            self.embed_tokens_per_layer = Embedding(c.per_layer_vocab, width)
            self.per_layer_model_projection = Linear(c.hidden, width)
            self.per_layer_projection_norm = RMSNorm(c.per_layer, c.eps)

    def __call__(self, tokens: mx.array, dtype: mx.Dtype) -> mx.array:
        """`[T]` → `[T, D]`."""
        return _scaled(self.embed_tokens, tokens, self._c.hidden, dtype)

    def per_layer_inputs(self, tokens: mx.array, h: mx.array) -> mx.array:
        """Token ids `[T]` and their scaled embeddings `[T, D]` → `[T, layers, width]`."""
        shape = (len(tokens), len(self._c.layers), self._c.per_layer)
        own = _scaled(self.embed_tokens_per_layer, tokens, self._c.per_layer, h.dtype).reshape(shape)
        projected = (self.per_layer_model_projection(h) * self._c.hidden**-0.5).reshape(shape)
        return (self.per_layer_projection_norm(projected) + own) * 2**-0.5


def _scaled(table: nn.Module, tokens: mx.array, width: int, dtype: mx.Dtype) -> mx.array:
    """Rows times √width, rounded to the type that they are stored in, as they were trained."""
    stored = table.dtype if isinstance(table, Packed) else table.weight.dtype
    return table(tokens).astype(dtype) * mx.array(width**0.5, stored).astype(dtype)


class FinalNorm(Part):
    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(config.path)
        self.norm = RMSNorm(config.hidden, config.eps)


class Gemma4(Model):
    """A Gemma 4 text decoder."""

    packing_rules: ClassVar = {"router.proj": 8}

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        c = self._c = Gemma4Config.read(config)
        self._embedding, self._final = EmbeddingPart(c), FinalNorm(c)
        self.blocks = [block for i in range(len(c.layers)) for block in (AttentionBlock(c, i), MLPBlock(c, i))]
        self.parts = [self._embedding, *self.blocks, self._final]
        if not c.tied:
            self._output = OutputPart(c)
            self.parts.append(self._output)
        self.buffers = frozenset(f"{c.path}.layers.{i}.layer_scalar" for i in range(len(c.layers)))

    def embed(self, tokens: mx.array, ctx: Context) -> Carry:
        h = self._embedding(tokens, self.dtype)
        if not self._c.per_layer:
            return {"h": h}
        inputs = self._embedding.per_layer_inputs(tokens, h)
        if any((id(owner), key) in self.trainable for _, owner, key in slots("", self._embedding)):
            return {"h": h, PER_LAYER: inputs}
        ctx.constants[PER_LAYER] = inputs
        return {"h": h}

    def finish(self, carry: Carry) -> mx.array:
        return self._final.norm(carry["h"])

    @property
    def output(self) -> Output:
        if self._c.tied:
            return output_of(self._embedding.embed_tokens, f"{self._c.path}.embed_tokens", self._c.softcap)
        return output_of(self._output.lm_head, "lm_head", self._c.softcap)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Names of transformers and of mlx-lm to the parts' own. What no layer reads goes: rotary tables, the output
        matrix of a tied checkpoint, keys and values of layers that share another one's.
        """
        dead = [f"{self._c.path}.layers.{i}.self_attn.{name}" for i, layer in enumerate(self._c.layers)
                if layer.donor is not None for name in ("k_proj.", "v_proj.", "k_norm.")]  # fmt: skip
        if self._c.tied:
            dead.append("lm_head.")
        named = {self.own_name(name): value for name, value in weights.items()}
        kept = {n: w for n, w in named.items() if "rotary_emb" not in n and not n.startswith(tuple(dead))}
        return split_experts(kept)

    def own_name(self, name: str) -> str:
        for prefix in (TRANSFORMERS, MLX_LM):
            if name.startswith(prefix):
                return f"{self._c.path}.{name.removeprefix(prefix)}"
        return name.removeprefix("language_model.") if name.startswith("language_model.lm_head.") else name

    @property
    def mlx_lm_config(self) -> Mapping[str, Any]:
        """Everything spelled out: mlx-lm has other defaults than transformers and does not read `per_layer_config`.

        Of a multimodal config it takes the size of the vocabulary from outside `text_config`.
        """
        if not self._c.multimodal:
            return dict(self.config) | self._c.spelled_out
        text = dict(self.config["text_config"]) | self._c.spelled_out
        return dict(self.config) | {"text_config": text, "vocab_size": self._c.vocab}

    def mlx_lm_name(self, name: str) -> str:
        if not self._c.multimodal:
            return name
        return MLX_LM + name.removeprefix(TRANSFORMERS) if name.startswith(TRANSFORMERS) else f"language_model.{name}"


def split_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """transformers' experts (gate and up in one tensor, gate first) under the names of mlx-lm's matrices."""
    found = {}
    for name, value in weights.items():
        stem, mark, rest = name.rpartition(".experts.")
        if mark and rest == "gate_up_proj":
            for part, half in zip(("gate", "up"), mx.split(value, 2, axis=1)):
                found[f"{stem}.experts.switch_glu.{part}_proj.weight"] = mx.contiguous(half)
        elif mark and rest == "down_proj":
            found[f"{stem}.experts.switch_glu.down_proj.weight"] = value
        else:
            found[name] = value
    return found


def _tiny(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma4_text", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "vocab_size": 41,
        "vocab_size_per_layer_input": 41, "hidden_size_per_layer_input": 0, "sliding_window": 3,
        "layer_types": [SLIDING, FULL, FULL], "final_logit_softcapping": 5.0, "initializer_range": 0.3,
    } | changes  # fmt: skip


@frozen
class Gemma4Adapter:
    """Gemma 4 text decoders: E2B, E4B, 12B, 31B, 26B-A4B."""

    examples: ClassVar = (
        _tiny(
            num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL], num_kv_shared_layers=2,
            hidden_size_per_layer_input=32, use_double_wide_mlp=True,
        ),
        _tiny(attention_k_eq_v=True, num_global_key_value_heads=1),
        _tiny(
            model_type="gemma4_text", enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32
        ),
    )  # fmt: skip

    def handles(self, config: Mapping[str, Any], /) -> bool:
        return config.get("model_type") in TEXT_TYPES + MULTIMODAL_TYPES

    def build(self, config: Mapping[str, Any], /) -> Model:
        return Gemma4(config)

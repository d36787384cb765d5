"""Llama and what is built like it: Llama 2 and 3, SmolLM2, MiniCPM5, Mistral, Qwen3 (q/k norms).

Pre-norm RMSNorm, SwiGLU, rotary positions. Both spellings of the rotary options are read: `rope_parameters`
(transformers 5) and `rope_theta` with `rope_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from attrs import frozen

from mortice.context import Context
from mortice.elementwise import swiglu
from mortice.errors import CheckpointError
from mortice.linear import Embedding, Linear
from mortice.model import Block, Carry, Model, Output, Part, output_of
from mortice_plugins.models.config_keys import Keys

MODEL_TYPES = ("llama", "mistral", "qwen3")


@frozen
class Rope:
    """Rotary positions: a base, or one wavelength divisor for each pair of dimensions."""

    dims: int
    base: float | None
    freqs: mx.array | None
    scale: float
    traditional: bool

    def __call__(self, x: mx.array, ctx: Context) -> mx.array:
        return ctx.rope(
            x, self.dims, base=self.base, scale=self.scale, freqs=self.freqs, traditional=self.traditional
        )  # fmt: skip


@frozen
class LlamaConfig:
    """The keys of `config.json` that shape the model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Sliding window of each layer, None for full attention."""
    rope: Rope

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Raises CheckpointError for a key that is missing or that this adapter does not know how to honour."""

        keys = Keys(str(config.get("model_type")), config)
        activation = config.get("hidden_act") or "silu"
        if activation not in ("silu", "swish"):
            raise CheckpointError(f"config.json: hidden_act {activation!r} is not supported (supported: 'silu')")
        hidden, heads, layers = (keys.size(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        head_dim = keys.size("head_dim", max(1, hidden // heads))
        kv_heads = keys.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise keys.error("num_attention_heads", f"is {heads}, no multiple of {kv_heads} key heads")
        return cls(
            hidden=hidden,
            intermediate=keys.size("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=keys.size("vocab_size"),
            eps=keys.number("rms_norm_eps", 1e-6),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=config["model_type"] == "qwen3",
            windows=_windows(config, layers),
            rope=_rope(config, head_dim),
        )


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Absent keys mean what they mean to the family: Mistral's window is 4096, Qwen3's begins at `max_window_layers`,
    Llama has none."""
    family, kinds = config["model_type"], config.get("layer_types")
    window = config.get("sliding_window", 4096 if family == "mistral" else None)
    if not window or (family == "qwen3" and not config.get("use_sliding_window")) or (family == "llama" and not kinds):
        return (None,) * layers
    if kinds is None:
        full = config.get("max_window_layers", 28) if family == "qwen3" else 0
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    top = Keys(str(config.get("model_type")), config)
    table = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    keys = top.within(table, {})
    options = dict(keys.table)
    kind = options.get("rope_type") or options.get("type") or "default"

    def need(key: str) -> float:
        if options.get(key) is None:
            raise CheckpointError(f"config.json: rope type {kind!r} needs {key!r} among the rotary options")
        return keys.number(key)

    partial = options.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0) or any(isinstance(value, Mapping) for value in options.values()):
        raise CheckpointError("config.json: rotary positions on part of a head or by layer type are not supported")
    base = keys.number("rope_theta", top.number("rope_theta", 10000.0))
    traditional = bool(config.get("rope_traditional", False))
    if kind == "default":
        return Rope(head_dim, base, None, 1.0, traditional)
    if kind == "linear":
        return Rope(head_dim, base, None, 1.0 / need("factor"), traditional)
    if kind == "llama3":
        freqs = llama3_freqs(
            head_dim, base, need("factor"), need("low_freq_factor"), need("high_freq_factor"),
            need("original_max_position_embeddings"),
        )  # fmt: skip
        return Rope(head_dim, None, freqs, 1.0, traditional)
    raise CheckpointError(f"config.json: rope type {kind!r} is not supported (supported: default, linear, llama3)")


def llama3_freqs(dims: int, base: float, factor: float, low: float, high: float, original: float) -> mx.array:
    """Wavelength divisors `[dims / 2]` of Llama 3's scaling: wavelengths longer than `original / low` tokens are
    stretched by `factor`, those shorter than `original / high` kept, those between blended."""
    freqs = base ** (mx.arange(0, dims, 2).astype(mx.float32) / dims)
    wavelengths = 2 * math.pi * freqs
    smooth = (original / wavelengths - low) / (high - low)
    blended = 1 / ((1 - smooth) / (freqs * factor) + smooth / freqs)
    freqs_long = mx.where(wavelengths > original / low, freqs * factor, freqs)
    between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return mx.where(between, blended, freqs_long)


class RMSNorm(nn.Module):
    """Root-mean-square norm, its statistics in float32."""

    def __init__(self, dims: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((dims,))
        self._eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self._eps)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        c = config
        self._c, self._layer, self._window = c, layer, c.windows[layer]
        self.q_proj = Linear(c.hidden, c.heads * c.head_dim, c.attention_bias)
        self.k_proj = Linear(c.hidden, c.kv_heads * c.head_dim, c.attention_bias)
        self.v_proj = Linear(c.hidden, c.kv_heads * c.head_dim, c.attention_bias)
        self.o_proj = Linear(c.heads * c.head_dim, c.hidden, c.attention_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.eps), RMSNorm(c.head_dim, c.eps)

    def __call__(self, x: mx.array, ctx: Context) -> mx.array:
        c, tokens = self._c, x.shape[0]
        q = self.q_proj(x).reshape(tokens, c.heads, c.head_dim)
        k = self.k_proj(x).reshape(tokens, c.kv_heads, c.head_dim)
        v = self.v_proj(x).reshape(tokens, c.kv_heads, c.head_dim)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = c.rope(q, ctx), c.rope(k, ctx)
        out = ctx.attend(q, k, v, scale=c.head_dim**-0.5, window=self._window, layer=self._layer)
        return self.o_proj(out.reshape(tokens, c.heads * c.head_dim))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden, config.intermediate, config.mlp_bias)
        self.up_proj = Linear(config.hidden, config.intermediate, config.mlp_bias)
        self.down_proj = Linear(config.intermediate, config.hidden, config.mlp_bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class AttentionBlock(Block):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__(f"model.layers.{layer}", layer)
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.self_attn = Attention(config, layer)

    def __call__(self, carry: Carry, ctx: Context) -> Carry:
        h = carry["h"]
        return carry | {"h": h + self.self_attn(self.input_layernorm(h), ctx)}


class MLPBlock(Block):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__(f"model.layers.{layer}", layer)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp = MLP(config)

    def __call__(self, carry: Carry, ctx: Context) -> Carry:
        h = carry["h"]
        return carry | {"h": h + ctx.tokenwise(self.mlp, self.post_attention_layernorm(h))}


class EmbeddingPart(Part):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__("model")
        self.embed_tokens = Embedding(config.vocab, config.hidden)


class FinalNorm(Part):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__("model")
        self.norm = RMSNorm(config.hidden, config.eps)


class OutputPart(Part):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__("")
        self.lm_head = Linear(config.hidden, config.vocab)


class Llama(Model):
    """A Llama-like decoder."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        c = self._c = LlamaConfig.read(config)
        self._tied = c.tied
        self._embedding, self._final = EmbeddingPart(c), FinalNorm(c)
        self.blocks = [block for i in range(c.layers) for block in (AttentionBlock(c, i), MLPBlock(c, i))]
        self.parts = [self._embedding, *self.blocks, self._final]
        if not c.tied:
            self._output = OutputPart(c)
            self.parts.append(self._output)

    def embed(self, tokens: mx.array, ctx: Context) -> Carry:
        return {"h": self._embedding.embed_tokens(tokens).astype(self.dtype)}

    def finish(self, carry: Carry) -> mx.array:
        return self._final.norm(carry["h"])

    @property
    def output(self) -> Output:
        if self._tied:
            return output_of(self._embedding.embed_tokens, "model.embed_tokens")
        return output_of(self._output.lm_head, "lm_head")

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Rotary tables are recomputed; a tied checkpoint may still carry its output matrix."""
        dead = ("lm_head.",) if self._tied else ()
        return {n: w for n, w in weights.items() if "rotary_emb" not in n and not n.startswith(dead)}

    @property
    def mlx_lm_config(self) -> Mapping[str, Any]:
        """With the keys whose absence means something else to mlx-lm, which reads the rotary options of a Llama in
        their older spelling only."""
        c, made = self._c, dict(self.config)
        made |= {"tie_word_embeddings": c.tied, "head_dim": c.head_dim, "num_key_value_heads": c.kv_heads,
                 "rms_norm_eps": c.eps}  # fmt: skip
        if any(c.windows) and "layer_types" not in made:
            made["layer_types"] = ["sliding_attention" if window else "full_attention" for window in c.windows]
            made["sliding_window"] = max(window or 0 for window in c.windows)
        rope = dict(made.get("rope_parameters") or {})
        if rope:
            made.setdefault("rope_theta", rope.pop("rope_theta", 10000.0))
            if rope.get("rope_type", rope.get("type", "default")) != "default":
                made["rope_scaling"] = rope
        return made


@frozen
class LlamaAdapter:
    """Llama 2 and 3, SmolLM2, MiniCPM5, Mistral, Qwen3."""

    def handles(self, config: Mapping[str, Any], /) -> bool:
        return config.get("model_type") in MODEL_TYPES

    def build(self, config: Mapping[str, Any], /) -> Model:
        return Llama(config)

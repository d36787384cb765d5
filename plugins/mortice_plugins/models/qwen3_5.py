"""Qwen3.5's dense text decoder: three layers of gated delta rule, one of full attention, and so on.

A linear layer mixes its queries, keys and values of a few tokens in a causal convolution and reads a matrix-valued
state that they write (`gated_delta.py`); both go through `ctx.scan`. A full layer gates what it attends to. In a
multimodal checkpoint the vision tower is left out, and so is the head for multi-token prediction: their weights are
among those that loading reports as ignored. What this leaves out: the mixture of experts, positions of images.

Norms are held as they multiply (around 1), as mlx-lm stores them; transformers stores them around 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from attrs import frozen

from mortice.context import Context, State
from mortice.elementwise import swiglu
from mortice.errors import CheckpointError
from mortice.linear import Embedding, Linear
from mortice.model import Block, Carry, Model, Output, Part, output_of
from mortice_plugins.models.config_keys import Keys
from mortice_plugins.models.gated_delta import gated_delta
from mortice_plugins.models.llama import Rope

FAMILY = "Qwen3.5"
NESTED, PLAIN = "qwen3_5", "qwen3_5_text"
LINEAR, FULL = "linear_attention", "full_attention"
TRANSFORMERS, MLX_LM = "model.language_model.", "language_model.model."
"""Prefixes of the decoder's weights in multimodal checkpoints."""
CENTRED = ("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight")
"""Ends of the names of norms that transformers stores around 0; the final norm is one more."""


@frozen
class Qwen35Config:
    """The keys of `config.json` that shape the text decoder."""

    multimodal: bool
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    tied: bool
    bias: bool
    kinds: tuple[str, ...]
    """Of each layer: linear or full attention."""
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the convolution sees."""
    rope: Rope

    @property
    def path(self) -> str:
        """Prefix of the decoder's parameter names."""
        return "model.language_model" if self.multimodal else "model"

    @property
    def mixed(self) -> int:
        """Width of queries, keys and values of a linear layer together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Qwen35Config:
        """Raises CheckpointError for a key that is missing or that this adapter does not know how to honour."""
        nested = config.get("model_type") == NESTED and "text_config" in config
        top = Keys(FAMILY, config)
        keys = Keys(FAMILY, top.within("text_config").table, "text_config.") if nested else top
        if keys.table.get("num_experts"):
            raise keys.error("num_experts", "is set: the mixture of experts is not supported")
        if keys.table.get("hidden_act", "silu") not in ("silu", "swish"):
            raise keys.error("hidden_act", f"{keys.table['hidden_act']!r} is not supported (supported: 'silu')")
        heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
        key_heads, value_heads = keys.size("linear_num_key_heads", 16), keys.size("linear_num_value_heads", 32)
        if value_heads % key_heads:
            raise keys.error("linear_num_value_heads", f"is {value_heads}, no multiple of {key_heads} key heads")
        head_dim = keys.size("head_dim", 256)
        return cls(
            multimodal=nested,
            hidden=hidden,
            intermediate=keys.size("intermediate_size"),
            heads=heads,
            kv_heads=keys.size("num_key_value_heads", heads),
            head_dim=head_dim,
            vocab=keys.size("vocab_size"),
            eps=keys.number("rms_norm_eps", 1e-6),
            tied=bool(config.get("tie_word_embeddings", keys.table.get("tie_word_embeddings", False))),
            bias=bool(keys.table.get("attention_bias", False)),
            kinds=_kinds(keys),
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=keys.size("linear_key_head_dim", 128),
            value_dim=keys.size("linear_value_head_dim", 128),
            kernel=keys.size("linear_conv_kernel_dim", 4),
            rope=_rope(keys, head_dim),
        )


def _kinds(keys: Keys) -> tuple[str, ...]:
    count, kinds = keys.size("num_hidden_layers"), keys.table.get("layer_types")
    if kinds is None:
        every = keys.size("full_attention_interval", 4)
        return tuple(FULL if (i + 1) % every == 0 else LINEAR for i in range(count))
    if not isinstance(kinds, list) or len(kinds) != count:
        raise keys.error("layer_types", f"must name the kind of each of the {count} layers, found {kinds!r}")
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise keys.error("layer_types", f"{kind!r} is not supported (supported: {LINEAR}, {FULL})")
    return tuple(kinds)


def _rope(keys: Keys, head_dim: int) -> Rope:
    table = keys.within("rope_parameters", {})
    kind = table.table.get("rope_type", table.table.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise table.error("rope_type", f"{kind!r} is not supported (supported: default)")
    share = table.number("partial_rotary_factor", keys.number("partial_rotary_factor", 0.25))
    dims = int(head_dim * share)
    if share > 1 or dims < 2 or dims % 2:
        raise table.error("partial_rotary_factor", f"{share} of heads of {head_dim} is no even number of dimensions")
    theta = table.number("rope_theta", keys.number("rope_theta", 1e7))
    return Rope(dims, theta, None, 1.0, False)


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, its result in the type of what comes in."""

    def __init__(self, dims: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((dims,))
        self._eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self._eps).astype(x.dtype)


class CausalConvolution(nn.Module):
    """One filter of a few tokens for each channel, as sums of shifted rows: MLX's grouped convolution is slower."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = mx.ones((channels, kernel, 1))

    def __call__(self, x: mx.array, before: mx.array) -> mx.array:
        """`x [T, C]` behind `before [kernel − 1, C]` → `[T, C]`."""
        x, tokens = mx.concatenate([before, x]), x.shape[0]
        taps = self.weight.astype(x.dtype)
        total = x[:tokens] * taps[:, 0, 0]
        for place in range(1, taps.shape[1]):
            total = total + x[place : place + tokens] * taps[:, place, 0]
        return total


class GatedDeltaNet(nn.Module):
    """A linear-attention layer."""

    def __init__(self, config: Qwen35Config) -> None:
        super().__init__()
        c = self._c = config
        self.in_proj_qkv = Linear(c.hidden, c.mixed)
        self.in_proj_z = Linear(c.hidden, c.value_heads * c.value_dim)
        self.in_proj_b = Linear(c.hidden, c.value_heads)
        self.in_proj_a = Linear(c.hidden, c.value_heads)
        self.conv1d = CausalConvolution(c.mixed, c.kernel)
        self.dt_bias = mx.ones((c.value_heads,))
        self.A_log = mx.zeros((c.value_heads,))
        self.norm = RMSNorm(c.value_dim, c.eps)
        self.out_proj = Linear(c.value_heads * c.value_dim, c.hidden)

    def __call__(self, x: mx.array, ctx: Context, layer: int) -> mx.array:
        """`[T, D]` → `[T, D]`."""
        c = self._c
        rate = self.in_proj_a(x).astype(mx.float32) + self.dt_bias
        decay = -mx.exp(self.A_log.astype(mx.float32)) * nn.softplus(rate)  # [T, Hv]
        strength = mx.sigmoid(self.in_proj_b(x))
        y = ctx.scan(self._mix, self.in_proj_qkv(x), decay, strength, layer=layer)  # [T, Hv, Dv]
        z = self.in_proj_z(x).reshape(y.shape)
        gated = self.norm(y).astype(mx.float32) * nn.silu(z.astype(mx.float32))
        return self.out_proj(gated.astype(x.dtype).reshape(x.shape[0], c.value_heads * c.value_dim))

    def _mix(self, inputs: tuple[mx.array, ...], state: State | None) -> tuple[mx.array, State]:
        """The recurrence: `inputs` are queries, keys and values `[T, C]`, log-decay and strength `[T, Hv]`."""
        c = self._c
        mixed, decay, strength = inputs
        tail, memory = (mx.zeros((c.kernel - 1, c.mixed), mixed.dtype), None) if state is None else state
        q, k, v = mx.split(nn.silu(self.conv1d(mixed, tail)), _cuts(c), axis=-1)
        q, k = (_unit(x.reshape(-1, c.key_heads, c.key_dim)) for x in (q, k))
        v = v.reshape(-1, c.value_heads, c.value_dim)
        y, memory = gated_delta(q * c.key_dim**-0.5, k, v, decay, strength, memory)
        return y, (mx.concatenate([tail, mixed])[mixed.shape[0] :], memory)


def _cuts(c: Qwen35Config) -> list[int]:
    return [c.key_heads * c.key_dim, 2 * c.key_heads * c.key_dim]


def _unit(x: mx.array) -> mx.array:
    """Rows of length 1, with 1e-6 under the root."""
    width = x.shape[-1]
    return mx.fast.rms_norm(x, None, 1e-6 / width) * width**-0.5


class Attention(nn.Module):
    """Full attention; half of what the query layer makes gates the output."""

    def __init__(self, config: Qwen35Config) -> None:
        super().__init__()
        c = self._c = config
        self.q_proj = Linear(c.hidden, 2 * c.heads * c.head_dim, c.bias)
        self.k_proj = Linear(c.hidden, c.kv_heads * c.head_dim, c.bias)
        self.v_proj = Linear(c.hidden, c.kv_heads * c.head_dim, c.bias)
        self.o_proj = Linear(c.heads * c.head_dim, c.hidden, c.bias)
        self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.eps), RMSNorm(c.head_dim, c.eps)

    def __call__(self, x: mx.array, ctx: Context, layer: int) -> mx.array:
        """`[T, D]` → `[T, D]`."""
        c, tokens = self._c, x.shape[0]
        q, gate = mx.split(self.q_proj(x).reshape(tokens, c.heads, 2 * c.head_dim), 2, axis=-1)
        k, v = (proj(x).reshape(tokens, c.kv_heads, c.head_dim) for proj in (self.k_proj, self.v_proj))
        q, k = c.rope(self.q_norm(q), ctx), c.rope(self.k_norm(k), ctx)
        out = ctx.attend(q, k, v, scale=c.head_dim**-0.5, layer=layer) * mx.sigmoid(gate)
        return self.o_proj(out.reshape(tokens, c.heads * c.head_dim))


class MixingBlock(Block):
    """What mixes tokens: gated delta rule or attention, behind a norm."""

    def __init__(self, config: Qwen35Config, index: int) -> None:
        super().__init__(f"{config.path}.layers.{index}", index)
        self._linear = config.kinds[index] == LINEAR
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        if self._linear:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)

    def __call__(self, carry: Carry, ctx: Context) -> Carry:
        h = carry["h"]
        mix = self.linear_attn if self._linear else self.self_attn
        return carry | {"h": h + mix(self.input_layernorm(h), ctx, self.layer)}


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class MLPBlock(Block):
    def __init__(self, config: Qwen35Config, index: int) -> None:
        super().__init__(f"{config.path}.layers.{index}", index)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp = MLP(config.hidden, config.intermediate)

    def __call__(self, carry: Carry, ctx: Context) -> Carry:
        h = carry["h"]
        return carry | {"h": h + ctx.tokenwise(self.mlp, self.post_attention_layernorm(h))}


class EmbeddingPart(Part):
    def __init__(self, config: Qwen35Config) -> None:
        super().__init__(config.path)
        self.embed_tokens = Embedding(config.vocab, config.hidden)


class FinalNorm(Part):
    def __init__(self, config: Qwen35Config) -> None:
        super().__init__(config.path)
        self.norm = RMSNorm(config.hidden, config.eps)


class OutputPart(Part):
    def __init__(self, config: Qwen35Config) -> None:
        super().__init__("")
        self.lm_head = Linear(config.hidden, config.vocab)


class Qwen35(Model):
    """A Qwen3.5 text decoder."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        c = self._c = Qwen35Config.read(config)
        self._embedding, self._final = EmbeddingPart(c), FinalNorm(c)
        self.blocks = [block for i in range(len(c.kinds)) for block in (MixingBlock(c, i), MLPBlock(c, i))]
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
        if self._c.tied:
            return output_of(self._embedding.embed_tokens, f"{self._c.path}.embed_tokens")
        return output_of(self._output.lm_head, "lm_head")

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Names of transformers and of mlx-lm to the parts' own, norms and filters to mlx-lm's form. A tied checkpoint
        may still carry its output matrix."""
        named = {self.own_name(name): value for name, value in weights.items()}
        named = {n: w for n, w in named.items() if not (self._c.tied and n.startswith("lm_head."))}
        filters = [name for name in named if name.endswith("linear_attn.conv1d.weight")]
        of_mlx_lm = all(named[name].shape[-1] == 1 for name in filters)
        if of_mlx_lm and (filters or any(name.startswith(MLX_LM) for name in weights)):
            return named
        for name in filters:
            if named[name].ndim != 3:
                raise CheckpointError(f"{name} is {list(named[name].shape)}, not [channels, 1, tokens]")
            named[name] = named[name].swapaxes(1, 2)
        for name, value in named.items():
            if name.endswith(CENTRED) or name == f"{self._c.path}.norm.weight":
                named[name] = value.astype(mx.float32) + 1.0
        return named

    def own_name(self, name: str) -> str:
        for prefix in (TRANSFORMERS, MLX_LM):
            if name.startswith(prefix):
                return f"{self._c.path}.{name.removeprefix(prefix)}"
        return name.removeprefix("language_model.") if name.startswith("language_model.lm_head.") else name

    @property
    def mlx_lm_config(self) -> Mapping[str, Any]:
        """mlx-lm knows the text decoder inside a multimodal config only."""
        return self.config if self._c.multimodal else {"model_type": NESTED, "text_config": dict(self.config)}

    def mlx_lm_name(self, name: str) -> str:
        inside = name.removeprefix(f"{self._c.path}.")
        return f"language_model.{name}" if inside == name else MLX_LM + inside


@frozen
class Qwen35Adapter:
    """Qwen3.5 dense text decoders: gated delta rule and attention."""

    # With random weights what a first token reads may be nearly 0: a norm of small eps would show its rounding.
    examples: ClassVar = (
        {
            "model_type": PLAIN, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 41,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "rms_norm_eps": 1e-2, "tie_word_embeddings": True, "initializer_range": 0.2,
        },
    )  # fmt: skip

    def handles(self, config: Mapping[str, Any], /) -> bool:
        return config.get("model_type") in (NESTED, PLAIN)

    def build(self, config: Mapping[str, Any], /) -> Model:
        return Qwen35(config)

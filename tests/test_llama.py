"""The llama adapter: configs in every spelling, against hand computations and mlx-lm.

Logits and gradients against transformers' reference values are in `test_score.py`.
"""

from __future__ import annotations

import math

import mlx.core as mx
import pytest
from tiny_llama import CONFIG, IDS, checkpoint, distance, logits, tiny

from mortice.batch import Row, Span
from mortice.context import CacheContext, SpanContext
from mortice.errors import CheckpointError
from mortice_plugins.models.llama import LlamaAdapter, LlamaConfig, llama3_freqs

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def read(**changes) -> LlamaConfig:
    return LlamaConfig.read(CONFIG | changes)


def test_names_and_blocks():
    model = tiny(model_type="qwen3", head_dim=32).model
    assert [(b.path, b.layer) for b in model.blocks] == [(f"model.layers.{i}", i) for i in (0, 0, 1, 1)]
    assert model.num_layers == 2
    shapes = {name: w.shape for name, w in model.named_parameters().items()}
    assert set(shapes) == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
        *(f"model.layers.{i}.{name}.weight" for i in range(2) for name in (
            "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm",
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )),
    }  # fmt: skip
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (128, 64)  # q is wider than hidden
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (64, 64)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (64, 128)


def test_defaults_are_those_of_transformers():
    bare = {k: v for k, v in CONFIG.items() if k not in ("rope_theta", "tie_word_embeddings", "num_key_value_heads")}
    c = LlamaConfig.read(bare | {"head_dim": None})
    assert (c.head_dim, c.kv_heads, c.tied, c.rope.base) == (16, 4, False, 10000.0)
    assert not (c.attention_bias or c.mlp_bias or c.qk_norm)


def test_biases():
    model = tiny(attention_bias=True, mlp_bias=True).model
    first = [n.removeprefix("model.layers.0.") for n in model.named_parameters() if n.startswith("model.layers.0.")]
    assert {n for n in first if n.endswith("bias")} == {
        f"{module}_proj.bias"
        for module in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    }
    before = logits(model)
    model.bind({"model.layers.1.self_attn.v_proj.bias": mx.ones((32,))})
    assert distance(before, logits(model)) > 1e-3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        ),
    ],
    ids=["default", "llama3", "linear"],
)
def test_both_spellings_of_the_rotary_options(old, new):
    bare = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    found, same = (LlamaConfig.read(bare | keys).rope for keys in (old, {"rope_parameters": new}))
    assert (found.base, found.scale, found.traditional) == (same.base, same.scale, same.traditional)
    assert found.freqs is None or mx.array_equal(found.freqs, same.freqs)
    plain = tiny(rope_theta=1e4).model
    assert distance(logits(tiny(**old).model), logits(plain)) > 1e-3


def test_linear_scaling_stretches_positions():
    """Twelve tokens with factor 1 are at the positions of every fourth of forty-eight with factor 4."""
    rope, plain = read(rope_scaling={"type": "linear", "factor": 4.0}).rope, read().rope
    x = mx.random.normal((12, 2, 16), key=mx.random.key(0))

    def at(positions):
        spans = [Span(i, i + 1, None, p) for i, p in enumerate(positions)]
        return SpanContext(Row(range(12), spans, [], [], [], [], []))

    assert distance(rope(x, at(range(0, 48, 4))), plain(x, at(range(12)))) < 1e-5


def test_llama3_frequencies_by_hand():
    """Wavelengths 2π, 2π·10, 2π·100, 2π·1000 with original 64: shorter than 64 / 4 = 16 kept, longer than 64 / 1
    stretched by 8, 62.8 blended."""
    freqs = llama3_freqs(8, 10000.0, 8.0, 1.0, 4.0, 64)
    smooth = (64 / (20 * math.pi) - 1) / 3
    blended = 10 / ((1 - smooth) / 8 + smooth)
    assert freqs.tolist() == pytest.approx([1.0, blended, 800.0, 8000.0], rel=1e-5)


def test_sliding_windows():
    """Layers in order; None is full attention. Absent keys mean what transformers means by them."""
    kinds = ["full_attention", "sliding_attention"]
    assert read().windows == (None, None)
    assert read(sliding_window=4).windows == (None, None)  # a Llama has none
    assert read(model_type="mistral", sliding_window=None).windows == (None, None)
    assert read(model_type="mistral", sliding_window=4).windows == (4, 4)
    assert read(model_type="mistral").windows == (4096, 4096)
    assert read(model_type="mistral", sliding_window=4, layer_types=kinds).windows == (None, 4)
    qwen3 = {"model_type": "qwen3", "sliding_window": 4}
    assert read(**qwen3, layer_types=kinds).windows == (None, None)
    assert read(**qwen3, use_sliding_window=True, layer_types=kinds).windows == (None, 4)
    assert read(**qwen3, use_sliding_window=True, max_window_layers=1).windows == (None, 4)


def test_a_window_hides_what_is_further_back():
    """Two layers of window 3 reach 4 tokens back, so the last logits of 12 tokens depend on tokens 7 to 11 alone."""
    model = tiny(model_type="mistral", sliding_window=3).model
    other = [*([1] * 7), *IDS[7:]]
    assert distance(logits(model)[-1], logits(model, other)[-1]) < 1e-5
    assert distance(logits(model)[6], logits(model, other)[6]) > 1e-3
    wide = tiny(model_type="mistral", sliding_window=None).model
    assert distance(logits(wide)[-1], logits(wide, other)[-1]) > 1e-3


def test_decoding_gives_the_same_logits():
    model = tiny(model_type="qwen3", sliding_window=4, use_sliding_window=True, max_window_layers=1).model
    ctx, found = CacheContext(), []
    for part in (IDS[:5], IDS[5:6], IDS[6:]):
        found.append(model.output.project(model.hidden(ctx, mx.array(part))))
        ctx.advance(len(part))
    assert distance(mx.concatenate(found), logits(model)) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported \(supported: 'silu'\)"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope type 'yarn' is not supported \(supported: def"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs 'factor'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope type 'llama3' needs 'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "on part of a head"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "by layer type"),
        ({"intermediate_size": None}, "lacks 'intermediate_size', which a llama model needs"),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        LlamaAdapter().build(CONFIG | changes)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_families(kind):
    assert LlamaAdapter().handles({"model_type": kind})


@pytest.mark.parametrize("kind", ["gemma4", "qwen3_5", "qwen3_moe", None])
def test_other_families(kind):
    assert not LlamaAdapter().handles({"model_type": kind})


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "head_dim": 32},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_traditional": True, "tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen3", "head_dim": 32, "rope_theta": 1e6},
    ],
    ids=["head_dim", "llama3", "linear", "traditional", "biases", "qwen3"],
)
def test_equals_mlx_lm(tmp_path, changes):
    """Old rotary keys: mlx-lm's llama does not read `rope_parameters`."""
    utils = pytest.importorskip("mlx_lm.utils")
    folder = checkpoint(tmp_path, **changes)
    theirs, _ = utils.load_model(folder)
    assert distance(theirs(mx.array([IDS]))[0], logits(tiny(**changes).model)) < 1e-4


@pytest.mark.parametrize(("key", "value"), [("hidden_size", "64"), ("num_hidden_layers", 4.5), ("head_dim", 0)])
def test_sizes_are_whole_numbers(key, value):
    with pytest.raises(CheckpointError, match=f"{key} must be a whole number of 1 or more, found"):
        tiny(**{key: value})

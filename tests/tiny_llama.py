"""Llama-like checkpoints of a few thousand weights, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from mortice.batch import Row, Span
from mortice.context import SpanContext
from mortice.model import Model
from mortice.plugins import load_plugins
from mortice.pretrained import Pretrained, random_model

PLUGINS = load_plugins()
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 128, "hidden_act": "silu", "tie_word_embeddings": False, "initializer_range": 0.2,
}  # fmt: skip
IDS = [5, 17, 3, 90, 41, 41, 2, 60, 33, 8, 71, 12]


def tiny(seed: int = 0, **changes: Any) -> Pretrained:
    """A model with random weights, in memory."""
    return random_model(CONFIG | changes, seed, plugins=PLUGINS)


def write(folder: Path, weights: dict[str, mx.array], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def checkpoint(folder: Path, seed: int = 0, dtype: mx.Dtype = mx.float32, **changes: Any) -> Path:
    """A folder with config.json and model.safetensors."""
    weights = {name: w.astype(dtype) for name, w in tiny(seed, **changes).model.named_parameters().items()}
    return write(folder, weights, CONFIG | changes)


def logits(model: Model, ids: list[int] = IDS) -> mx.array:
    """`[T, V]` of one plain sequence."""
    ctx = SpanContext(Row(ids, [Span(0, len(ids), None, 0)], [], [], [], [], []))
    return model.output.project(model.hidden(ctx, ctx.tokens))


def distance(a: mx.array, b: mx.array) -> float:
    return mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()

"""All float weights train, in float32. For small models, and for models trained from nothing.

What this leaves out: training a chosen part of the weights, and quantized weights, which have no gradient.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from attrs import frozen

from mortice import atomic
from mortice.errors import CheckpointError, ConfigError
from mortice.linear import FLOATS
from mortice.model import Model
from mortice.pretrained import open_weights, read_json, some
from mortice.protocols import Params


@frozen
class FullWeights:
    """All float weights train, embeddings, norms and output included; tied ones count once. float32."""

    def attach(self, model: Model, seed: int, /) -> Params:
        named = model.named_parameters()
        packed = [name for name in named if name.endswith(".scales")]
        if packed:
            raise ConfigError(
                f'adapter "full" cannot train quantized weights, which have no gradient ({some(packed, 3)}); '
                "use a LoRA adapter, or a checkpoint in float weights (mortice convert --dequantize)"
            )
        params = {
            name: value.astype(mx.float32)
            for name, value in named.items()
            if value.dtype in FLOATS and name not in model.buffers
        }
        model.bind(params)
        return params

    def base(self, params: Params, /) -> Params:
        raise ConfigError('reference.policy = "base": with full weights the base is what trains; use "initial", a copy')

    def save(self, model: Model, params: Params, path: Path, /) -> None:
        config = {"fine_tune_type": "full", "num_layers": model.num_layers}
        with atomic.writing_folder(path) as folder:
            named = {model.mlx_lm_name(name): value for name, value in params.items()}
            mx.save_safetensors(str(folder / "adapters.safetensors"), named, metadata={"format": "mlx"})
            (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def load(self, model: Model, path: Path, params: Params, /) -> Params:
        tensors = {model.own_name(name): t for name, t in open_weights(path, "adapters.safetensors").items()}
        wrong = sorted(set(params) ^ set(tensors)) + [
            name for name in params if name in tensors and tensors[name].shape != params[name].shape
        ]
        if wrong:
            raise CheckpointError(f"{path} does not fit the model: {some(wrong)}")
        return {name: tensors[name].astype(mx.float32) for name in params}

    @classmethod
    def claims(cls, path: Path) -> bool:
        """Whether a folder holds full weights as mlx-lm saves them."""
        file = path / "adapter_config.json"
        return file.exists() and read_json(file).get("fine_tune_type") == "full"

    @classmethod
    def from_folder(cls, path: Path, model: Model) -> tuple[FullWeights, Params]:
        """Raises CheckpointError where the tensors do not fit the model."""
        adapter = cls()
        params = adapter.load(model, path, adapter.attach(model, 0))
        model.bind(params)
        return adapter, params

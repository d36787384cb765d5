"""A scalar on the hidden state of an answer's last token: the head of a reward model (Ziegler et al., 2019,
arXiv:1909.08593).

Its weights are saved beside the adapter, in a file of their own, which loaders of adapters do not look at. What it
leaves out: a value for every token, as critics have.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
from attrs import frozen

from mortice import atomic
from mortice.batch import Gradients, TokenLogprobs
from mortice.errors import CheckpointError
from mortice.model import Model, Output, Part
from mortice.pretrained import open_weights
from mortice.protocols import Params
from mortice.randomness import stable_key

NAME = "score.weight"
"""As transformers calls it, in its models of sequence classification."""
FILE = "reward_head.safetensors"


@frozen
class Reward:
    """One reward for each answer, read off the hidden state of its last scored token; for losses of values.

    reward = w · h, in float32; w starts normal with variance 1/(D + 1), keyed by the run's seed, and trains with the
    adapter. A soft cap and a temperature of the model's logits have no part in it.
    """

    provides: ClassVar = frozenset({"values"})
    reads_last: ClassVar = True
    differentiable: ClassVar = True

    def attach(self, model: Model, seed: int) -> Params:
        width = model.output.rows(0, 1).shape[1]
        weight = mx.random.normal((1, width), key=stable_key(seed, "head", NAME)) / math.sqrt(width + 1)
        return _put(model, weight)

    def output_for(self, model: Model) -> Output:
        return Output(model.named_parameters()[NAME], NAME)

    def score(
        self, hidden: mx.array, targets: mx.array, output: Output, *, grad: bool = False,
        entropy: bool = False, traced: bool = False,
    ) -> TokenLogprobs:  # fmt: skip
        """`values [M]`; `dhidden` is w for every row."""
        weight = output.rows()  # [1, D]
        values = (hidden.astype(mx.float32) @ weight.T)[:, 0]
        nothing = mx.zeros(values.shape)
        unit = mx.broadcast_to(weight, hidden.shape) if grad else None
        return TokenLogprobs(nothing, lse=nothing, values=values, dhidden=unit)

    def output_gradients(
        self, hidden: mx.array, targets: mx.array, output: Output, dlogprobs: mx.array, lse: mx.array, *,
        traced: bool = False,
    ) -> Gradients:  # fmt: skip
        """d loss / d w from d loss / d value, which comes as `dlogprobs`."""
        return {NAME: (dlogprobs[:, None] * hidden.astype(mx.float32)).sum(axis=0, keepdims=True)}

    def save(self, params: Params, folder: Path) -> None:
        with atomic.writing(folder / FILE) as part:
            mx.save_safetensors(f"{part}.safetensors", dict(params), metadata={"format": "mlx"})
            Path(f"{part}.safetensors").replace(part)

    @classmethod
    def claims(cls, folder: Path) -> bool:
        """Whether an adapter folder holds a reward head's weights."""
        return (folder / FILE).exists()

    @classmethod
    def from_folder(cls, folder: Path, model: Model) -> tuple[Reward, Params]:
        """Raises CheckpointError for a file that is damaged or of another model."""
        found, width = open_weights(folder, FILE), model.output.rows(0, 1).shape[1]
        if set(found) != {NAME} or found[NAME].shape != (1, width):
            held = ", ".join(f"{name} {list(value.shape)}" for name, value in found.items()) or "nothing"
            raise CheckpointError(f"{folder / FILE} holds {held}; the model needs {NAME} [1, {width}]")
        return cls(), _put(model, found[NAME].astype(mx.float32))


def _put(model: Model, weight: mx.array) -> Params:
    """The weight as a part of the model, behind all others."""
    part = Part("")
    part.score = nn.Linear(weight.shape[1], 1, bias=False)
    model.parts = [*model.parts, part]
    model.invalidate()
    model.bind({NAME: weight})
    return {NAME: weight}

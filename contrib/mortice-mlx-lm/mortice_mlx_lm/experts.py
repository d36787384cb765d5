"""mlx-lm's mixtures of experts over mortice's stacks of matrices: packed or not, frozen or with an adapter."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mortice.linear import Stacked


def own_experts(outer: nn.Module) -> None:
    """mortice's stacks in the experts of a model."""
    for module in outer.modules():
        kind = OWN.get(type(module))
        if kind is None:
            continue
        for name in kind.stacks:
            count, outputs, inputs = module[name].weight.shape
            module[name] = Stacked(count, inputs, outputs, bias="bias" in module[name])
        module.__class__ = kind


class _Sorted:
    """Rows go through their experts in the experts' order."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """`x [..., D]`, `indices [..., k]` → `[..., k, D]`."""
        chosen = mx.stop_gradient(indices).flatten()  # [N·k]
        order = mx.argsort(chosen)
        rows = x.reshape(-1, x.shape[-1])[order // indices.shape[-1]]
        out = self.through(rows, chosen[order])[mx.argsort(order)]
        return out.reshape(*indices.shape, out.shape[-1])

    def through(self, rows: mx.array, which: mx.array) -> mx.array:
        raise NotImplementedError


class GLU(_Sorted, SwitchGLU):
    stacks = ("gate_proj", "up_proj", "down_proj")

    def through(self, rows: mx.array, which: mx.array) -> mx.array:
        up, gate = self.up_proj(rows, which), self.gate_proj(rows, which)
        return self.down_proj(self.activation(up, gate), which)


class MLP(_Sorted, SwitchMLP):
    stacks = ("fc1", "fc2")

    def through(self, rows: mx.array, which: mx.array) -> mx.array:
        return self.fc2(self.activation(self.fc1(rows, which)), which)


OWN = {SwitchGLU: GLU, SwitchMLP: MLP}

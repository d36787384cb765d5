"""The mixture of experts of Gemma 4: an exact router, and experts as stacked matrices `[E, out, in]`.

The product of each token with its experts' matrices is a gathered one (`mx.gather_mm`), so that no expert runs on a
token that did not choose it and no matrix is copied. What this leaves out: packed experts, a load-balancing loss.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mortice.elementwise import geglu
from mortice.linear import Linear, on_cpu
from mortice_plugins.models.gemma4_config import Gemma4Config


class Router(nn.Module):
    """Which experts a token goes to, and with what weights: softmax over all in float32, the largest, renormalised."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        assert config.experts is not None
        self._chosen, self._eps = config.experts.chosen, config.eps
        self.proj = Linear(config.hidden, config.experts.count)
        self.scale = mx.ones((config.hidden,))
        self.per_expert_scale = mx.ones((config.experts.count,))

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """`x [T, D]` → (experts `[T, k]`, weights `[T, k]` float32)."""
        x = mx.fast.rms_norm(x, None, self._eps) * self.scale.astype(x.dtype) * x.shape[1] ** -0.5
        probabilities = mx.softmax(self.proj(x).astype(mx.float32), axis=-1)  # [T, E]
        ranked = mx.argpartition(-mx.stop_gradient(probabilities), self._chosen - 1, axis=-1)
        chosen = ranked[:, : self._chosen]
        weights = mx.take_along_axis(probabilities, chosen, axis=-1)
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return chosen, weights * self.per_expert_scale[chosen]


class Experts(nn.Module):
    """Gated MLPs, stacked; gate and up are one matrix, gate first."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        assert config.experts is not None
        count, width = config.experts.count, config.experts.intermediate
        self.gate_up_proj = mx.zeros((count, 2 * width, config.hidden))
        self.down_proj = mx.zeros((count, config.hidden, width))

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """`x [T, D]`, experts and weights `[T, k]` → `[T, D]`."""
        tokens, each = chosen.shape
        order = mx.argsort(chosen.flatten())  # token and choice, expert by expert
        experts = chosen.flatten()[order]
        gate, up = mx.split(gathered(x[order // each], self.gate_up_proj, experts), 2, axis=-1)
        y = gathered(geglu(gate, up), self.down_proj, experts)  # [T k, D]
        y = y[mx.argsort(order)].reshape(tokens, each, -1)
        return (y * weights[..., None].astype(y.dtype)).sum(axis=1)


class Routed(nn.Module):
    """Router, norm and experts as one function of the residual stream; holds what belongs to a block."""

    def __init__(self, router: nn.Module, norm: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.norm, self.experts = router, norm, experts

    def __call__(self, h: mx.array) -> mx.array:
        return self.experts(self.norm(h), *self.router(h))


def gathered(x: mx.array, matrices: mx.array, which: mx.array) -> mx.array:
    """Rows times their matrices' transposes: `x [N, in]`, `matrices [E, out, in]`, rising `which [N]` → `[N, out]`.

    On the CPU matrices that are not float32 are cast on the fly, forward and backward; those get no gradient.
    """
    if on_cpu() and matrices.dtype != mx.float32:
        return _cast_product(x, matrices, which)
    return _product(x, matrices.swapaxes(1, 2), which)


def _product(x: mx.array, matrices: mx.array, which: mx.array) -> mx.array:
    return mx.gather_mm(x[:, None], matrices, rhs_indices=which, sorted_indices=True)[:, 0]


def _cast_product(x: mx.array, matrices: mx.array, which: mx.array) -> mx.array:
    def floats(after: mx.array) -> mx.array:
        """The matrices, not before `after` is there, as in `mortice.linear.float32_product`."""
        return mx.depends([matrices], [after])[0].astype(mx.float32)

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return _product(x, floats(x).swapaxes(1, 2), which)

    @product.vjp
    def product_vjp(primals: Any, cotangent: mx.array, _: Any) -> mx.array:
        return _product(cotangent, floats(cotangent), which)

    y: Any = product(x.astype(mx.float32))
    return y.astype(x.dtype)

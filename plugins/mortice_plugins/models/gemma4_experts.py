"""The mixture of experts of Gemma 4: an exact router, and experts as stacked matrices `[E, out, in]`.

The product of each token with its experts' matrices is a gathered one (`mx.gather_mm`), so that no expert runs on a
token that did not choose it and no matrix is copied. What this leaves out: a load-balancing loss.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mortice.elementwise import geglu
from mortice.linear import Linear, Stacked
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


class GatedStack(nn.Module):
    """Gated MLPs of one shape, under the names that mlx-lm gives their matrices."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        assert config.experts is not None
        count, width = config.experts.count, config.experts.intermediate
        self.gate_proj = Stacked(count, config.hidden, width)
        self.up_proj = Stacked(count, config.hidden, width)
        self.down_proj = Stacked(count, width, config.hidden)

    def __call__(self, x: mx.array, which: mx.array) -> mx.array:
        """`x [N, D]`, rising `which [N]` → `[N, D]`."""
        return self.down_proj(geglu(self.gate_proj(x, which), self.up_proj(x, which)), which)


class Experts(nn.Module):
    """The experts of a layer: each token through those that its router chose."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        self.switch_glu = GatedStack(config)

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """`x [T, D]`, experts and weights `[T, k]` → `[T, D]`."""
        tokens, each = chosen.shape
        order = mx.argsort(chosen.flatten())  # token and choice, expert by expert
        y = self.switch_glu(x[order // each], chosen.flatten()[order])  # [T k, D]
        y = y[mx.argsort(order)].reshape(tokens, each, -1)
        return (y * weights[..., None].astype(y.dtype)).sum(axis=1)


class Routed(nn.Module):
    """Router, norm and experts as one function of the residual stream; holds what belongs to a block."""

    def __init__(self, router: nn.Module, norm: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.norm, self.experts = router, norm, experts

    def __call__(self, h: mx.array) -> mx.array:
        return self.experts(self.norm(h), *self.router(h))

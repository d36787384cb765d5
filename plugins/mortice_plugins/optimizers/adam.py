"""Adam and AdamW of `mlx.optimizers`, with bias correction on.

MLX leaves it off by default, and then the first update is (1 − β₁)/√(1 − β₂) = 3.16 times the learning rate.
"""

from __future__ import annotations

from typing import Any

import mlx.optimizers
from attrs import field, frozen

from mortice.options import ge, gt, option


def _betas(instance: Any, attribute: Any, value: tuple[float, ...]) -> None:
    if len(value) != 2 or not all(0 <= b < 1 for b in value):
        raise ValueError(f"'betas' must be two numbers in [0, 1), found {list(value)}")


def _pair(help: str) -> Any:
    return field(default=(0.9, 0.999), kw_only=True, converter=tuple, validator=_betas, metadata={"help": help})


@frozen
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101) and bias correction."""

    learning_rate: float = option(1e-5, help="peak learning rate", validator=gt(0))
    betas: tuple[float, ...] = _pair("decay of the first and second moment")
    eps: float = option(1e-8, help="added to the root of the second moment", validator=gt(0))
    weight_decay: float = option(0.0, help="decay a step, times the learning rate", validator=ge(0))
    bias_correction: bool = option(True, help="divide the moments by 1 − βᵗ")

    def build(self) -> mlx.optimizers.Optimizer:
        return mlx.optimizers.AdamW(
            self.learning_rate, list(self.betas), self.eps, self.weight_decay, bias_correction=self.bias_correction
        )


@frozen
class Adam:
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) with bias correction."""

    learning_rate: float = option(1e-5, help="peak learning rate", validator=gt(0))
    betas: tuple[float, ...] = _pair("decay of the first and second moment")
    eps: float = option(1e-8, help="added to the root of the second moment", validator=gt(0))
    bias_correction: bool = option(True, help="divide the moments by 1 − βᵗ")

    def build(self) -> mlx.optimizers.Optimizer:
        return mlx.optimizers.Adam(self.learning_rate, list(self.betas), self.eps, bias_correction=self.bias_correction)

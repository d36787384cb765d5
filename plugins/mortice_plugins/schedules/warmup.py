"""Learning rates: a linear warmup, then one of three ways down.

Optimizer steps are counted from 0. Warmup step k of W runs at peak · (k + 1) / W, so the first step is never wasted
on a rate of zero, and the last step of a run still trains: the decay would reach its end one step after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attrs import frozen

from mortice.errors import ConfigError
from mortice.options import fraction, option

WARMUP_HELP = "an integer: steps; a number below 1: share of the run"
FINAL_HELP = "share of the peak that the decay ends at"


def _warmup(instance: Any, attribute: Any, value: float) -> None:
    if not (0 <= value < 1 or (isinstance(value, int) and value >= 1)):
        raise ValueError(f"'warmup' must be whole steps (as an integer) or a share of the run below 1, found {value!r}")


def _with_warmup(
    warmup: int | float, peak: float, total: int, decay: Callable[[float], float]
) -> Callable[[int], float]:
    """`decay` maps progress in [0, 1) after the warmup to a share of the peak. Raises ConfigError where W > total."""
    # Rounded first, since 0.07 · 100 is 7.000000000000001.
    steps = warmup if isinstance(warmup, int) else math.ceil(round(warmup * total, 6))
    if steps > total:
        raise ConfigError(f"schedule.warmup: {steps} steps, but the run has only {total}")

    def rate(step: int) -> float:
        if step < steps:
            return peak * (step + 1) / steps
        return peak * decay((step - steps) / max(1, total - steps))

    return rate


@frozen
class Constant:
    """Warm up, then the peak."""

    warmup: int | float = option(0, help=WARMUP_HELP, validator=_warmup)

    def build(self, peak: float, total: int, /) -> Callable[[int], float]:
        return _with_warmup(self.warmup, peak, total, lambda _: 1.0)


@frozen
class Linear:
    """Warm up, then a straight line down to `final` times the peak."""

    warmup: int | float = option(0, help=WARMUP_HELP, validator=_warmup)
    final: float = option(0.0, help=FINAL_HELP, validator=fraction)

    def build(self, peak: float, total: int, /) -> Callable[[int], float]:
        return _with_warmup(self.warmup, peak, total, lambda p: 1 - (1 - self.final) * p)


@frozen
class Cosine:
    """Warm up, then a half cosine down to `final` times the peak (Loshchilov & Hutter 2017, arXiv:1608.03983)."""

    warmup: int | float = option(0, help=WARMUP_HELP, validator=_warmup)
    final: float = option(0.0, help=FINAL_HELP, validator=fraction)

    def build(self, peak: float, total: int, /) -> Callable[[int], float]:
        return _with_warmup(
            self.warmup, peak, total, lambda p: self.final + (1 - self.final) * (1 + math.cos(math.pi * p)) / 2
        )

"""A weight of the preference term that steers itself by what it does to the chosen answers.

A preference term may raise its margin by making both answers less likely ("likelihood displacement": Razin et al.
2024, arXiv:2410.08847; Pal et al. 2024, arXiv:2402.13228). Validation shows it: the mean log-probability of a chosen
answer's tokens (`lw`) falls. So the weight grows while `lw` holds, shrinks once `lw` has fallen, waits until it is
back, and goes to its least for good where that does not help.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from mortice.errors import ConfigError
from mortice.options import and_, ge, gt, le, option


@frozen
class AdaptiveLambda:
    """The weight of ORPO's odds term (λ, `loss.beta`), from validation to validation.

    Let fall be how far `lw` lies below its highest value in this run, in nats a token.

        fall > tolerance                 λ shrinks by `back_off`, and holds until `lw` is back
        fall > tolerance / 2, and backing off   λ stays (hysteresis)
        else                             λ grows by `ramp`, up to `highest`, unless `lw − lr` is beyond `enough`
        fall > stop, or `patience` validations of falling in a row     λ is `lowest` from then on

    λ is set to `start` before the first step. It needs validation data. Each change is logged as
    `adaptive-lambda/loss.beta`.
    """

    start: float = option(0.1, help="λ before the first step", validator=gt(0.0))
    lowest: float = option(0.02, help="least λ, and its value after a hard stop", validator=ge(0.0))
    highest: float = option(1.0, help="most λ", validator=gt(0.0))
    ramp: float = option(1.5, help="factor while the chosen log-probability holds", validator=ge(1.0))
    back_off: float = option(0.5, help="factor once it has fallen", validator=and_(gt(0.0), le(1.0)))
    tolerance: float = option(0.02, help="nats a token that it may lie below its best", validator=gt(0.0))
    stop: float = option(0.2, help="nats a token below its best at which λ goes to lowest for good", validator=gt(0.0))
    patience: int = option(3, help="validations of falling in a row that do the same", validator=ge(1))
    enough: float = option(10.0, help="lw − lr from which on λ grows no further", validator=gt(0.0))
    option: str = option("loss.beta", help="the option that is changed, as a dotted key")

    def __attrs_post_init__(self) -> None:
        if not self.lowest <= self.start <= self.highest:
            raise ValueError(f"start {self.start} must lie between lowest {self.lowest} and highest {self.highest}")
        if self.stop <= self.tolerance:
            raise ValueError(f"stop {self.stop} must be above tolerance {self.tolerance}")

    def __call__(
        self, step: int, metrics: Mapping[str, float], state: Mapping[str, Any], /
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Raises ConfigError where validation has no `lw` and `lr`."""
        lacking = [name for name in ("lw", "lr") if name not in metrics]
        if lacking:
            raise ConfigError(f"adaptive-lambda goes by {' and '.join(lacking)}, which this loss's validation has not")
        chosen, rejected = metrics["lw"], metrics["lr"]
        if not state:
            begun = {"lambda": self.start, "best": chosen, "falling": 0, "backing_off": False, "stopped": False}
            return {self.option: self.start}, begun
        best = state["best"] if math.isnan(chosen) else max(state["best"], chosen)
        found = dict(state) | {"best": best} | self._next(best - chosen, chosen - rejected, state)
        changed = found["lambda"] != state["lambda"]
        return ({self.option: found["lambda"]} if changed else {}), found

    def _next(self, fall: float, margin: float, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What changes of the state. `fall` is NaN where validation was."""
        value = state["lambda"]
        if state["stopped"]:
            return {}
        if not fall <= self.tolerance:
            falling = state["falling"] + 1
            if not fall <= self.stop or falling >= self.patience:
                return {"lambda": self.lowest, "falling": falling, "stopped": True}
            return {"lambda": max(self.lowest, value * self.back_off), "falling": falling, "backing_off": True}
        if state["backing_off"] and fall > self.tolerance / 2:
            return {"falling": 0}
        grown = value if margin >= self.enough else min(self.highest, value * self.ramp)
        return {"lambda": grown, "falling": 0, "backing_off": False}

"""The epilogue of one tile of logits: what lies between the two products of `flash-cce`, plain and as one kernel.

Raw logits `[t, v]` and the running state of each row go in; the new state, the factor by which the accumulator
`Σ e^(z − peak) slope W` shrinks, and the weights that the second product multiplies come out. The kernel reads the
logits twice and writes the weights once, where the plain form makes a pass for each operation. It leaves the products
to MLX.

Online softmax: Milakov and Gimelshein, 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import mlx.core as mx
import numpy as np
from attrs import frozen

from mortice.kernels import Kernel, Shape, verified
from mortice.linear import on_cpu
from mortice.model import Output

MODES = ("auto", "on", "off")
THREADS = 256
FEWEST = 8
"""Tokens in a tile for the kernel. MLX hands smaller arrays to Metal in another address space: a second kernel."""


@frozen(eq=False)
class State:
    """What is known of each of `t` tokens after some blocks of the vocabulary."""

    peak: mx.array
    """`[t]` maximum of the logits."""
    total: mx.array
    """`[t]` Σ e^(z − peak)."""
    target: mx.array
    """`[t]` raw logit of the target."""
    spread: mx.array | None = None
    """`[t]` Σ e^(z − peak) (z − peak), where entropy is asked for."""

    @classmethod
    def start(cls, count: int, *, entropy: bool) -> State:
        zeros = mx.zeros((count,))
        return cls(mx.full((count,), mx.finfo(mx.float32).min), zeros, zeros, zeros if entropy else None)

    def arrays(self) -> list[mx.array]:
        return [a for a in (self.peak, self.total, self.target, self.spread) if a is not None]


@frozen(eq=False)
class Step:
    """What a tile makes of a state."""

    state: State
    rescale: mx.array
    """`[t]` e^(old peak − new peak), by which what was summed before shrinks."""
    weights: mx.array | None
    """`[t, v]` e^(z − peak) · slope, where the gradient is asked for."""


class Epilogue(Protocol):
    """`plain` or `fused`. `raw [t, v]` are logits of the vocabulary from `start` on; `output` caps and tempers them."""

    def __call__(
        self, state: State, raw: mx.array, targets: mx.array, start: int, output: Output, *, grad: bool
    ) -> Step: ...


def plain(state: State, raw: mx.array, targets: mx.array, start: int, output: Output, *, grad: bool) -> Step:
    """In MLX operations, anywhere."""
    z = output.finish(raw)
    peak = mx.maximum(state.peak, z.max(axis=1))
    shift = state.peak - peak
    rescale = mx.exp(shift)
    z = z - peak[:, None]
    weights = mx.exp(z)
    spread = state.spread
    if spread is not None:
        spread = rescale * (spread + shift * state.total) + (weights * z).sum(axis=1)
    total = rescale * state.total + weights.sum(axis=1)
    place = targets - start
    inside = (place >= 0) & (place < raw.shape[1])
    found = mx.take_along_axis(raw, mx.where(inside, place, 0)[:, None], axis=1).squeeze(1)
    after = State(peak, total, mx.where(inside, found, state.target), spread)
    return Step(after, rescale, sloped(weights, raw, output) if grad else None)


def sloped(x: mx.array, raw: mx.array, output: Output) -> mx.array:
    """x · slope, `[t, v]`; no array is made of a slope that is 1 everywhere."""
    return x if output.softcap is None and output.temperature == 1.0 else x * output.slope(raw)


KERNEL = Kernel(
    name="flash_cce_tile",
    inputs=("raw", "targets", "start", "knobs", "peak", "total", "target", "spread"),
    outputs=("new_peak", "new_total", "new_target", "new_spread", "rescale", "weights"),
    body="""
// The row's logits are those of one token. knobs: soft cap (0 for none), temperature.
const int width = raw_shape[1];
const size_t base = size_t(group) * size_t(width);
const float softcap = knobs[0];
const float temperature = knobs[1];

SHARED(float, highest, THREADS);
SHARED(float, sums, THREADS);
SHARED(float, spreads, THREADS);

// The highest raw logit gives the highest finished one: soft cap and temperature keep the order.
float high = -3.402823466e+38f;
for (int i = lane; i < width; i += THREADS) {
  const float x = raw[base + i];
  high = x > high ? x : high;
}
highest[lane] = high;
BARRIER();
for (int reach = THREADS / 2; reach > 0; reach /= 2) {
  if (lane < reach && highest[lane + reach] > highest[lane]) {
    highest[lane] = highest[lane + reach];
  }
  BARRIER();
}
high = highest[0];
high = (softcap > 0.0f ? softcap * TANH(high / softcap) : high) / temperature;
const float before = peak[group];
const float top = high > before ? high : before;

float sum = 0.0f;
float tilted = 0.0f;
for (int i = lane; i < width; i += THREADS) {
  const float x = raw[base + i];
  const float bent = softcap > 0.0f ? TANH(x / softcap) : 0.0f;
  const float z = (softcap > 0.0f ? softcap * bent : x) / temperature - top;
  const float weight = EXP(z);
  sum += weight;
  tilted += weight * z;
  if (GRAD) {
    weights[base + i] = weight * (1.0f - bent * bent) / temperature;
  }
}
sums[lane] = sum;
spreads[lane] = tilted;
BARRIER();
for (int reach = THREADS / 2; reach > 0; reach /= 2) {
  if (lane < reach) {
    sums[lane] = sums[lane] + sums[lane + reach];
    spreads[lane] = spreads[lane] + spreads[lane + reach];
  }
  BARRIER();
}

if (lane == 0) {
  const float shift = before - top;
  const float factor = EXP(shift);
  const int place = targets[group] - start[0];
  const bool inside = place >= 0 && place < width;
  new_peak[group] = top;
  new_total[group] = factor * total[group] + sums[0];
  new_spread[group] = factor * (spread[group] + shift * total[group]) + spreads[0];
  new_target[group] = inside ? raw[base + (inside ? place : 0)] : target[group];
  rescale[group] = factor;
}
""",
)

Launch = Callable[..., list[mx.array]]


def fused(
    state: State, raw: mx.array, targets: mx.array, start: int, output: Output, *, grad: bool, launch: Launch = KERNEL
) -> Step:
    """In one kernel, on a GPU; tiles of fewer than 8 tokens go through `plain`. `launch` runs the kernel."""
    count, width = raw.shape
    if count < FEWEST:
        return plain(state, raw, targets, start, output, grad=grad)
    spread = state.total if state.spread is None else state.spread  # any [t] array will do: what it gives is dropped
    knobs = mx.array([output.softcap or 0.0, output.temperature], dtype=mx.float32)
    inputs = [raw, targets.astype(mx.int32), mx.array([start], dtype=mx.int32), knobs, state.peak, state.total]
    shapes: list[Shape] = [(count,)] * 5 + [(count, width) if grad else (1,)]
    peak, total, target, new_spread, rescale, weights = launch(
        [*inputs, state.target, spread], shapes, groups=count, threads=THREADS, GRAD=grad
    )
    after = State(peak, total, target, None if state.spread is None else new_spread)
    return Step(after, rescale, weights if grad else None)


def epilogue(mode: str) -> Epilogue:
    """The form to use on MLX's device, for a mode of `MODES`; the kernel is checked at its first use on a GPU.

    `auto` falls back to `plain` with a warning where the kernel is wrong there; `on` raises TrainingError.
    """
    return plain if mode == "off" or on_cpu() else checked(required=mode == "on")


@cache
def checked(*, required: bool) -> Epilogue:
    """`fused` where it is right on this device; checked once in a process."""
    return verified(KERNEL.name, fused, plain, trial, required=required)


def trial(step: Epilogue) -> Sequence[mx.array]:
    """Everything that two blocks of 300 and 41 logits of 9 tokens give, with and without soft cap and gradient."""
    rng = np.random.default_rng(0)
    raw = mx.array(20.0 * rng.standard_normal((9, 341), dtype=np.float32))  # [9, V]
    targets = mx.array([0, 40, 299, 300, 301, 340, 7, 128, 256], dtype=mx.int32)
    found: list[mx.array] = []
    for output in (_named(None, 1.0), _named(30.0, 0.7)):
        for grad in (False, True):
            state = State.start(9, entropy=True)
            for start, stop in ((0, 300), (300, 341)):
                done = step(state, raw[:, start:stop], targets, start, output, grad=grad)
                state = done.state
                found += [state.peak, state.total, state.target, state.spread, done.rescale]
                found += [done.weights] if grad else []
    return found


def _named(softcap: float | None, temperature: float) -> Output:
    """An output that is asked only for soft cap and temperature."""
    return Output(mx.zeros((0, 0)), "trial", softcap=softcap, temperature=temperature)

"""The epilogue of one tile of logits: what lies between the two products of `flash-cce`, as one kernel.

Its plain twin is `mlx_tiles.advance`. The kernel reads the logits twice and writes the weights once, where the twin
makes a pass for each operation. It leaves the products to MLX.

Online softmax: Milakov and Gimelshein, 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import mlx.core as mx
import numpy as np

from mortice.kernels import Kernel, Shape, verified
from mortice.linear import on_cpu
from mortice.model import Output
from mortice_plugins.heads.mlx_tiles import Advance, Running, advance

MODES = ("auto", "on", "off")
THREADS = 256
FEWEST = 8
"""Tokens in a tile for the kernel. MLX hands smaller arrays to Metal in another address space: a second kernel."""


KERNEL = Kernel(
    name="flash_cce_tile",
    inputs=("raw", "place", "knobs", "peak", "total", "target", "spread"),
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
  const bool inside = place[group] >= 0 && place[group] < width;
  new_peak[group] = top;
  new_total[group] = factor * total[group] + sums[0];
  new_spread[group] = factor * (spread[group] + shift * total[group]) + spreads[0];
  new_target[group] = inside ? raw[base + place[group]] : target[group];
  rescale[group] = factor;
}
""",
)

Launch = Callable[..., list[mx.array]]


def fused(
    raw: mx.array, place: mx.array, before: Running, output: Output, *, grad: bool = True, launch: Launch = KERNEL
) -> tuple[Running, mx.array, mx.array]:
    """`advance` in one kernel, on a GPU; tiles of fewer than 8 tokens go through `advance` itself.

    Without `grad` no weights are written; what stands in their place holds nothing. `launch` runs the kernel.
    """
    count, width = raw.shape
    if count < FEWEST:
        return advance(raw, place, before, output)
    spread = before.total if before.spread is None else before.spread  # any [t] array will do: its result is dropped
    knobs = mx.array([output.softcap or 0.0, output.temperature], dtype=mx.float32)
    inputs = [raw, place.astype(mx.int32), knobs, before.peak, before.total, before.target, spread]
    shapes: list[Shape] = [(count,)] * 5 + [(count, width) if grad else (1,)]
    peak, total, target, spread, rescale, weights = launch(inputs, shapes, groups=count, threads=THREADS, GRAD=grad)
    return Running(peak, total, target, None if before.spread is None else spread), weights, rescale


def epilogue(mode: str, *, grad: bool) -> Advance:
    """The form to use on MLX's device, for a mode of `MODES`; the kernel is checked at its first use on a GPU.

    `auto` falls back to `advance` with a warning where the kernel is wrong there; `on` raises TrainingError.
    """
    return advance if mode == "off" or on_cpu() else checked(grad=grad, required=mode == "on")


@cache
def checked(*, grad: bool, required: bool) -> Advance:
    """`fused` where it is right on this device; checked once in a process."""
    return verified(KERNEL.name, partial(fused, grad=grad), advance, partial(trial, grad=grad), required=required)


def trial(form: Advance, *, grad: bool = True) -> Sequence[mx.array]:
    """Everything that two blocks of 300 and 41 logits of 9 tokens give, with and without soft cap and temperature."""
    rng = np.random.default_rng(0)
    raw = mx.array(20.0 * rng.standard_normal((9, 341), dtype=np.float32))  # [9, V]
    targets = mx.array([0, 40, 299, 300, 301, 340, 7, 128, 256], dtype=mx.int32)
    found: list[mx.array] = []
    for output in (_named(None, 1.0), _named(30.0, 0.7)):
        running = Running.start(9, entropy=True)
        for start, stop in ((0, 300), (300, 341)):
            running, weights, rescale = form(raw[:, start:stop], targets - start, running, output)
            found += [*running.arrays(), rescale, *([weights] if grad else [])]
    return found


def _named(softcap: float | None, temperature: float) -> Output:
    """An output that is asked only for soft cap and temperature."""
    return Output(mx.zeros((0, 0)), "trial", softcap=softcap, temperature=temperature)

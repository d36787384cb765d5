"""The kernel of `flash-cce`, on the CPU: against its plain twin, without each of its barriers, and through compilers."""

from __future__ import annotations

import re
import shutil
import subprocess
import warnings
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve

from mortice.errors import TrainingError
from mortice.kernels import Kernel, verified
from mortice.model import Output
from mortice.testing.kernels import KernelFault, cuda_text, emulate, metal_text
from mortice_plugins.heads.kernels import tile

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ not found")
THREADS = tile.THREADS
ORDERS = {
    "forward": np.arange(THREADS),
    "reverse": np.arange(THREADS)[::-1],
    "random": np.random.default_rng(3).permutation(THREADS),
}
every_order = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())


def on_emulator(inputs, shapes, *, kernel=tile.KERNEL, order=None, **launch):
    """Stands where the kernel is launched on a GPU."""
    arrays = [np.asarray(x) for x in inputs]
    return [mx.array(x) for x in emulate(kernel, arrays, shapes, order=order, **launch)]


def emulated(order=None, kernel=tile.KERNEL):
    return partial(tile.fused, launch=partial(on_emulator, order=order, kernel=kernel))


def output(softcap=None, temperature=1.0):
    return Output(mx.zeros((0, 0)), "head.weight", softcap=softcap, temperature=temperature)


def run(step, raw, targets, width, settings, *, grad=True, entropy=True):
    """All blocks of `raw [t, V]`, `width` columns each: the last step and what each left."""
    state, left = tile.State.start(raw.shape[0], entropy=entropy), []
    for start in range(0, raw.shape[1], width):
        done = step(state, raw[:, start : start + width], targets, start, settings, grad=grad)
        state = done.state
        left += [state.peak, state.total, state.target, done.rescale]
        left += [state.spread] if entropy else []
        left += [done.weights] if grad else []
    return left


def assert_same(found, expected, tolerance=1e-5):
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected)):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        assert (np.abs(a - b) <= tolerance * np.maximum(1.0, np.abs(b))).all(), f"array {i}"


def draw(tokens=9, vocab=611, scale=8.0, seed=0):
    rng = np.random.default_rng(seed)
    raw = mx.array(scale * rng.standard_normal((tokens, vocab), dtype=np.float32))
    return raw, mx.array(rng.integers(0, vocab, tokens).astype(np.int32))


@needs_gxx
@every_order
@pytest.mark.parametrize(
    "settings",
    [output(), output(softcap=30.0), output(temperature=0.7), output(softcap=5.0, temperature=2.0)],
    ids=["plain", "soft-cap", "temperature", "both"],
)
def test_kernel_agrees_with_its_twin(settings, order):
    """Blocks of 300, 300 and 11 logits: more than the threads, and fewer."""
    raw, targets = draw()
    assert_same(run(emulated(order), raw, targets, 300, settings), run(tile.plain, raw, targets, 300, settings))


@needs_gxx
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_what_is_not_asked_for_is_not_there(grad, entropy):
    raw, targets = draw()
    start = tile.State.start(9, entropy=entropy)
    done = emulated()(start, raw, targets, 0, output(), grad=grad)
    assert (done.weights is not None, done.state.spread is not None) == (grad, entropy)
    asked = {"grad": grad, "entropy": entropy}
    assert_same(run(emulated(), raw, targets, 256, output(), **asked), run(tile.plain, raw, targets, 256, output(), **asked))


@needs_gxx
@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_far_logits(level):
    """Rows at ±10⁴ whose best logit stands 10⁴ above the others, in the second block."""
    raw = np.full((8, 40), level, np.float32)
    raw[:, 33] += 1e4
    targets = mx.array([33, 0, 39, 33, 1, 2, 3, 4], dtype=mx.int32)
    found = run(emulated(), mx.array(raw), targets, 32, output())
    assert_same(found, run(tile.plain, mx.array(raw), targets, 32, output()))
    peak, total = found[-6:-4]
    assert peak.tolist() == [level + 1e4] * 8
    assert total.tolist() == [1.0] * 8


@needs_gxx
def test_by_hand():
    """Logits 0 and 0, then ln 2 and −∞ as good as: totals 2, then 2 · ½ + 1; weights 1, 1, then 1, 0."""
    raw = mx.array([[0.0, 0.0, float(np.log(2)), -1e4]] * 8)
    first = emulated()(tile.State.start(8, entropy=True), raw[:, :2], mx.zeros((8,)), 0, output(), grad=True)
    second = emulated()(first.state, raw[:, 2:], mx.full((8,), 3), 2, output(), grad=True)
    assert first.state.total.tolist() == [2.0] * 8
    assert first.weights.tolist() == [[1.0, 1.0]] * 8
    assert np.allclose(second.rescale, 0.5)
    assert np.allclose(second.state.total, 2.0)
    assert np.allclose(second.state.spread, -np.log(2))  # ½ · (0 + −ln 2 · 2) + 1 · 0
    assert second.state.target.tolist() == [-1e4] * 8
    assert np.allclose(second.weights, [[1.0, 0.0]] * 8)


@needs_gxx
def test_small_tiles_go_through_the_twin():
    raw, targets = draw(tokens=7)
    step = partial(tile.fused, launch=lambda *_, **__: pytest.fail("the kernel was launched"))
    assert_same(run(step, raw, targets, 300, output()), run(tile.plain, raw, targets, 300, output()))


BARRIERS = [m.start() for m in re.finditer(r"BARRIER\(\);", tile.KERNEL.body)]


@needs_gxx
@every_order
@pytest.mark.parametrize("place", BARRIERS, ids=lambda place: f"line-{tile.KERNEL.body[:place].count(chr(10))}")
def test_every_barrier_is_needed(place, order):
    body = tile.KERNEL.body
    without = evolve(tile.KERNEL, body=body[:place] + body[place:].replace("BARRIER();", "", 1))
    raw, targets = draw()
    with pytest.raises(KernelFault, match="no barrier between"):
        run(emulated(order, without), raw, targets, 300, output())

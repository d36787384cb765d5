"""The kernel of `flash-cce` on the CPU: its plain twin, the loss of each barrier, compilers; when it is trusted."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve

from mortice.errors import TrainingError
from mortice.kernels import Kernel, verified
from mortice.linear import on_cpu
from mortice.model import Output
from mortice.testing import HeadCase
from mortice.testing.kernels import KernelFault, cuda_text, emulate, metal_text
from mortice_plugins.heads import flash_cce
from mortice_plugins.heads.dense import Dense
from mortice_plugins.heads.flash_cce import FlashCCE
from mortice_plugins.heads.kernels import tile
from mortice_plugins.heads.mlx_tiles import Running, advance

ROOT = Path(__file__).resolve().parent.parent
needs_gxx = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="the emulator needs Linux and g++"
)
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


def run(form, raw, targets, width, settings, *, grad=True, entropy=True):
    """All blocks of `raw [t, V]`, `width` columns each: what each left."""
    running, left = Running.start(raw.shape[0], entropy=entropy), []
    for start in range(0, raw.shape[1], width):
        running, weights, rescale = form(raw[:, start : start + width], targets - start, running, settings)
        left += [*running.arrays(), rescale, *([weights] if grad else [])]
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
    assert_same(run(emulated(order), raw, targets, 300, settings), run(advance, raw, targets, 300, settings))


@needs_gxx
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_what_is_not_asked_for_is_not_made(grad, entropy):
    raw, targets = draw()
    form = partial(emulated(), grad=grad)
    running, weights, _ = form(raw, targets, Running.start(9, entropy=entropy), output())
    assert weights.shape == ((9, 611) if grad else (1,))
    assert (running.spread is not None) == entropy
    asked = {"grad": grad, "entropy": entropy}
    found = run(form, raw, targets, 256, output(), **asked)
    assert_same(found, run(advance, raw, targets, 256, output(), **asked))


@needs_gxx
@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_far_logits(level):
    """Rows at ±10⁴ whose best logit stands 10⁴ above the others, in the second block."""
    raw = np.full((8, 40), level, np.float32)
    raw[:, 33] += 1e4
    targets = mx.array([33, 0, 39, 33, 1, 2, 3, 4], dtype=mx.int32)
    found = run(emulated(), mx.array(raw), targets, 32, output())
    assert_same(found, run(advance, mx.array(raw), targets, 32, output()))
    peak, total = found[-6:-4]
    assert peak.tolist() == [level + 1e4] * 8
    assert total.tolist() == [1.0] * 8


@needs_gxx
def test_by_hand():
    """Logits 0 and 0, then ln 2 and −10⁴: totals 2, then 2 · ½ + 1; weights 1, 1, then 1, 0."""
    raw = mx.array([[0.0, 0.0, float(np.log(2)), -1e4]] * 8)
    first, weights, _ = emulated()(raw[:, :2], mx.zeros((8,)), Running.start(8, entropy=True), output())
    assert first.total.tolist() == [2.0] * 8
    assert weights.tolist() == [[1.0, 1.0]] * 8
    second, weights, rescale = emulated()(raw[:, 2:], mx.ones((8,)), first, output())
    assert np.allclose(rescale, 0.5)
    assert np.allclose(second.total, 2.0)
    assert np.allclose(second.spread, -np.log(2))  # ½ · (0 − ln 2 · 2) + 1 · 0
    assert second.target.tolist() == [-1e4] * 8
    assert np.allclose(weights, [[1.0, 0.0]] * 8)


def test_small_tiles_go_through_the_twin():
    raw, targets = draw(tokens=7)
    form = partial(tile.fused, launch=lambda *_, **__: pytest.fail("the kernel was launched"))
    assert_same(run(form, raw, targets, 300, output()), run(advance, raw, targets, 300, output()))


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


def probe(body, *, inputs=("x",), outputs=("y",)):
    return Kernel("probe", inputs, outputs, body)


@needs_gxx
def test_emulator_runs_every_thread_of_every_group():
    """Two groups of three threads, each writes 10 · its group + its index + x."""
    kernel = probe("y[group * THREADS + lane] = x[lane] + 10 * group + lane;")
    (y,) = emulate(kernel, [np.array([0.5, 0.0, 0.0], np.float32)], [(2, 3)], groups=2, threads=3)
    assert y.tolist() == [[0.5, 1.0, 2.0], [10.5, 11.0, 12.0]]


@needs_gxx
def test_the_example_of_the_docs():
    page = (ROOT / "docs" / "kernels.md").read_text("utf-8")
    example = page[page.index("from mortice.kernels import Kernel") : page.index("(y,) = row_sum")]
    names = {}
    exec(example, names)
    x = np.arange(200, dtype=np.float32).reshape(2, 100)
    (y,) = emulate(names["row_sum"], [x], [(2,)], groups=2, threads=64, order=range(63, -1, -1))
    assert y.tolist() == [4950.0, 14950.0]


@needs_gxx
def test_emulator_leaves_nan_where_nothing_was_written():
    shared = "SHARED(float, s, 4); y[1] = s[lane];"
    (y,) = emulate(probe(shared), [np.zeros(1, np.float32)], [(3,)], groups=1, threads=1)
    assert np.isnan(y).all()


@needs_gxx
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y[lane] = x[lane + 1];", r"x\[3\] is outside its 3 elements"),
        ("y[lane - 1] = 0.0f;", r"thread 0: y\[-1\] is outside its 3 elements"),
        ("SHARED(int, s, 2); s[lane] = 0;", r"s\[2\] is outside its 2 elements"),
        ("if (lane > 0) BARRIER(); y[lane] = 0.0f;", "2 threads wait at a barrier that 1 never reach"),
        ("SHARED(float, s, 1); s[0] = lane;", r"thread 1: s\[0\] is written, and was written by thread 0"),
        ("SHARED(float, s, 1); if (lane == 0) s[0] = 1.0f; y[lane] = s[0];", r"s\[0\] is read, and was written by"),
        ("SHARED(float, s, 1); float a = s[0]; if (lane == 2) s[0] = a;", r"s\[0\] is written, and was read by"),
    ],
)
def test_emulator_finds(body, message):
    with pytest.raises(KernelFault, match=message):
        emulate(probe(body), [np.zeros(3, np.float32)], [(3,)], groups=1, threads=3)


@needs_gxx
def test_emulator_says_what_does_not_compile():
    with pytest.raises(ValueError, match=r"probe:1:.*nowhere"):
        emulate(probe("y[0] = nowhere;"), [np.zeros(3, np.float32)], [(3,)], groups=1, threads=3)


def test_emulator_refuses_other_types():
    with pytest.raises(ValueError, match="float32, int32, uint32; found float64"):
        emulate(probe("y[0] = 0;"), [np.zeros(3)], [(3,)], groups=1, threads=3)


def kernel_inputs(tokens):
    """As `fused` hands them over."""
    running = [np.zeros(tokens, np.float32)] * 4
    return [np.zeros((tokens, 300), np.float32), np.zeros(tokens, np.int32), np.zeros(2, np.float32), *running]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc not found")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("grad", [False, True])
def test_nvcc_compiles_the_kernel(arch, grad, tmp_path):
    source, ptx = tmp_path / "kernel.cu", tmp_path / "kernel.ptx"
    source.write_text(cuda_text(tile.KERNEL, kernel_inputs(8), threads=THREADS, GRAD=grad))
    subprocess.run(["nvcc", "-ptx", f"-arch={arch}", "-Werror=all-warnings", source, "-o", ptx], check=True)
    text = ptx.read_text()
    assert f".target {arch}" in text
    assert f"{tile.KERNEL.unique_name}" in text
    assert text.count("bar.sync") >= len(BARRIERS)
    assert ".local" not in text  # no arrays in slow memory


METAL_SPACES = """
#include <stddef.h>
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup static __attribute__((address_space(3)))
#define half reserved
struct uint3 { unsigned x, y, z; };
namespace metal {
enum class mem_flags { mem_threadgroup };
void threadgroup_barrier(mem_flags);
namespace precise { float exp(float); float tanh(float); }
}
"""
"""What Metal's address spaces and library are to another C++ compiler."""


def metal_errors(kernel, tokens, folder):
    """What clang says of the kernel's text in Metal, as instantiated for float32."""
    source = folder / "kernel.cpp"
    text = metal_text(kernel, kernel_inputs(tokens), threads=THREADS, GRAD=True)
    instance = f"{kernel.unique_name}<{THREADS}, true>"
    source.write_text(f"{METAL_SPACES}{text}\ntemplate decltype({instance}) {instance};\n")
    flags = ["-std=c++14", "-fsyntax-only", "-Wno-unknown-attributes"]
    done = subprocess.run(["clang++", *flags, source], capture_output=True, text=True)
    return done.stderr if done.returncode else ""


needs_clang = pytest.mark.skipif(shutil.which("clang++") is None, reason="clang++ not found")


@needs_clang
@pytest.mark.parametrize("tokens", [1, 8])
def test_metal_address_spaces(tokens, tmp_path):
    assert metal_errors(tile.KERNEL, tokens, tmp_path) == ""


@needs_clang
def test_a_plain_pointer_is_no_metal(tmp_path):
    bad = evolve(tile.KERNEL, body="const float* p = peak; new_peak[group] = p[group] + raw_shape[0];")
    assert "'const float *'" in metal_errors(bad, 8, tmp_path)


def test_metal_text_puts_small_inputs_into_constant_memory():
    text = metal_text(tile.KERNEL, kernel_inputs(8), threads=THREADS, GRAD=True)
    assert "const device float* peak [[buffer(4)]]" in text
    assert "const constant float* knobs [[buffer(3)]]" in text
    assert "const constant int* raw_shape [[buffer(1)]]" in text
    assert "uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]" in text


def test_the_name_follows_the_text():
    """MLX keeps compiled CUDA kernels on disk under their names: another text needs another."""
    other = evolve(tile.KERNEL, body=tile.KERNEL.body + " ")
    assert other.unique_name != tile.KERNEL.unique_name
    assert evolve(other, body=tile.KERNEL.body).unique_name == tile.KERNEL.unique_name


def doubled_total(*args):
    running, weights, rescale = advance(*args)
    return evolve(running, total=2 * running.total), weights, rescale


def not_a_number(*args):
    running, weights, rescale = advance(*args)
    return running, weights, rescale * float("nan")


def transposed_weights(*args):
    running, weights, rescale = advance(*args)
    return running, weights.T, rescale


def does_not_compile(*_, **__):
    raise RuntimeError("Failed to compile kernel: line 7.")


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (doubled_total, "array 1 of its trial is off by"),
        (not_a_number, "array 4 of its trial is off by nan"),
        (transposed_weights, r"has shape \[300, 9\], its plain twin gives \[9, 300\]"),
        (does_not_compile, "it raised RuntimeError: Failed to compile kernel: line 7"),
    ],
    ids=["wrong", "nan", "shape", "raises"],
)
def test_a_kernel_that_is_wrong_on_the_device_is_not_used(form, reason):
    with pytest.warns(RuntimeWarning, match=f"'probe' cannot be used on .*{reason}"):
        assert verified("probe", form, advance, tile.trial) is advance
    with pytest.raises(TrainingError, match=reason):
        verified("probe", form, advance, tile.trial, required=True)


@needs_gxx
def test_a_kernel_that_is_right_is_used():
    form = emulated()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verified("probe", form, advance, tile.trial) is form


@pytest.fixture
def gpu(monkeypatch):
    """As if MLX ran on a GPU that launches kernels in this way."""

    def pretend(launch):
        monkeypatch.setattr(tile, "on_cpu", lambda: False)
        monkeypatch.setattr(tile, "fused", partial(tile.fused, launch=launch))

    tile.checked.cache_clear()
    yield pretend
    tile.checked.cache_clear()


@needs_gxx
@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.parametrize("grad", [False, True])
def test_on_a_gpu_the_kernel_is_used(gpu, mode, grad):
    launched = []
    gpu(lambda *args, **launch: launched.append(launch["GRAD"]) or on_emulator(*args, **launch))
    form = tile.epilogue(mode, grad=grad)
    assert form is not advance
    assert set(launched) == {grad}
    assert tile.epilogue(mode, grad=grad) is form
    assert tile.epilogue("off", grad=grad) is advance


def test_on_a_gpu_a_broken_kernel_warns_once(gpu):
    gpu(does_not_compile)
    with pytest.warns(RuntimeWarning, match="flash_cce_tile") as shown:
        assert tile.epilogue("auto", grad=True) is advance
        assert tile.epilogue("auto", grad=True) is advance
    assert len(shown) == 1
    with pytest.raises(TrainingError, match="flash_cce_tile"):
        tile.epilogue("on", grad=True)


@needs_gxx
def test_the_head_goes_through_the_kernel(gpu):
    launched = []
    gpu(lambda *args, **launch: launched.append(launch["groups"]) or on_emulator(*args, **launch))
    case = HeadCase("kernel", tokens=27, vocab=500, softcap=30.0, temperature=0.7, scale=5.0)
    expected = Dense().score(*case.draw(), grad=True, entropy=True)
    tile.epilogue("auto", grad=True)  # the check at first use
    launched.clear()
    found = FlashCCE(backend="mlx", token_tile=16, vocab_tile=300).score(*case.draw(), grad=True, entropy=True)
    assert launched == [16, 11, 16, 11]
    for name in ("logprobs", "lse", "entropy", "dhidden"):
        assert_same([getattr(found, name)], [getattr(expected, name)], 1e-4)
    launched.clear()
    FlashCCE(backend="mlx", kernel="off").score(*case.draw())
    assert launched == []


@pytest.mark.skipif(not on_cpu(), reason="MLX runs on a GPU")
def test_insisting_on_the_kernel_on_the_cpu_is_an_error():
    with pytest.raises(ValueError, match=r"'kernel' is 'on', but MLX runs on the CPU here .* Metal and CUDA"):
        FlashCCE(kernel="on")


def test_kernel_and_numpy_exclude_each_other(monkeypatch):
    monkeypatch.setattr(flash_cce, "on_cpu", lambda: False)
    assert FlashCCE(kernel="on").kernel == "on"
    with pytest.raises(ValueError, match="backend = 'numpy'"):
        FlashCCE(kernel="on", backend="numpy")
    with pytest.raises(ValueError, match="kernel"):
        FlashCCE(kernel="metal")


@pytest.mark.parametrize("mode", tile.MODES)
def test_on_the_cpu_the_kernel_is_never_used(monkeypatch, mode):
    monkeypatch.setattr(tile, "on_cpu", lambda: True)
    assert tile.epilogue(mode, grad=True) is advance


@pytest.mark.skipif(not (mx.metal.is_available() or mx.cuda.is_available()), reason="no GPU")
def test_on_this_gpu():
    with mx.stream(mx.gpu):
        assert verified("flash_cce_tile", tile.fused, advance, tile.trial, required=True) is tile.fused

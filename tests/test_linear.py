"""Linear layers and embeddings over stored weights, against plain float32 products."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mortice import linear, staging
from mortice.linear import Embedding, Linear, Quantization, QuantizedEmbedding, QuantizedLinear, Stacked, quantized
from mortice.model import Output

AFFINE = [Quantization(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FLOATING = [Quantization(4, 32, "mxfp4"), Quantization(4, 16, "nvfp4"), Quantization(8, 32, "mxfp8")]


def normal(seed, *shape):
    return mx.random.normal(shape, key=mx.random.key(seed))


def pack(weight: mx.array, q: Quantization) -> dict[str, mx.array]:
    parts = mx.quantize(weight, group_size=q.group_size, bits=q.bits, mode=q.mode)
    return dict(zip(("weight", "scales", "biases"), parts))


def value_and_gradient(layer, x, cotangent):
    value, gradient = mx.vjp(layer, [x], [cotangent])
    return value[0], gradient[0]


def close(a, b, tolerance=1e-5):
    return mx.abs(a - b).max().item() <= tolerance * mx.abs(b).max().item()


def assert_equals_plain(layer, weight, tolerance=1e-5):
    """Value and gradient of `layer` are those of `x @ weight.T`."""
    x, cotangent = normal(1, 5, weight.shape[1]), normal(2, 5, weight.shape[0])
    found = value_and_gradient(layer, x, cotangent)
    assert close(found[0], x @ weight.T, tolerance)
    assert close(found[1], cotangent @ weight, tolerance)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_float_weight_of_any_type_multiplies_in_float32(dtype):
    layer = Linear(64, 48)
    layer.weight = normal(0, 48, 64).astype(dtype)
    assert (layer.inputs, layer.outputs) == (64, 48)
    assert layer(normal(1, 5, 64)).dtype == mx.float32
    assert_equals_plain(layer, layer.weight.astype(mx.float32))


def test_by_hand_with_bias():
    layer = Linear(2, 2, bias=True)
    layer.weight = mx.array([[1.0, 2.0], [3.0, 4.0]]).astype(mx.bfloat16)
    layer.bias = mx.array([10.0, 20.0])
    assert layer(mx.array([[1.0, -1.0]])).tolist() == [[9.0, 19.0]]


def test_activations_keep_their_type():
    layer = Linear(32, 8)
    layer.weight = normal(0, 8, 32).astype(mx.bfloat16)
    assert layer(normal(1, 3, 32).astype(mx.bfloat16)).dtype == mx.bfloat16


def test_a_float32_weight_has_a_gradient():
    layer, x = Linear(4, 3), normal(1, 2, 4)

    def total(weight):
        layer.weight = weight
        return layer(x).sum()

    gradient = mx.grad(total)(normal(0, 3, 4))
    assert close(gradient, mx.broadcast_to(x.sum(axis=0), (3, 4)))


@pytest.mark.parametrize("q", AFFINE + FLOATING, ids=lambda q: f"{q.mode}-{q.bits}-{q.group_size}")
@pytest.mark.parametrize("on_cpu", [True, False], ids=["dequantize", "quantized-matmul"])
def test_a_packed_weight_equals_its_floats(monkeypatch, q, on_cpu):
    monkeypatch.setattr(linear, "on_cpu", lambda: on_cpu)
    packed = pack(normal(0, 48, 128), q)
    layer = quantized(Linear(128, 48), q)
    assert {n: a.shape for n, a in layer.parameters().items()} == {n: a.shape for n, a in packed.items()}
    dict.update(layer, packed)
    assert (layer.inputs, layer.outputs) == (128, 48)
    weight = q.dequantize(packed["weight"], packed["scales"], packed.get("biases"))
    assert_equals_plain(layer, weight)


def test_a_packed_weight_with_bias():
    q = Quantization(4, 32)
    layer = QuantizedLinear(32, 2, q, bias=True)
    dict.update(layer, pack(mx.zeros((2, 32)), q))
    layer.bias = mx.array([1.0, 2.0])
    assert layer(mx.ones((1, 32))).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("kind", ["bfloat16", "packed"])
def test_no_float32_weight_is_kept_for_the_backward(kind):
    """64 layers of 512 × 512, 1 MiB each in float32: the plain form keeps all of them, here a dozen are alive at most
    (MLX runs a few operations ahead), however many layers there are."""
    layers, plain, q, mebi = [], [], Quantization(4, 64), 2**20
    for i in range(64):
        weight = 0.04 * normal(i, 512, 512)
        if kind == "packed":
            layer = quantized(Linear(512, 512), q)
            dict.update(layer, pack(weight, q))
            plain.append(lambda x, s=layer: x @ q.dequantize(s.weight, s.scales, s.biases).T)
        else:
            layer = Linear(512, 512)
            layer.weight = weight.astype(mx.bfloat16)
            plain.append(lambda x, s=layer: x @ s.weight.astype(mx.float32).T)
        mx.eval(layer.parameters())
        layers.append(layer)
    x = normal(100, 4, 512)
    mx.eval(x)

    def peak(chain) -> tuple[float, mx.array]:
        def total(x):
            for layer in chain:
                x = mx.tanh(layer(x))
            return x.sum()

        before = mx.get_active_memory()
        mx.reset_peak_memory()
        gradient = mx.grad(total)(x)
        mx.eval(gradient)
        return (mx.get_peak_memory() - before) / mebi, gradient

    (held, expected), (found, gradient) = peak(plain), peak(layers)
    assert close(gradient, expected)
    assert held > 60
    assert found < 20


def test_embeddings_look_rows_up():
    table, ids = normal(0, 10, 64), mx.array([3, 9, 3])
    plain = Embedding(10, 64)
    plain.weight = table
    assert mx.array_equal(plain(ids), table[ids])
    q = Quantization(8, 32)
    packed = quantized(plain, q)
    assert isinstance(packed, QuantizedEmbedding) and packed.shape == (10, 64)
    dict.update(packed, pack(table, q))
    rows = q.dequantize(packed.weight, packed.scales, packed.biases)[ids]
    assert mx.array_equal(packed(ids), rows)
    assert close(rows, table[ids], 0.02)


def test_half_precision_scales_round_nothing_on_the_cpu():
    """As mlx-community stores them: rows are unpacked in float32, not rounded to the type of the scales."""
    weight = mx.random.normal((64, 128), key=mx.random.key(0))
    packed, scales, biases = mx.quantize(weight, group_size=64, bits=8)
    scales, biases = scales.astype(mx.bfloat16), biases.astype(mx.bfloat16)
    codes = np.array(mx.view(packed, mx.uint8)).reshape(64, 128).astype(np.float64)
    s, b = (np.repeat(np.array(x.astype(mx.float32), dtype=np.float64), 64, axis=1) for x in (scales, biases))
    want = codes * s + b
    rows = Quantization(8, 64).dequantize(packed, scales, biases)
    assert np.abs(np.array(rows, dtype=np.float64) - want).max() < 1e-6
    output = Output(packed, "lm_head.weight", scales, biases, 64, 8)
    assert np.abs(np.array(output.rows(), dtype=np.float64) - want).max() < 1e-6


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_few_rows_meet_packed_weights_as_they_are(rows):
    """Decoding multiplies packed weights, training unpacks them: the same product and gradient."""
    q = Quantization(4, 32)
    layer = QuantizedLinear(64, 96, q)
    packed = mx.quantize(mx.random.normal((96, 64), key=mx.random.key(1)), group_size=32, bits=4)
    layer.weight, layer.scales, layer.biases = packed
    x = mx.random.normal((rows, 64), key=mx.random.key(2))
    plain = q.dequantize(*packed)
    assert mx.abs(layer(x) - x @ plain.T).max().item() < 1e-4
    gradient = mx.grad(lambda x: mx.square(layer(x)).sum())(x)
    want = mx.grad(lambda x: mx.square(x @ plain.T).sum())(x)
    assert mx.abs(gradient - want).max().item() < 1e-3 * mx.abs(want).max().item()
    output = Output(*packed[:1], "lm_head.weight", *packed[1:], 32, 4)
    assert mx.abs(output.project(x) - x @ plain.T).max().item() < 1e-4


@pytest.mark.parametrize("rows", [(0,), (2, 1, 1), (3, 0)])
def test_short_rows_of_nvfp4(rows):
    """MLX's CPU unpacks an even number of groups only; here each row has three."""
    q = FLOATING[1]
    weight = normal(0, 4, 48)
    table = quantized(Embedding(4, 48), q)
    dict.update(table, pack(weight, q))
    whole = q.dequantize(table.weight, table.scales)
    assert mx.abs(whole - weight).max().item() < 0.2 * mx.abs(weight).max().item()
    ids = mx.array(rows)
    assert mx.array_equal(table(ids), whole[ids])
    assert mx.array_equal(table(ids[None]), whole[ids[None]])
    output = Output(table.weight, "w", table.scales, None, q.group_size, q.bits, q.mode)
    assert mx.array_equal(output.take(ids), whole[ids])
    x = normal(1, len(rows), 48)
    assert close(output.project(x, 1, 4), x @ whole[1:].T.astype(mx.float32), 1e-5)
    assert close(output.pull(x[:, :3], 1, 4), x[:, :3] @ whole[1:].astype(mx.float32), 1e-5)


# Stacks


def _apart(a, b) -> float:
    return mx.abs(a - b).max().item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_stack_equals_a_loop(dtype):
    keys = mx.random.split(mx.random.key(0), 3)
    x, seed = mx.random.normal((6, 4), key=keys[0]), mx.random.normal((6, 3), key=keys[1])
    matrices, which = mx.random.normal((5, 3, 4), key=keys[2]).astype(dtype), [0, 0, 2, 2, 2, 4]

    def stacked(weight):
        module = Stacked(5, 4, 3)
        module.weight = weight
        return module

    def loop(x, matrices):
        return [mx.stack([x[i] @ matrices[e].astype(mx.float32).T for i, e in enumerate(which)])]

    (found,), dx = mx.vjp(lambda x: [stacked(matrices)(x, mx.array(which))], [x], [seed])
    (expected,), pulled = mx.vjp(loop, [x, matrices], [seed])
    assert _apart(found, expected) < 1e-5
    assert _apart(dx[0], pulled[0]) < 1e-5
    if dtype == mx.float32:
        _, (_, dmatrices) = mx.vjp(lambda *p: [stacked(p[1])(p[0], mx.array(which))], [x, matrices], [seed])
        assert _apart(dmatrices, pulled[1]) < 1e-5


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("q", [Quantization(4, 32), Quantization(8, 32), *FLOATING], ids=str)
def test_a_packed_stack_equals_its_floats(q, rows):
    """Few rows meet packed matrices as they are, many unpacked ones."""
    keys = mx.random.split(mx.random.key(0), 3)
    x, which = mx.random.normal((rows, 32), key=keys[0]), mx.sort(mx.random.randint(0, 3, (rows,), key=keys[1]))
    parts = mx.quantize(mx.random.normal((3, 8, 32), key=keys[2]), group_size=q.group_size, bits=q.bits, mode=q.mode)
    floats, packed = Stacked(3, 32, 8), quantized(Stacked(3, 32, 8), q)
    floats.weight = q.dequantize(*parts, *[None] * (3 - len(parts)))
    dict.update(packed, dict(zip(("weight", "scales", "biases"), parts)))
    assert packed.shape == (3, 8, 32)
    seed = mx.ones((rows, 8))
    (found,), (dx,) = mx.vjp(lambda x: [packed(x, which)], [x], [seed])
    (expected,), (pulled,) = mx.vjp(lambda x: [floats(x, which)], [x], [seed])
    assert _apart(found, expected) < 1e-4
    assert _apart(dx, pulled) < 1e-4


@pytest.mark.parametrize("q", [Quantization(4, 32), *FLOATING, None], ids=str)
def test_a_stack_goes_matrix_by_matrix_outside_traces(q):
    """And unpacks only those that rows go to: 1 and 3 of four. `None`: matrices in bfloat16."""
    keys = mx.random.split(mx.random.key(0), 3)
    x, seed = mx.random.normal((40, 32), key=keys[0]), mx.random.normal((40, 8), key=keys[1])
    which = mx.array([1] * 25 + [3] * 15)
    floats = mx.random.normal((4, 8, 32), key=keys[2])
    module = Stacked(4, 32, 8) if q is None else quantized(Stacked(4, 32, 8), q)
    if q is None:
        module.weight = floats.astype(mx.bfloat16)
    else:
        parts = mx.quantize(floats, group_size=q.group_size, bits=q.bits, mode=q.mode)
        dict.update(module, dict(zip(("weight", "scales", "biases"), parts)))
        unpack, unpacked = module._unpack, []
        object.__setattr__(module, "_unpack", lambda *part: unpacked.append(part[0].shape) or unpack(*part))

    def function(x):
        return [module(mx.sin(x), which)]

    (expected,), (pulled,) = mx.vjp(function, [x], [seed])
    mx.eval(expected, pulled)
    if q is not None:
        assert unpacked == [module.weight.shape] * 2
        unpacked.clear()
    with staging.eagerly(keep=True) as tape:
        (found,) = function(x)
    (dx,) = staging.vjp(function, [x], [seed], tape)
    assert _apart(found, expected) < 1e-4
    assert _apart(dx, pulled) < 1e-4
    if q is not None:
        assert unpacked == [module.weight.shape[1:]] * 4


def test_rows_of_a_batch_are_counted_as_rows(monkeypatch):
    """Many tokens are unpacked once and multiplied in float32, also as `[1, T, in]`."""
    q = Quantization(4, 32)
    layer = QuantizedLinear(64, 48, q)
    layer.update(pack(normal(0, 48, 64), q))
    x, rows, real = normal(1, 5, 64), [], linear.float32_product
    monkeypatch.setattr(linear, "float32_product", lambda x, *rest: rows.append(x.shape) or real(x, *rest))
    assert mx.array_equal(layer(x[None])[0], layer(x))
    assert rows == ([(1, 5, 64), (5, 64)] if linear.on_cpu() else [])
    layer(x[None, :1])
    assert len(rows) <= 2


@pytest.mark.parametrize("q", [None, Quantization(4, 32), Quantization(4, 32, "mxfp4")])
@pytest.mark.parametrize("rows", [3, 40])
def test_stacks_add_the_bias_of_each_rows_own(q, rows):
    plain, weight, bias = Stacked(4, 32, 8), normal(0, 4, 8, 32), normal(1, 4, 8)
    module = Stacked(4, 32, 8, bias=True)
    if q is not None:
        plain, module = quantized(plain, q), quantized(module, q)
    parts = {"weight": weight} if q is None else pack(weight, q)
    plain.update(parts)
    module.update(parts | {"bias": bias})
    x, which = normal(2, rows, 32), mx.arange(rows) * 4 // rows
    assert mx.abs(module(x, which) - plain(x, which) - bias[which]).max().item() < 1e-5

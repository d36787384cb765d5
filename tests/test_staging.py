"""Stages around eager operations give what one trace gives."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mortice import staging
from mortice.batch import Completion, Group, Row, Span
from mortice.context import SpanContext
from mortice.elementwise import geglu, swiglu
from mortice.rows import RowBuilder, lay_shared, shared_row
from mortice.staging import Tape


class Cube:
    """x³ in numpy; counts its runs."""

    worth_keeping = True

    def __init__(self) -> None:
        self.runs = 0

    def forward(self, *inputs):
        self.runs += 1
        return mx.array(np.asarray(inputs[0]) ** 3), None

    def backward(self, inputs, output, saved, cotangent):
        return [cotangent * 3 * inputs[0] ** 2]


def cubed(operation, x):
    tape = staging.current()
    return x**3 if tape is None else tape.perform(operation, x)


def twice(operation):
    """x, w → (w x)³ x and its cube's sum with w: two operations, and arrays used on both sides of them."""

    def function(x, w):
        once = cubed(operation, w * x)
        again = cubed(operation, once * x + w)
        return [again * w, once + x]

    return function


def close(found, expected, tolerance=1e-5) -> bool:
    top = max(mx.abs(expected).max().item(), 1e-6)
    return mx.abs(found - expected).max().item() <= tolerance * top


def test_two_operations_in_a_row():
    function, inputs = twice(Cube()), [mx.array([0.5, -1.0, 2.0]), mx.array([1.5, 0.3, -0.7])]
    seeds = [mx.array([1.0, -2.0, 0.5]), mx.array([0.1, 0.2, 0.3])]
    _, expected = mx.vjp(function, inputs, seeds)
    with staging.eagerly(keep=True) as tape:
        outputs = function(*inputs)
    assert all(close(o, e) for o, e in zip(outputs, function(*inputs)))
    found = staging.vjp(function, inputs, seeds, tape)
    assert all(close(f, e) for f, e in zip(found, expected))
    assert not tape.entries and staging.current() is None


def test_no_operation_runs_again_in_the_backward():
    operation = Cube()
    function, inputs = twice(operation), [mx.array([0.5]), mx.array([1.5])]
    with staging.eagerly(keep=True) as tape:
        function(*inputs)
    assert operation.runs == 2
    staging.vjp(function, inputs, [mx.array([1.0]), mx.array([1.0])], tape)
    assert operation.runs == 2


def test_what_an_earlier_run_kept_is_not_run_again():
    operation = Cube()
    function, inputs = twice(operation), [mx.array([0.5]), mx.array([1.5])]
    with staging.eagerly(keep_outputs=True) as first:
        function(*inputs)
    assert len(first.kept) == 2 and not first.entries
    with staging.eagerly(keep=True, earlier=first.kept) as tape:
        function(*inputs)
    assert operation.runs == 2 and len(tape.entries) == 2


def test_a_function_without_operations_is_one_trace():
    function, inputs = lambda x: [x * x], [mx.array([3.0])]
    with staging.eagerly(keep=True) as tape:
        function(*inputs)
    assert staging.vjp(function, inputs, [mx.array([1.0])], tape)[0].item() == 6.0


def test_a_tape_inside_another_is_its_own():
    with staging.eagerly() as outer:
        with staging.eagerly() as inner:
            assert staging.current() is inner
        assert staging.current() is outer


def rows() -> dict[str, Row]:
    """A plain row, one prompt with three answers, and two such trees in a row."""
    ids = [i % 13 for i in range(40)]
    pair = Group("a", ids[:17], [Completion(ids[:9]), Completion(ids[3:6]), Completion(ids[:1])])
    other = Group("b", ids[:5], [Completion(ids[5:20]), Completion(ids[2:9])])
    packed = RowBuilder()
    lay_shared(packed, pair, 0, prompt_targets=False)
    lay_shared(packed, other, 3, prompt_targets=False)
    plain = Row(ids, [Span(0, len(ids), None, 0)], [], [], [], [], [])
    return {"plain": plain, "shared": shared_row(pair, 0, prompt_targets=False), "packed": packed.row()}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [None, 0, 5])
@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("row", rows().values(), ids=rows())
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
def test_eager_attention_equals_its_traced_twin(row, window, chunk, heads, kv_heads, dtype):
    keys = mx.random.split(mx.random.key(1), 4)
    shapes = [(row.length, h, w) for h, w in ((heads, 8), (kv_heads, 8), (kv_heads, 6), (heads, 6))]
    q, k, v, seed = (mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys))
    ctx = SpanContext(row, attention_chunk=chunk)

    def attend(q, k, v):
        return [ctx.attend(q, k, v, scale=0.3, window=window)]

    with staging.eagerly(keep=True) as tape:
        (found,) = attend(q, k, v)
    pulled = staging.vjp(attend, [q, k, v], [seed], tape)
    (expected,), plain = mx.vjp(attend, [q, k, v], [seed])
    assert found.dtype == expected.dtype == dtype and [p.dtype for p in pulled] == [dtype] * 3
    tolerance = 1e-5 if dtype == mx.float32 else 2e-2
    assert all(close(f, e, tolerance) for f, e in zip([found, *pulled], [expected, *plain]))


@pytest.mark.parametrize(("glu", "plain"), [(swiglu, nn.silu), (geglu, nn.gelu_approx)], ids=["swiglu", "geglu"])
def test_gated_units_equal_mlx_and_their_eager_twins(glu, plain):
    gate, up, seed = (mx.random.normal((70, 11), key=key) * 9 for key in mx.random.split(mx.random.key(2), 3))
    gate[0, 0], gate[0, 1] = 200.0, -200.0
    function = lambda gate, up: [glu(gate, up)]  # noqa: E731
    with staging.eagerly(keep=True) as tape:
        (found,) = function(gate, up)
    pulled = staging.vjp(function, [gate, up], [seed], tape)
    (traced,), traced_pulled = mx.vjp(function, [gate, up], [seed])
    (expected,), expected_pulled = mx.vjp(lambda gate, up: [plain(gate) * up], [gate, up], [seed])
    for twin in ([found, *pulled], [traced, *traced_pulled]):
        assert all(close(f, e) for f, e in zip(twin, [expected, *expected_pulled]))
    assert all(mx.isfinite(x).all().item() for x in [found, *pulled])


def test_a_tape_that_keeps_nothing_holds_nothing():
    tape = Tape(keep=False)
    tape.perform(Cube(), mx.array([2.0]))
    assert not tape.entries


def test_one_array_twice_among_the_outputs_gets_both_cotangents():
    """What mx.vjp does not do: keys that are values too, a carry entry that another one shares."""
    x = mx.array([1.0, 2.0])

    def twice(x):
        y = x * x
        return [y, y.astype(mx.float32)]  # a cast to its own type is the same array

    (found,) = staging.pull(twice, [x], [mx.array([1.0, 1.0]), mx.array([2.0, 2.0])])
    assert found.tolist() == [6.0, 12.0]

    def attend(x):
        k = x * 0.5
        return [ctx.attend(x, k, k, scale=0.3) + swiglu(k, k)]

    ctx = SpanContext(rows()["shared"])
    x, seed = (mx.random.normal((ctx.row.length, 2, 4), key=mx.random.key(i)) for i in (0, 1))
    with staging.eagerly(keep=True) as tape:
        attend(x)
    (found,) = staging.vjp(attend, [x], [seed], tape)
    assert close(found, mx.vjp(attend, [x], [seed])[1][0])


def test_the_sum_over_the_output_is_not_rounded_in_half_precision():
    """With values far from 0, Σ dout · out of a rounded output would spoil dq and dk."""
    ctx = SpanContext(rows()["plain"])
    q, k, v, seed = (mx.random.normal((40, 2, 8), key=key) for key in mx.random.split(mx.random.key(5), 4))
    q, k, v, seed = (x.astype(mx.bfloat16).astype(mx.float32) for x in (q, k, v + 4.0, seed))

    def pulled(dtype):
        inputs = [x.astype(dtype) for x in (q, k, v)]
        attend = lambda *x: [ctx.attend(*x, scale=0.3)]  # noqa: E731
        with staging.eagerly(keep=True) as tape:
            attend(*inputs)
        return [x.astype(mx.float32) for x in staging.vjp(attend, inputs, [seed.astype(dtype)], tape)]

    def apart(a, b):
        return (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item()

    rounded, exact = pulled(mx.bfloat16), pulled(mx.float32)
    assert apart(rounded[0], exact[0]) < 5e-3 and apart(rounded[1], exact[1]) < 5e-3


def test_an_operation_inside_a_transform_of_the_block_says_so():
    with staging.eagerly(), pytest.raises(RuntimeError, match=r"runs eagerly .*mx\.compile"):
        mx.compile(swiglu)(mx.ones((2, 2)), mx.ones((2, 2)))

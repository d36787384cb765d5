"""The gated delta rule: chunks of tokens against one token at a time, and against its definition."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mortice_plugins.models.gated_delta import chunked, gated_delta, stepwise, unit_lower_inverse

SHAPES = [(1, 1, 1, 4, 4), (3, 2, 4, 8, 4), (64, 1, 2, 4, 8), (65, 2, 2, 8, 8), (150, 2, 6, 4, 4)]
"""(tokens, key heads, value heads, key width, value width)."""


def inputs(tokens, key_heads, value_heads, key_dim, value_dim) -> list[mx.array]:
    rng = np.random.default_rng(tokens)
    q, k = (rng.normal(size=(tokens, key_heads, key_dim)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -rng.exponential(0.3, (tokens, value_heads)), rng.uniform(0, 1, (tokens, value_heads))
    v, state = rng.normal(size=(tokens, value_heads, value_dim)), rng.normal(size=(value_heads, value_dim, key_dim))
    return [mx.array(x.astype(np.float32)) for x in (q, k, v, g, beta, state)]


def by_definition(q, k, v, g, beta, state) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, g, beta, s = (np.array(x, np.float64) for x in (q, k, v, g, beta, state))
    each, outs = v.shape[1] // k.shape[1], np.zeros_like(v)
    for t in range(len(v)):
        for h in range(v.shape[1]):
            key, query = k[t, h // each], q[t, h // each]
            s[h] *= np.exp(g[t, h])
            s[h] += beta[t, h] * np.outer(v[t, h] - s[h] @ key, key)
            outs[t, h] = s[h] @ query
    return outs, s


@pytest.mark.parametrize("form", [stepwise, chunked, gated_delta])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_its_definition(form, shape):
    arrays = inputs(*shape)
    for found, expected in zip(form(*arrays), by_definition(*arrays)):
        assert np.abs(np.array(found) - expected).max() < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_both_forms_agree(shape):
    arrays = inputs(*shape)
    seeds = [mx.random.normal(x.shape, key=mx.random.key(i)) for i, x in enumerate(stepwise(*arrays))]
    pulled = [mx.vjp(lambda *x, form=form: list(form(*x)), arrays, seeds)[1] for form in (stepwise, chunked)]
    for expected, found in zip(*pulled):
        assert mx.linalg.norm((found - expected).flatten()) <= 1e-5 * mx.linalg.norm(expected.flatten()) + 1e-7


@pytest.mark.parametrize("form", [stepwise, chunked])
def test_a_sequence_in_two_parts(form):
    *arrays, state = inputs(100, 1, 2, 4, 4)
    whole, last = form(*arrays, state)
    first, between = form(*(x[:37] for x in arrays), state)
    rest, end = form(*(x[37:] for x in arrays), between)
    assert mx.abs(mx.concatenate([first, rest]) - whole).max() < 1e-5
    assert mx.abs(end - last).max() < 1e-5


def test_no_state_is_zeros():
    *arrays, state = inputs(20, 1, 2, 4, 4)
    assert mx.array_equal(chunked(*arrays)[0], chunked(*arrays, mx.zeros_like(state))[0])


def test_the_result_has_the_type_of_the_values():
    arrays = inputs(20, 1, 2, 4, 4)
    for form in (stepwise, chunked):
        y, state = form(*arrays[:2], arrays[2].astype(mx.bfloat16), *arrays[3:])
        assert (y.dtype, state.dtype) == (mx.bfloat16, mx.float32)


def test_equal_keys_of_full_strength_stay_exact():
    """(I + A)⁻¹ has entries of 1, its series powers of 10¹⁷: a state that is overwritten by every token."""
    v = mx.random.normal((64, 1, 4), key=mx.random.key(0))
    k = mx.zeros((64, 1, 4)).at[:, :, 0].add(1.0)
    y, _ = chunked(k, k, v, mx.zeros((64, 1)), mx.ones((64, 1)))
    assert mx.abs(y - v).max() < 1e-5


def test_strong_decay_forgets_without_overflow():
    q, k, v, _, beta, state = inputs(64, 1, 2, 4, 4)
    arrays = (q, k, v, mx.full((64, 2), -200.0), beta, state)
    y, after = chunked(*arrays)
    expected, last = by_definition(*arrays)
    assert np.abs(np.array(y) - expected).max() < 1e-5
    assert np.abs(np.array(after) - last).max() < 1e-5
    pulled = mx.vjp(lambda *x: [chunked(*x)[0]], arrays, [mx.ones_like(y)])[1]
    assert all(mx.isfinite(x).all() for x in pulled)


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_inverse(size):
    a = np.tril(np.random.default_rng(0).normal(size=(3, size, size)), -1) / size
    found = unit_lower_inverse(mx.array(a.astype(np.float32)))
    assert np.abs(np.array(found) - np.linalg.inv(np.eye(size) + a)).max() < 1e-6


def test_memory_of_chunks_is_linear_in_length():
    def peak(tokens: int) -> int:
        arrays = inputs(tokens, 2, 4, 16, 16)
        seed = mx.ones_like(arrays[2])
        mx.eval(arrays, seed)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.vjp(lambda *x: [chunked(*x)[0]], arrays, [seed])[1])
        return mx.get_peak_memory() - before

    assert peak(2048) < 2.3 * peak(1024)

"""SpanContext against one dense masked softmax that is written out plainly."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mortice.attention import causal_attention
from mortice.batch import Row, Span
from mortice.context import Randomness, Run, SpanContext, runs


def row_of(*spans: Span) -> Row:
    length = spans[-1].stop
    return Row(np.zeros(length), spans, [], [], [], [], [])


CHAIN = row_of(Span(0, 5, None, 0, "g/prompt"), Span(5, 9, 0, 5, "g/0"))
SHARED = row_of(Span(0, 5, None, 0, "g/prompt"), Span(5, 9, 0, 5, "g/0"), Span(9, 12, 0, 5, "g/1"))
FOREST = row_of(
    Span(0, 3, None, 0), Span(3, 6, 0, 3), Span(6, 8, 0, 3), Span(8, 12, 2, 5),
    Span(12, 16, None, 0), Span(16, 18, 4, 4),
)  # fmt: skip


def dense_mask(row: Row, window: int | None) -> np.ndarray:
    """[T, T]: who sees whom, from the definition of a span."""
    where = [i for i, span in enumerate(row.spans) for _ in range(span.length)]
    position = np.concatenate([s.position + np.arange(s.length) for s in row.spans])

    def ancestors(i: int | None) -> set[int]:
        return set() if i is None else {i} | ancestors(row.spans[i].parent)

    mask = np.zeros((row.length, row.length), dtype=bool)
    for i in range(row.length):
        for j in range(row.length):
            near = window is None or position[i] - position[j] < window
            mask[i, j] = where[j] in ancestors(where[i]) and position[j] <= position[i] and near
    return mask


def dense(row: Row, q, k, v, scale: float, window: int | None = None):
    heads = q.shape[1] // k.shape[1]
    q, k, v = (x.swapaxes(0, 1) for x in (q, mx.repeat(k, heads, axis=1), mx.repeat(v, heads, axis=1)))
    scores = mx.where(mx.array(dense_mask(row, window)), scale * q @ k.swapaxes(1, 2), -1e9)
    return (mx.softmax(scores, axis=-1) @ v).swapaxes(0, 1)


def qkv(length: int, heads: int = 4, kv_heads: int = 2, dim: int = 8):
    keys = mx.random.split(mx.random.key(0), 3)
    shapes = ((length, heads, dim), (length, kv_heads, dim), (length, kv_heads, dim))
    return [mx.random.normal(s, key=k) for s, k in zip(shapes, keys)]


@pytest.mark.parametrize("window", [None, 2, 4, 100])
@pytest.mark.parametrize("chunk", [0, 2])
@pytest.mark.parametrize("row", [CHAIN, SHARED, FOREST], ids=["chain", "shared", "forest"])
@pytest.mark.parametrize("twin", ["products", "fused"])
def test_attention_equals_the_dense_mask_in_value_and_gradient(twin, row, chunk, window, monkeypatch):
    monkeypatch.setattr("mortice.attention.on_cpu", lambda: twin == "products")
    monkeypatch.setattr("mortice.attention.WINDOW_BLOCK", 3)
    arrays = qkv(row.length)
    weights = mx.random.normal((row.length, 4, 8), key=mx.random.key(1))
    ctx = SpanContext(row, attention_chunk=chunk)

    def fast(q, k, v):
        return (weights * ctx.attend(q, k, v, scale=0.3, window=window)).sum()

    def plain(q, k, v):
        return (weights * dense(row, q, k, v, 0.3, window)).sum()

    out, ref = ctx.attend(*arrays, scale=0.3, window=window), dense(row, *arrays, 0.3, window)
    assert mx.abs(out - ref).max().item() < 1e-5
    for a, b in zip(mx.grad(fast, argnums=(0, 1, 2))(*arrays), mx.grad(plain, argnums=(0, 1, 2))(*arrays)):
        assert mx.abs(a - b).max().item() < 1e-5


def test_a_window_is_shorter_than_the_path():
    row = row_of(Span(0, 12, None, 0))
    arrays = qkv(12)
    ctx = SpanContext(row)
    narrow, wide = (ctx.attend(*arrays, scale=0.3, window=w) for w in (3, None))
    assert mx.abs(narrow[:3] - wide[:3]).max().item() < 1e-6
    assert mx.abs(narrow[3:] - wide[3:]).max().item() > 1e-2


def test_runs_join_a_span_to_the_parent_it_follows():
    assert runs(CHAIN.spans) == [Run(0, 9, ())]
    assert runs(SHARED.spans) == [Run(0, 9, ()), Run(9, 12, ((0, 5),))]
    assert runs(FOREST.spans) == [Run(0, 6, ()), Run(6, 12, ((0, 3),)), Run(12, 18, ())]


@pytest.mark.parametrize("traditional", [False, True])
def test_rope_takes_positions_from_spans(traditional):
    x = mx.random.normal((SHARED.length, 2, 8), key=mx.random.key(3))
    got = SpanContext(SHARED).rope(x, 8, base=100.0, traditional=traditional)
    apart = [slice(0, 9), [*range(5), *range(9, 12)]]  # each completion behind the prompt, as a row of its own
    for index in apart:
        part = x[mx.array(np.arange(SHARED.length)[index])]
        alone = SpanContext(row_of(Span(0, part.shape[0], None, 0))).rope(part, 8, base=100.0, traditional=traditional)
        assert mx.abs(got[mx.array(np.arange(SHARED.length)[index])] - alone).max().item() < 1e-6


def test_rope_with_frequencies():
    x = mx.random.normal((SHARED.length, 2, 8), key=mx.random.key(3))
    freqs = mx.array([1.0, 10.0, 100.0, mx.inf])
    got = SpanContext(SHARED).rope(x, 8, freqs=freqs)
    assert mx.abs(got[5:8] - got[9:12]).max().item() > 0  # other values …
    same = mx.concatenate([x[:5], x[5:9], x[5:8]])
    got = SpanContext(SHARED).rope(same, 8, freqs=freqs)
    assert mx.array_equal(got[5:8], got[9:12])  # … but the same positions


def test_keyed_draws_do_not_depend_on_the_layout_and_change_with_every_name():
    own = row_of(Span(0, 5, None, 0, "g/prompt"), Span(5, 8, 0, 5, "g/1"))
    shared = SpanContext(SHARED, randomness=Randomness(0, 7)).uniform("m", 3)
    apart = SpanContext(own, randomness=Randomness(0, 7)).uniform("m", 3)
    assert mx.array_equal(shared[:5], apart[:5])
    assert mx.array_equal(shared[9:], apart[5:])
    others = [(Randomness(1, 7), "m"), (Randomness(0, 8), "m"), (Randomness(0, 7, 1), "m"), (Randomness(0, 7), "n")]
    for randomness, module in others:
        other = SpanContext(own, randomness=randomness).uniform(module, 3)
        assert not mx.array_equal(apart, other)
    assert SpanContext(own).uniform("m", 3) is None


def test_case_b47_mlp_chunks_keep_the_gradient_of_what_trains():
    import mlx.nn as nn

    module = nn.Linear(4, 4)
    row = row_of(Span(0, 7, None, 0))
    x = mx.random.normal((7, 4), key=mx.random.key(0))
    calls = []

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def __call__(self, x):
            calls.append(x.shape[0])
            return mx.tanh(self.inner(x))

    counted = Counted()

    def loss(weight, x, chunk):
        module.weight = weight
        ctx = SpanContext(row, mlp_chunk=chunk)
        ctx.trainable = frozenset({(id(module), "weight")})
        return mx.square(ctx.tokenwise(counted, x)).sum()

    weight = module.weight
    whole = mx.grad(loss, argnums=(0, 1))(weight, x, 0)
    assert calls == [7]
    chunked = mx.grad(loss, argnums=(0, 1))(weight, x, 3)
    assert calls[1:4] == [3, 3, 1]
    for a, b in zip(whole, chunked):
        assert mx.abs(a - b).max().item() < 1e-5
        assert mx.abs(a).max().item() > 0


def test_chunked_attention_holds_less_memory():
    q, k, v = (x.swapaxes(0, 1)[None] for x in qkv(1024, heads=4, kv_heads=4, dim=16))

    def peak(**kwargs) -> int:
        mx.clear_cache()
        mx.reset_peak_memory()
        base = mx.get_active_memory()
        mx.eval(mx.grad(lambda q: causal_attention(q, k, v, 0.25, **kwargs).sum())(q))
        return mx.get_peak_memory() - base

    whole = peak(chunk=0)
    assert peak(chunk=128) < whole / 2
    assert peak(window=128) < whole / 4


def test_chunks_draw_what_the_whole_row_draws():
    """Dropout inside a module that runs in chunks of tokens sees its own tokens' numbers."""
    import mlx.nn as nn

    from mortice.context import activate, current

    class Drop(nn.Module):
        def __call__(self, x):
            return x * (current().uniform("m", 3) > 0.5)

    x = mx.ones((SHARED.length, 3))
    outs = []
    for chunk in (0, 5):
        ctx = SpanContext(SHARED, mlp_chunk=chunk, randomness=Randomness(0, 1))
        with activate(ctx):
            outs.append(ctx.tokenwise(Drop(), x))
    assert mx.array_equal(*outs)
    assert 0 < outs[0].sum().item() < x.size


def test_a_recurrence_draws_what_the_whole_row_draws():
    """Dropout inside it sees the numbers of the tokens that it is at, also behind a branch."""
    from mortice.context import activate, current

    def drop(inputs, state):
        return inputs[0] * (current().uniform("m", 3) > 0.5), ()

    ctx = SpanContext(SHARED, randomness=Randomness(0, 1))
    x = mx.ones((SHARED.length, 3))
    with activate(ctx):
        assert mx.array_equal(ctx.scan(drop, x), ctx.uniform("m", 3) > 0.5)

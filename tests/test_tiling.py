"""The shape of a tile within a budget, and that tiles keep to it."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mortice.errors import ConfigError
from mortice.model import Output
from mortice_plugins.heads.flash_cce import FlashCCE
from mortice_plugins.heads.tiling import FILTER_BLOCK, TileCost, choose_tile, spans


def test_bytes_of_a_tile():
    """Two copies of 3 × 5 logits, 2 × 3 × 7 for the products, 5 × 7 output rows."""
    assert TileCost(width=7, logits=2).bytes(3, 5) == 4 * (2 * 15 + 42 + 35)
    assert TileCost(width=7, logits=2, filtered=True).bytes(3, 5) == 4 * (2 * 15 + 42 + 35 + 3 * (FILTER_BLOCK + 7))


def test_the_least_traffic_wins():
    """Of width 1 and 4,000 floats: 64 tokens would leave 59 vocabulary entries; 32 leave 119 and so on."""
    cost = TileCost(width=1)
    assert [cost.vocab_within(16_000, t) for t in (64, 32, 16)] == [59, 119, 233]
    assert min(1 / 64 + 3 / 59, 1 / 16 + 3 / 233) > 1 / 32 + 3 / 119
    assert choose_tile(16_000, 64, 10_000, cost) == (32, 119)


def test_a_vocabulary_is_cut_evenly():
    """1,000 entries go in three blocks of 334; aligned to 64 where the budget has room for that."""
    cost = TileCost(width=1)
    assert [cost.vocab_within(4 * floats, 1) for floats in (802, 682)] == [400, 340]
    assert choose_tile(4 * 802, 1, 1000, cost) == (1, 384)
    assert choose_tile(4 * 682, 1, 1000, cost) == (1, 340)


def test_everything_at_once_where_there_is_room():
    assert choose_tile(10**9, 100, 1000, TileCost(width=8)) == (100, 1000)


def test_one_side_may_be_set():
    cost = TileCost(width=1)
    assert choose_tile(16_000, 64, 10_000, cost, token_tile=16) == (16, 233)
    assert choose_tile(16_000, 64, 10_000, cost, vocab_tile=100) == ((4000 - 100) // 102, 100)
    assert choose_tile(16_000, 10, 50, cost, vocab_tile=9999) == (10, 50)


def test_every_shape_keeps_to_the_budget():
    for tokens in (1, 2, 33, 512, 8192):
        for vocab in (1, 101, 32_000, 262_144):
            for width in (1, 64, 5376):
                for logits in (1, 2, 12):
                    cost = TileCost(width, logits, filtered=logits == 2)
                    for budget in (100_000, 16_000_000):
                        t, v = choose_tile(budget, tokens, vocab, cost)
                        assert 1 <= t <= tokens and 1 <= v <= vocab
                        assert cost.bytes(t, v) <= budget


def test_too_small_a_budget_says_what_is_needed():
    with pytest.raises(ValueError, match=r"100 bytes are too few for a tile: the least takes 772 at width 64"):
        choose_tile(100, 33, 101, TileCost(width=64))


def test_spans():
    assert list(spans(7, 3)) == [(0, 3), (3, 6), (6, 7)]
    assert list(spans(0, 3)) == []


def inputs(tokens: int, vocab: int, width: int, dtype: mx.Dtype, softcap: float | None):
    hidden = mx.random.normal((tokens, width))
    output = Output(mx.random.normal((vocab, width)).astype(dtype), "head.weight", softcap=softcap)
    targets = mx.random.randint(0, vocab, (tokens,))
    mx.eval(hidden, output.weight, targets)
    return hidden, targets, output


@pytest.mark.parametrize("memory", ["1MB", "4MB"])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("backend", "traced", "eps"),
    [("numpy", False, 0.0), ("numpy", False, 1e-4), ("mlx", False, 0.0), ("mlx", False, 1e-4), ("mlx", True, 0.0)],
)
def test_the_peak_keeps_to_tile_memory(backend, traced, eps, dtype, softcap, memory):
    """Beside one tile there are only `dhidden`, its parts before they are joined, and vectors of one float a token."""
    tokens, width = 512, 32
    hidden, targets, output = inputs(tokens, 8192, width, dtype, softcap)
    head = FlashCCE(backend=backend, tile_memory=memory, eps=eps)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    scores = head.score(hidden, targets, output, grad=True, entropy=True, traced=traced)
    mx.eval(scores.logprobs, scores.entropy, scores.dhidden)
    peak = mx.get_peak_memory() - before
    budget = int(memory[0]) * 10**6
    assert peak <= budget + 4 * tokens * (3 * width + 16)
    assert peak >= budget / 3  # and the budget is used


def test_float_rows_of_one_block_at_a_time():
    """16 rows of 1,024 × 512 floats, 2 MiB each, made of a bfloat16 matrix; logits and hidden states are small."""
    hidden, targets, output = inputs(4, 16_384, 512, mx.bfloat16, None)
    for backend in ("numpy", "mlx"):
        head = FlashCCE(backend=backend, token_tile=4, vocab_tile=1024)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(head.score(hidden, targets, output, grad=True).dhidden)
        assert 2 * 2**20 <= mx.get_peak_memory() - before < 3 * 2**20, backend


def test_no_tile_fits():
    with pytest.raises(ConfigError, match=r'\[head\] tile_memory = "1kB": 1,000 bytes are too few .* at width 512'):
        FlashCCE(tile_memory="1kB").score(*inputs(4, 8, 512, mx.float32, None))


@pytest.mark.parametrize("memory", ["16", "16 pounds", "0MB"])
def test_tile_memory_is_checked(memory):
    with pytest.raises(ValueError, match="size"):
        FlashCCE(tile_memory=memory)


def test_three_ways_to_say_it_are_one_too_many():
    with pytest.raises(ValueError, match="tile_memory has nothing to choose: token_tile and vocab_tile are both set"):
        FlashCCE(tile_memory="1MB", token_tile=1, vocab_tile=1)

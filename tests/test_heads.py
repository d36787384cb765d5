"""Heads `dense`, `chunked` and `flash-cce`: the formula, each other, what options do, and bounded memory."""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve

from mortice.model import Output
from mortice.testing import HeadCase, HeadSuite, plain_scores
from mortice_plugins.heads import mlx_tiles, numpy_tiles
from mortice_plugins.heads.chunked import Chunked
from mortice_plugins.heads.dense import Dense
from mortice_plugins.heads.flash_cce import FlashCCE

HEADS = {
    "dense": Dense(),
    "chunked": Chunked(chunk=7),
    "flash-numpy": FlashCCE(backend="numpy", token_tile=16, vocab_tile=24),
    "flash-mlx": FlashCCE(backend="mlx", token_tile=16, vocab_tile=24),
}
every_head = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
every_mode = pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])


class TestDense(HeadSuite):
    head = HEADS["dense"]


class TestChunked(HeadSuite):
    head = HEADS["chunked"]


class TestFlashNumpy(HeadSuite):
    head = HEADS["flash-numpy"]


class TestFlashMLX(HeadSuite):
    head = HEADS["flash-mlx"]


class TestFlashOneTile(HeadSuite):
    head = FlashCCE()


def logits_as_output(logits: list[float], temperature: float = 1.0) -> tuple[mx.array, Output]:
    """One token whose raw logits are these."""
    weight = mx.array(np.asarray(logits, dtype=np.float32)[:, None])  # [V, 1]
    return mx.ones((1, 1)), Output(weight, "head.weight", temperature=temperature)


@every_head
@every_mode
def test_case_b48_temperature(head, traced):
    expected = {0.5: [-0.142932, -2.142932, -4.142932], 1.0: [-0.407606, -1.407606, -2.407606]}
    for temperature, logprobs in expected.items():
        hidden, output = logits_as_output([2.0, 1.0, 0.0], temperature)
        for target, value in enumerate(logprobs):
            found = head.score(hidden, mx.array([target]), output, traced=traced)
            assert found.logprobs.item() == pytest.approx(value, abs=1e-6)


@every_head
def test_unit_gradient_by_hand(head):
    """Two logits 0 and 0: p = ½ each, so ∂logprob/∂hidden = W[0] − (W[0] + W[1]) / 2 = (1 − 3) / 2."""
    output = Output(mx.array([[1.0, 0.0], [3.0, 0.0]]), "head.weight")
    scores = head.score(mx.array([[0.0, 5.0]]), mx.array([0]), output, grad=True, entropy=True)
    assert scores.logprobs.item() == pytest.approx(-np.log(2))
    assert scores.entropy.item() == pytest.approx(np.log(2))
    assert scores.dhidden.tolist() == [[pytest.approx(-1.0), 0.0]]


@every_head
@every_mode
@pytest.mark.parametrize("peak", [1e4, -1e4])
def test_certain_tokens_are_finite_and_have_no_gradient(head, peak, traced):
    hidden, output = logits_as_output([peak, peak - 1e4, peak - 2e4])
    scores = head.score(hidden, mx.array([0]), output, grad=True, entropy=True, traced=traced)
    assert (scores.logprobs.item(), scores.entropy.item(), scores.dhidden.item()) == (0.0, 0.0, 0.0)
    other = head.score(hidden, mx.array([2]), output, grad=True, traced=traced)
    assert other.logprobs.item() == pytest.approx(-2e4)
    assert other.dhidden.item() == pytest.approx(-2e4)


@every_head
@every_mode
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_case_b44_chunked_cross_entropy(head, traced, dtype):
    """33 tokens, of which 40 % are masked: loss and gradients of the mean over the others, and 0 at the masked.

    Hidden states and matrix are of `dtype`; everything is computed in float32, so bfloat16 costs no more than that.
    """
    hidden, targets, output = HeadCase("b44", tokens=33, vocab=101, dtype=dtype, weight_dtype=dtype).draw()
    kept = np.arange(33) % 5 >= 2  # 14 of 33 are masked
    dlogprobs = mx.array(np.where(kept, -1.0 / kept.sum(), 0.0).astype(np.float32))

    scores = head.score(hidden, targets, output, grad=True, traced=traced)
    dhidden = dlogprobs[:, None] * scores.dhidden
    dweight = head.output_gradients(hidden, targets, output, dlogprobs, scores.lse, traced=traced)["head.weight"]

    h = np.asarray(hidden.astype(mx.float32))
    logprobs, _, _, unit, dlogits = plain_scores(hidden, targets, output)
    scale = np.asarray(dlogprobs)[:, None]
    assert (dlogprobs * scores.logprobs).sum().item() == pytest.approx(-logprobs[kept].mean(), rel=1e-5)
    assert np.abs(np.asarray(dhidden) - scale * unit).max() <= 1e-5
    assert np.abs(np.asarray(dweight) - (scale * dlogits).T @ h).max() <= 1e-5
    assert not np.asarray(dhidden)[~kept].any()


@every_mode
@pytest.mark.parametrize("head", [h for name, h in HEADS.items() if name != "dense"], ids=lambda h: type(h).__name__)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_case_b44_autodiff_through_full_logits(head, traced, dtype):
    """The loss of `dense` and what MLX itself derives from it, for hidden states and matrix, masked tokens at 0."""
    hidden, targets, output = HeadCase("b44", tokens=33, vocab=101, dtype=dtype, weight_dtype=dtype).draw()
    kept = mx.arange(33) % 5 >= 2
    count = kept.sum().item()

    def loss(hidden: mx.array, weight: mx.array) -> mx.array:
        logprobs = Dense().score(hidden, targets, Output(weight, "head.weight"), traced=True).logprobs
        return -mx.where(kept, logprobs, 0.0).sum() / count

    value, (dhidden, dweight) = mx.value_and_grad(loss, argnums=(0, 1))(hidden, output.weight)
    scores = head.score(hidden, targets, output, grad=True, traced=traced)
    dlogprobs = mx.where(kept, -1.0 / count, 0.0)
    found = head.output_gradients(hidden, targets, output, dlogprobs, scores.lse, traced=traced)["head.weight"]
    tolerance = 1e-5 if dtype == mx.float32 else 2**-8  # autodiff rounds its gradients to bfloat16
    assert (dlogprobs * scores.logprobs).sum().item() == pytest.approx(value.item(), rel=1e-5)
    for ours, plain in ((dlogprobs[:, None] * scores.dhidden, dhidden), (found, dweight)):
        plain = np.asarray(plain.astype(mx.float32))
        assert np.abs(np.asarray(ours) - plain).max() <= tolerance * np.abs(plain).max()


@every_head
@every_mode
def test_case_b44_all_masked(head, traced):
    hidden, targets, output = HeadCase("b44").draw()
    none = mx.zeros((33,))
    scores = head.score(hidden, targets, output, grad=True, traced=traced)
    dweight = head.output_gradients(hidden, targets, output, none, scores.lse, traced=traced)["head.weight"]
    assert mx.isfinite(scores.logprobs).all().item() and mx.isfinite(scores.dhidden).all().item()
    assert (none * scores.logprobs).sum().item() == 0.0
    assert not dweight.any().item()
    assert not (none[:, None] * scores.dhidden).any().item()


def peak_of(head, hidden, targets, output, *, traced: bool = False) -> int:
    """Bytes at the peak of one scoring with its unit gradient, above its inputs."""
    mx.eval(hidden, targets, output.weight)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    scores = head.score(hidden, targets, output, grad=True, traced=traced)
    mx.eval(scores.logprobs, scores.dhidden)
    return mx.get_peak_memory() - before


def many_tokens(tokens: int, vocab: int, width: int = 8) -> tuple[mx.array, mx.array, Output]:
    return (
        mx.random.normal((tokens, width)),
        mx.random.randint(0, vocab, (tokens,)),
        Output(mx.random.normal((vocab, width)), "head.weight"),
    )


@every_mode
def test_case_b44_peak_scales_with_the_chunk(traced):
    tokens, vocab = 1024, 8192
    logits = 4 * tokens * vocab
    inputs = many_tokens(tokens, vocab)
    peaks = [peak_of(Chunked(chunk=chunk), *inputs, traced=traced) for chunk in (8, 32)]
    assert 2.5 < peaks[1] / peaks[0] < 4.5
    assert peaks[1] < 12 * 32 * 4 * vocab < logits / 2
    budgets = [peak_of(FlashCCE(tile_memory=size), *inputs, traced=traced) for size in ("1MB", "4MB")]
    assert 2.5 < budgets[1] / budgets[0] < 4.5
    assert budgets[1] < 5e6 < logits / 6
    if not traced:
        assert peak_of(Dense(), *inputs) > 2 * logits


@pytest.mark.slow
def test_case_b44_peak_of_8192_tokens_at_151936():
    """Full float32 logits are 4.64 GiB."""
    tokens, vocab, width = 8192, 151_936, 8
    inputs = many_tokens(tokens, vocab, width)
    beside = 4 * tokens * (3 * width + 16)  # dhidden, its parts, vectors of a float a token
    assert 4 * tokens * vocab / 2**30 == pytest.approx(4.64, abs=0.01)
    assert peak_of(FlashCCE(), *inputs) < 16e6 + beside
    assert peak_of(Chunked(chunk=64), *inputs) < 4 * 64 * 4 * vocab + beside


@pytest.mark.parametrize("tile", [(1, 1), (7, 101), (33, 10), (64, 512)])
@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_tiles_do_not_matter(backend, tile):
    case = HeadCase("tiles", softcap=30.0, temperature=0.7, scale=5.0)
    expected = Dense().score(*case.draw(), grad=True, entropy=True)
    head = FlashCCE(backend=backend, token_tile=tile[0], vocab_tile=tile[1])
    found = head.score(*case.draw(), grad=True, entropy=True)
    for name in ("logprobs", "lse", "entropy", "dhidden"):
        assert mx.allclose(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-5).item(), name


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_mlx_tiles_are_freed(traced):
    """16 tiles of 128 × 1,024 floats: full logits are 8 MiB, one tile is half a MiB."""
    hidden = mx.random.normal((128, 8))
    output = Output(mx.random.normal((16_384, 8)), "head.weight")
    targets = mx.zeros((128,), dtype=mx.int32)
    head = FlashCCE(backend="mlx", token_tile=128, vocab_tile=1024)
    mx.eval(hidden, output.weight, targets)

    def peak(head) -> int:
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        scores = head.score(hidden, targets, output, grad=True, traced=traced)
        mx.eval(scores.logprobs, scores.dhidden)
        return mx.get_peak_memory() - before

    assert peak(head) < 4 * 2**20 < 8 * 2**20 < peak(Dense())


def test_numpy_works_in_memory_that_mlx_counts():
    """One tile of 128 × 4,096 floats, the product, dhidden."""
    head = FlashCCE(backend="numpy", token_tile=128, vocab_tile=4096)
    assert peak_of(head, *many_tokens(256, 8192)) >= 4 * (128 * 4096 + 128 * 8 + 256 * 8)


def test_results_do_not_change_when_their_head_runs_again():
    head = FlashCCE(backend="numpy", token_tile=5, vocab_tile=7)
    case = HeadCase("first", softcap=20.0)
    first = head.score(*case.draw(), grad=True, entropy=True)
    copies = [mx.array(np.array(x)) for x in (first.logprobs, first.lse, first.entropy, first.dhidden)]
    head.score(*HeadCase("second", scale=3.0).draw(), grad=True, entropy=True)
    for x, copy in zip((first.logprobs, first.lse, first.entropy, first.dhidden), copies):
        assert mx.array_equal(x, copy).item()


class Watched(Output):
    """An output matrix that notes which rows are asked for."""

    asked: ClassVar[list[tuple[int, int]]] = []

    def rows(self, start: int = 0, stop: int | None = None) -> mx.array:
        self.asked.append((start, self.vocab if stop is None else stop))
        return super().rows(start, stop)


def blocks_of(head) -> list[tuple[int, int]]:
    hidden, targets, output = HeadCase("watched", tokens=12, vocab=100, width=4).draw()
    Watched.asked.clear()
    head.score(hidden, targets, Watched(output.weight, output.name))
    return list(Watched.asked)


def test_vocab_tile_says_how_many_rows_are_in_use():
    assert blocks_of(FlashCCE(backend="numpy", vocab_tile=40)) == [(0, 40), (40, 80), (80, 100)]
    assert blocks_of(FlashCCE(backend="numpy")) == [(0, 100)]


def test_token_tile_leaves_the_vocabulary_to_tile_memory():
    """3 tokens and v entries of width 4: 3v + 24 + 4v floats within 250."""
    head = FlashCCE(backend="numpy", token_tile=3, tile_memory="1kB")
    assert blocks_of(head) == [(0, 32), (32, 64), (64, 96), (96, 100)]
    assert blocks_of(evolve(head, tile_memory="2kB")) == [(0, 64), (64, 100)]


def test_chunk_says_how_many_tokens_meet_the_whole_matrix():
    assert len(blocks_of(Chunked(chunk=4))) == 3
    assert len(blocks_of(Chunked(chunk=12))) == 1


@pytest.mark.parametrize(("backend", "loop"), [("numpy", numpy_tiles), ("mlx", mlx_tiles)])
def test_backend_says_which_loop_runs(backend, loop, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise RuntimeError("this one")

    monkeypatch.setattr(loop, "score", refuse)
    with pytest.raises(RuntimeError, match="this one"):
        FlashCCE(backend=backend).score(*HeadCase("any").draw())
    other = {"numpy": "mlx", "mlx": "numpy"}[backend]
    FlashCCE(backend=other).score(*HeadCase("any").draw())


@pytest.mark.parametrize(
    ("option", "value"), [("token_tile", 0), ("vocab_tile", -1), ("backend", "cuda"), ("eps", -0.1), ("eps", 1.0)]
)
def test_options_are_checked(option, value):
    with pytest.raises(ValueError, match=option):
        FlashCCE(**{option: value})


def test_a_chunk_holds_a_token():
    with pytest.raises(ValueError, match="chunk"):
        Chunked(chunk=0)

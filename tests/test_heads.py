"""Heads `dense` and `flash-cce`: the formula, each other, and bounded memory."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mortice.model import Output
from mortice.testing import HeadCase, HeadSuite, plain_scores
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
    """33 tokens, of which 40 % are masked: loss and gradients of the mean over the others, and 0 at the masked."""
    hidden, targets, output = HeadCase("b44", tokens=33, vocab=101, dtype=dtype).draw()
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


@every_head
@every_mode
def test_case_b44_all_masked(head, traced):
    hidden, targets, output = HeadCase("b44").draw()
    none = mx.zeros((33,))
    scores = head.score(hidden, targets, output, grad=True, traced=traced)
    dweight = head.output_gradients(hidden, targets, output, none, scores.lse, traced=traced)["head.weight"]
    assert not dweight.any().item()
    assert not (none[:, None] * scores.dhidden).any().item()


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


@pytest.mark.parametrize(("option", "value"), [("token_tile", 0), ("vocab_tile", -1), ("backend", "cuda")])
def test_options_are_checked(option, value):
    with pytest.raises(ValueError, match=option):
        FlashCCE(**{option: value})

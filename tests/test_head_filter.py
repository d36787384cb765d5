"""`eps` of `flash-cce`: what is left out of the unit gradient, what never is, and what stays exact."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from toy_model import toy

from mortice.batch import Completion, Group
from mortice.errors import ConfigError
from mortice.model import Output
from mortice.objective import WeightedLoss
from mortice.step import Engine
from mortice.testing import HeadCase, plain_scores
from mortice.testing.heads import CASES, assert_gradient
from mortice_plugins.backwards.full import Full
from mortice_plugins.backwards.segmented import Segmented
from mortice_plugins.heads import mlx_tiles, numpy_tiles
from mortice_plugins.heads.flash_cce import FlashCCE
from mortice_plugins.heads.tiling import worth_gathering
from mortice_plugins.layouts.separate import Separate
from mortice_plugins.losses.sft import SFT

every_backend = pytest.mark.parametrize("backend", ["numpy", "mlx"])


@pytest.fixture
def pairs(monkeypatch):
    """Vocabulary entries are kept or left out two by two."""
    for loop in (numpy_tiles, mlx_tiles):
        monkeypatch.setattr(loop, "FILTER_BLOCK", 2)


def unit_gradient(
    logits: list[list[float]], values: list[float], targets: list[int], *, backend: str, **options
) -> tuple[list[float], mx.array]:  # fmt: skip
    """∂logprob/∂(last hidden component), and log-probabilities, of tokens with these logits.

    Each token has a hidden component of its own, where the matrix holds its logits, and one more that is 0, where the
    matrix holds `values`: the gradient there is value of the target − Σ p · value.
    """
    tokens = len(logits)
    weight = np.concatenate([np.asarray(logits, dtype=np.float32).T, np.asarray(values, dtype=np.float32)[:, None]], 1)
    hidden = np.concatenate([np.eye(tokens, dtype=np.float32), np.zeros((tokens, 1), np.float32)], axis=1)
    output = Output(mx.array(weight), "head.weight")
    scores = FlashCCE(backend=backend, **options).score(mx.array(hidden), mx.array(targets), output, grad=True)
    return scores.dhidden[:, -1].tolist(), scores.logprobs


@every_backend
def test_an_unlikely_block_is_left_out_for_the_tokens_to_whom_it_is_unlikely(pairs, backend):
    """p = ½, ½ and e^−20: 2e-9 · 1e6 is what the second block adds. For the second token it is the other way round."""
    logits, values = [[0, 0, -20, -20], [-20, -20, 0, 0]], [1.0, 3.0, 1e6, 1e6]
    found, logprobs = unit_gradient(logits, values, [0, 2], backend=backend, eps=1e-6)
    assert found == [-1.0, 0.0]
    exact, same = unit_gradient(logits, values, [0, 2], backend=backend)
    assert exact[0] == pytest.approx(-1 - np.exp(-20) * 1e6, rel=1e-5)
    assert mx.array_equal(logprobs, same).item()


@every_backend
def test_the_targets_own_row_counts_where_its_block_is_left_out(pairs, backend):
    """Target 2 has p = e^−10 / 2: its own 1 − p must be whole, while entry 3 beside it is left out."""
    p = float(np.exp(-10) / 2)
    found, _ = unit_gradient([[0, 0, -10, -30]] * 2, [0.0, 0.0, 1e4, 1e9], [2, 0], backend=backend, eps=1e-3)
    assert found[0] == pytest.approx((1 - p / (1 + p)) * 1e4, rel=1e-6)
    assert found[1] == 0.0


@every_backend
@pytest.mark.parametrize("vocab_tile", [2, 4])
def test_what_is_likely_so_far_is_kept_and_what_the_target_rules_out_is_not(pairs, backend, vocab_tile):
    """Logits 0, 0 come before 20, 20: alone they are all there is. A target among the latter tells from the start."""
    logits, values = [[0, 0, 20, 20]] * 4, [1e6, 1e6, 0.0, 0.0]
    found, _ = unit_gradient(logits, values, [2] * 4, backend=backend, eps=1e-6, token_tile=4, vocab_tile=vocab_tile)
    assert found == [0.0] * 4
    found, _ = unit_gradient(logits, values, [0, 2, 2, 2], backend=backend, eps=1e-6, token_tile=4, vocab_tile=2)
    kept = pytest.approx(1e6 * (1 - np.exp(-20)), rel=1e-6)
    assert found == [kept, 0.0, 0.0, 0.0]


@every_backend
def test_likely_to_most_means_kept_for_all(pairs, backend):
    """Three of four tokens would be worth gathering; all four share the product."""
    assert worth_gathering(3, 4) and not worth_gathering(4, 5)
    logits = [[0, 0, -1, -1]] * 4 + [[0, 0, -20, -20]]
    found, _ = unit_gradient(logits, [0.0, 0.0, 1e6, 1e6], [0] * 5, backend=backend, eps=1e-3)
    exact, _ = unit_gradient(logits, [0.0, 0.0, 1e6, 1e6], [0] * 5, backend=backend)
    assert found == pytest.approx(exact, rel=1e-6) and found[-1] < 0


@every_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_above_eps_is_lost(pairs, backend, case):
    """The error of a token is at most the sum of what lies at or below eps, times the longest output row."""
    eps = 1e-3
    hidden, targets, output = case.draw()
    *_, exact, dlogits = plain_scores(hidden, targets, output)
    scores = FlashCCE(backend=backend, eps=eps, token_tile=11, vocab_tile=30).score(
        hidden, targets, output, grad=True, entropy=True
    )
    plain = FlashCCE(backend=backend, token_tile=11, vocab_tile=30).score(
        hidden, targets, output, grad=True, entropy=True
    )
    for name in ("logprobs", "lse", "entropy"):
        assert mx.array_equal(getattr(scores, name), getattr(plain, name)).item(), name
    weights = np.abs(dlogits)
    small = np.where(weights * output.temperature <= eps * 1.001, weights, 0.0).sum(axis=1)  # [M]
    longest = np.linalg.norm(np.asarray(output.rows()), axis=1).max()
    errors = np.linalg.norm(np.asarray(scores.dhidden) - exact, axis=1)
    rounding = 1e-5 * np.linalg.norm(exact, axis=1) + 1e-6 * longest
    assert (errors <= small * longest + rounding).all()


@every_backend
def test_eps_moves_the_unit_gradient_and_0_does_not(pairs, backend):
    case = HeadCase("confident", scale=3.0)
    tiles = {"backend": backend, "token_tile": 11, "vocab_tile": 30}
    plain = FlashCCE(**tiles).score(*case.draw(), grad=True)
    zero = FlashCCE(eps=0.0, **tiles).score(*case.draw(), grad=True)
    some = FlashCCE(eps=1e-3, **tiles).score(*case.draw(), grad=True)
    assert mx.array_equal(zero.dhidden, plain.dhidden).item()
    assert not mx.array_equal(some.dhidden, plain.dhidden).item()
    exact = plain_scores(*case.draw())[3]
    assert_gradient(zero.dhidden, exact)
    assert_gradient(some.dhidden, exact, 1e-2)


def test_inside_a_trace_eps_is_refused_where_a_gradient_is_wanted():
    head, case = FlashCCE(eps=1e-4), HeadCase("traced")
    message = r'\[head\] eps = 0.0001: .* \(\[backward\] name = "segmented"\), or eps = 0'
    with pytest.raises(ConfigError, match=message):
        head.score(*case.draw(), grad=True, traced=True)
    scores = head.score(*case.draw(), traced=True)
    assert np.abs(np.asarray(scores.logprobs) - plain_scores(*case.draw())[0]).max() < 1e-4


def test_the_refusal_reaches_whoever_asked_for_a_step():
    """Through `value_and_grad` and the custom function of the objective; the backward that it names does work."""
    model, pairs_of_a_step = toy(), [Group("a", [1, 2, 3], [Completion([5, 6, 7]), Completion([8])], ((0, 1),))]

    def gradients(head, backward) -> dict[str, mx.array]:
        engine = Engine(model, head, backward, Separate(), (WeightedLoss("sft", SFT()),))
        return engine.gradients(model.named_parameters(), pairs_of_a_step)[1]

    with pytest.raises(ConfigError, match=r"eps = 0\.001"):
        gradients(FlashCCE(eps=1e-3), Full())
    found, plain = gradients(FlashCCE(eps=1e-3), Segmented()), gradients(FlashCCE(), Full())
    assert all(mx.allclose(found[name], plain[name], rtol=1e-2, atol=1e-3).item() for name in plain)

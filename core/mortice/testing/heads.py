"""Conformance of heads: subclass `HeadSuite` in a pytest file and set `head`.

    class TestMyHead(HeadSuite):
        head = MyHead()

Everything is compared with the formula written out in float64. A head that `provides` `values` is another matter.
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest
from attrs import frozen

from mortice.batch import TokenLogprobs
from mortice.model import Output
from mortice.protocols import Head


@frozen
class HeadCase:
    """One shape and kind of output matrix."""

    name: str
    tokens: int = 33
    vocab: int = 101
    width: int = 64
    dtype: mx.Dtype = mx.float32
    weight_dtype: mx.Dtype = mx.float32
    bits: int | None = None
    group_size: int = 64
    softcap: float | None = None
    temperature: float = 1.0
    scale: float = 1.0
    """Of the logits."""

    def draw(self) -> tuple[mx.array, mx.array, Output]:
        """(hidden `[M, D]`, targets `[M]`, output)."""
        rng = np.random.default_rng(7)
        hidden = mx.array(rng.normal(size=(self.tokens, self.width)).astype(np.float32)).astype(self.dtype)
        targets = mx.array(rng.integers(0, self.vocab, self.tokens).astype(np.int32))
        weight = rng.normal(size=(self.vocab, self.width)) * 3.0 * self.scale / np.sqrt(self.width)
        matrix = mx.array(weight.astype(np.float32)).astype(self.weight_dtype)
        if self.bits is None:
            return hidden, targets, Output(matrix, "head.weight", softcap=self.softcap, temperature=self.temperature)
        packed, scales, biases = mx.quantize(matrix, self.group_size, self.bits)
        output = Output(
            packed, "head.weight", scales, biases, self.group_size, self.bits,
            softcap=self.softcap, temperature=self.temperature,
        )  # fmt: skip
        return hidden, targets, output


CASES = [
    HeadCase("plain"),
    HeadCase("one-token", tokens=1),
    HeadCase("bf16-hidden", dtype=mx.bfloat16),
    HeadCase("bf16-matrix", weight_dtype=mx.bfloat16),
    HeadCase("4-bit", bits=4, group_size=32),
    HeadCase("8-bit", bits=8, vocab=97),
    HeadCase("soft-cap", softcap=30.0, scale=10.0),
    HeadCase("temperature", temperature=0.5),
    HeadCase("4-bit-soft-cap-temperature", bits=4, softcap=30.0, temperature=0.7, dtype=mx.bfloat16),
    HeadCase("logits-of-1e4", scale=3000.0),
]
FLOAT_CASES = [case for case in CASES if case.bits is None and case.scale < 1000]


def plain_scores(
    hidden: mx.array, targets: mx.array, output: Output
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The formula in float64: (logprobs, lse, entropy, dhidden, d logprob / d raw logits)."""
    h = np.asarray(hidden.astype(mx.float32)).astype(np.float64)
    w = np.asarray(output.rows()).astype(np.float64)
    raw = h @ w.T  # [M, V]
    tanh = np.zeros_like(raw) if output.softcap is None else np.tanh(raw / output.softcap)
    z = (raw if output.softcap is None else output.softcap * tanh) / output.temperature
    peak = z.max(axis=1, keepdims=True)
    lse = peak[:, 0] + np.log(np.exp(z - peak).sum(axis=1))
    p = np.exp(z - lse[:, None])
    onehot = np.eye(output.vocab)[np.asarray(targets)]
    dlogits = (onehot - p) * (1 - tanh**2) / output.temperature
    entropy = -(p * (z - lse[:, None])).sum(axis=1)
    return (onehot * z).sum(axis=1) - lse, lse, entropy, dlogits @ w, dlogits


def assert_close(found: mx.array | None, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    """|found − expected| ≤ tolerance · max(1, |expected|), largest over all elements."""
    assert found is not None
    assert found.dtype == mx.float32
    assert found.shape == expected.shape
    scale = max(1.0, float(np.abs(expected).max()))
    assert float(np.abs(np.asarray(found) - expected).max()) <= tolerance * scale


def assert_gradient(found: mx.array | None, expected: np.ndarray, tolerance: float = 1e-4) -> None:
    """‖found − expected‖ ≤ tolerance · ‖expected‖."""
    assert found is not None
    assert found.dtype == mx.float32
    assert found.shape == expected.shape
    assert float(np.linalg.norm(np.asarray(found) - expected)) <= tolerance * float(np.linalg.norm(expected))


class HeadSuite:
    """What every head of log-probabilities must do. Set `head` to the configured strategy."""

    head: ClassVar[Head]

    def _score(self, case: HeadCase, *, traced: bool = False, entropy: bool = False) -> TokenLogprobs:
        hidden, targets, output = case.draw()
        return self.head.score(hidden, targets, output, grad=True, entropy=entropy, traced=traced)

    @pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_logprobs_and_unit_gradient(self, case: HeadCase, traced: bool) -> None:
        logprobs, lse, _, dhidden, _ = plain_scores(*case.draw())
        scores = self._score(case, traced=traced)
        assert_close(scores.logprobs, logprobs)
        assert_close(scores.lse, lse)
        assert_gradient(scores.dhidden, dhidden)

    @pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_entropy_in_the_same_pass(self, case: HeadCase, traced: bool) -> None:
        if "entropy" not in getattr(self.head, "provides", ()):
            pytest.skip("the head does not provide entropy")
        logprobs, _, entropy, dhidden, _ = plain_scores(*case.draw())
        scores = self._score(case, traced=traced, entropy=True)
        assert_close(scores.entropy, entropy, 1e-4)
        assert_close(scores.logprobs, logprobs)
        assert_gradient(scores.dhidden, dhidden)

    def test_no_gradient_unless_asked(self) -> None:
        scores = self.head.score(*CASES[0].draw())
        assert scores.dhidden is None
        assert_close(scores.logprobs, plain_scores(*CASES[0].draw())[0])

    @pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
    def test_no_tokens(self, traced: bool) -> None:
        case = HeadCase("none", tokens=0)
        hidden, targets, output = case.draw()
        scores = self._score(case, traced=traced)
        assert scores.logprobs.shape == (0,)
        assert scores.dhidden is not None and scores.dhidden.shape == (0, case.width)
        none = mx.zeros((0,))
        gradients = self.head.output_gradients(hidden, targets, output, none, none, traced=traced)
        assert not gradients["head.weight"].any().item()

    @pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
    @pytest.mark.parametrize("case", FLOAT_CASES, ids=lambda case: case.name)
    def test_output_gradients(self, case: HeadCase, traced: bool) -> None:
        hidden, targets, output = case.draw()
        _, lse, _, _, dlogits = plain_scores(hidden, targets, output)
        dlogprobs = np.linspace(-1.0, 2.0, case.tokens)
        expected = (dlogprobs[:, None] * dlogits).T @ np.asarray(hidden.astype(mx.float32))
        found = self.head.output_gradients(
            hidden, targets, output, mx.array(dlogprobs.astype(np.float32)), mx.array(lse.astype(np.float32)),
            traced=traced,
        )  # fmt: skip
        assert_gradient(found["head.weight"], expected)

    def test_a_quantized_matrix_has_no_gradient(self) -> None:
        hidden, targets, output = HeadCase("4-bit", bits=4).draw()
        scores = self.head.score(hidden, targets, output)
        assert scores.lse is not None
        assert self.head.output_gradients(hidden, targets, output, scores.logprobs, scores.lse) == {}

    def test_autodiff_agrees_where_it_is_promised(self) -> None:
        if not getattr(self.head, "differentiable", False):
            pytest.skip("the head does not say that autodiff through it is right")
        hidden, targets, output = HeadCase("soft-cap", softcap=30.0, temperature=0.7).draw()
        found = mx.grad(lambda h: self.head.score(h, targets, output, traced=True).logprobs.sum())(hidden)
        assert_gradient(found, plain_scores(hidden, targets, output)[3])

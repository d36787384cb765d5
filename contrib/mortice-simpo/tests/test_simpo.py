"""SimPO: the conformance suite, and numbers by hand."""

from __future__ import annotations

import math

import pytest
from mortice_simpo import SimPO

from mortice.testing import LossSuite, loss_value, make_batch, make_group, make_scores


class TestSimPO(LossSuite):
    loss = SimPO()


def value(loss, logprobs) -> float:
    pair = [make_group("a", *(len(side) for side in logprobs), pairs=[(0, 1)])]
    return loss_value([loss(make_scores(pair, [logprobs]), make_batch(pair))])


def test_case_b17_means_not_sums():
    """Sums of −4 over 4 tokens and −16 over 8: −log σ(2 · (−1 + 2) − 1); from sums it would be near 0."""
    assert value(SimPO(beta=2.0, gamma=1.0), [[-1.0] * 4, [-2.0] * 8]) == pytest.approx(0.313262, abs=1e-6)


def test_gamma_stands_outside_beta():
    """Equal means leave −log σ(−0.5) = log(1 + e^0.5)."""
    assert value(SimPO(beta=2.0, gamma=0.5), [[-1.0], [-1.0]]) == pytest.approx(math.log(1 + math.exp(0.5)))


@pytest.mark.parametrize("option", [{"beta": 0.0}, {"gamma": -1.0}])
def test_options_are_checked(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        SimPO(**option)

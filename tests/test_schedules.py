"""Learning rates by hand."""

from __future__ import annotations

import pytest

from mortice.errors import ConfigError
from mortice_plugins.schedules.warmup import Constant, Cosine, Linear


def rates(schedule, peak: float, total: int) -> list[float]:
    rate = schedule.build(peak, total)
    return [rate(step) for step in range(total)]


@pytest.mark.parametrize("kind", [Constant, Linear, Cosine])
def test_case_b28_warmup_starts_above_zero(kind):
    assert rates(kind(warmup=4), 1.0, 8)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(kind(warmup=0.1), 2e-5, 1) == [2e-5]
    with pytest.raises(ConfigError, match=r"schedule\.warmup: 5 steps, but the run has only 3"):
        kind(warmup=5).build(1.0, 3)


def test_linear():
    assert rates(Linear(), 1.0, 4) == [1.0, 0.75, 0.5, 0.25]
    assert rates(Linear(final=0.5), 1.0, 4) == [1.0, 0.875, 0.75, 0.625]
    assert rates(Linear(warmup=2), 8.0, 6) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]


def test_cosine():
    half = 0.5**0.5
    expected = [1.0, (1 + half) / 2, 0.5, (1 - half) / 2]
    assert rates(Cosine(), 1.0, 4) == pytest.approx(expected)
    assert rates(Cosine(final=0.1), 1.0, 4) == pytest.approx([0.1 + 0.9 * e for e in expected])


def test_constant():
    assert rates(Constant(), 3e-4, 3) == [3e-4] * 3


@pytest.mark.parametrize("kind", [Linear, Cosine])
def test_the_last_step_still_trains(kind):
    assert rates(kind(warmup=0.03), 1.0, 1000)[-1] > 0


def test_warmup_is_whole_steps_or_a_share():
    assert rates(Constant(warmup=1), 1.0, 4) == [1.0] * 4
    assert rates(Constant(warmup=0.5), 1.0, 4) == [0.5, 1.0, 1.0, 1.0]
    assert rates(Constant(warmup=0.07), 1.0, 100)[:7] == pytest.approx([k / 7 for k in range(1, 8)])
    for wrong in (1.5, -1, -0.1, float("nan")):
        with pytest.raises(ValueError, match="warmup"):
            Constant(warmup=wrong)
    with pytest.raises(ValueError, match="final"):
        Linear(final=1.5)

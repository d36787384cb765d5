"""Draws from logits: filters, penalties, temperatures, and both twins."""

from __future__ import annotations

import math
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from tiny_tokenizers import tokenizer

from mortice.errors import TrainingError
from mortice.generation import Growing
from mortice.protocols import Request, Sampling
from mortice.sampling import Chosen, Draw, answer_seed, draw, uniform


def logits(*probabilities: float) -> np.ndarray:
    return np.log(np.array([probabilities], np.float32))


def share(row: np.ndarray, count: int = 2000, *, prompt=(), answer=(), **options) -> list[float]:
    draws = [Draw(0, seed, 3, prompt, answer) for seed in range(count)]
    found = Counter(each.token for each in draw(row.copy(), draws, Sampling(**options)))
    return [found[i] / count for i in range(row.shape[1])]


def test_case_b48_log_probabilities_are_those_at_the_temperature():
    """Logits 2, 1, 0 at a temperature of ½."""
    row = np.array([[2.0, 1.0, 0.0]], np.float32)
    found = {c.token: c.logprob for c in draw(row, [Draw(0, s, 0) for s in range(300)], Sampling(temperature=0.5))}
    assert found == pytest.approx({0: -0.142932, 1: -2.142932, 2: -4.142932}, abs=1e-6)
    greedy = draw(np.array([[2.0, 1.0, 0.0]], np.float32), [Draw(0, 0, 0)], Sampling(temperature=0.0))
    assert greedy == [Chosen(0, pytest.approx(-0.407606, abs=1e-6))]


def test_case_b52_filters_change_what_is_drawn_and_not_its_log_probability():
    row = logits(0.5, 0.3, 0.2)
    for options in ({"top_p": 0.8}, {"top_k": 2}, {"min_p": 0.5}):
        assert share(row, **options) == pytest.approx([0.625, 0.375, 0], abs=0.04)
        found = {c.token: c.logprob for c in draw(row.copy(), [Draw(0, s, 0) for s in range(99)], Sampling(**options))}
        assert found == pytest.approx({0: math.log(0.5), 1: math.log(0.3)}, abs=1e-6)


def test_of_equally_likely_tokens_all_stay():
    row = logits(0.4, 0.2, 0.2, 0.2)
    for options in ({"top_p": 0.5}, {"top_k": 2}):
        assert min(share(row, **options)) > 0.1
    assert share(row, top_k=1) == [1, 0, 0, 0]


def test_top_p_among_more_tokens_than_are_looked_at_first():
    row = np.zeros((1, 5000), np.float32)
    row[0, 17] = 3.0
    found = np.array(share(row, 4000, top_p=0.9999))
    assert (found > 0).sum() > 2000
    assert share(row, 50, top_p=0.003)[17] == 1


def test_penalties():
    row = np.array([[1.0, 1.0, -1.0, 0.0]], np.float32)

    def wanted(*scores):
        weights = np.exp(scores)
        return pytest.approx(list(weights / weights.sum()), abs=0.04)

    assert share(row, prompt=(0, 2), answer=(3,), repetition_penalty=2.0) == wanted(0.5, 1.0, -2.0, 0.0)
    assert share(row, prompt=(0,), answer=(1, 1), presence_penalty=0.7) == wanted(1.0, 0.3, -1.0, 0.0)
    assert share(row, answer=(1,), presence_penalty=0.7, temperature=0.5) == wanted(2.0, 0.6, -2.0, 0.0)
    assert share(row, answer=(0,), presence_penalty=0.7, temperature=0.0) == [0, 1, 0, 0]
    assert share(row, answer=(2,), presence_penalty=-19.0) == [0, 0, 1, 0]


def test_a_draw_follows_the_distribution_over_a_whole_vocabulary():
    rng = np.random.default_rng(0)
    row = rng.normal(size=(1, 3000)).astype(np.float32) * 2
    p = np.exp(row[0].astype(np.float64))
    p /= p.sum()
    found = np.array(share(row, 20000))
    order = np.argsort(-p)
    for part in np.array_split(order[:300], 10):
        assert found[part].sum() == pytest.approx(p[part].sum(), abs=0.012)


def test_both_twins_draw_the_same():
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(5, 1000)).astype(np.float32) * 3
    rows[:, 900:] = -np.inf
    draws = [Draw(i % 5, seed, 2) for i, seed in enumerate(range(200))]
    for options in ({"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_p": 0.8}):
        one = draw(rows.copy(), draws, Sampling(**options))
        other = draw(mx.array(rows), draws, Sampling(**options))
        assert [c.token for c in one] == [c.token for c in other]
        assert [c.logprob for c in one] == pytest.approx([c.logprob for c in other], abs=1e-5)
        assert max(c.token for c in one) < 900


def test_the_ends_of_the_range(monkeypatch):
    row = np.array([[-np.inf, 0.0, -np.inf, 0.0, -np.inf]], np.float32)
    for u, token in ((0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3)):
        monkeypatch.setattr("mortice.sampling.uniform", lambda *_, u=u: u)
        assert draw(row.copy(), [Draw(0, 0, 0)], Sampling())[0].token == token
        assert draw(mx.array(row), [Draw(0, 0, 0)], Sampling())[0].token == token


def test_draws_are_named_by_seed_request_sample_and_place():
    sampling, request = Sampling(seed=1), Request((1,), "a")
    seeds = {answer_seed(sampling, request, k) for k in range(3)}
    seeds |= {answer_seed(Sampling(seed=2), request, 0), answer_seed(sampling, Request((1,), "b"), 0)}
    assert len(seeds) == 5
    assert len({uniform(seed, place) for seed in seeds for place in range(4)}) == 20
    assert all(0 <= uniform(0, place) < 1 for place in range(1000))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_logits_that_are_not_finite_end_the_run(wrong):
    row = np.array([[0.0, wrong, 1.0]], np.float32)
    for given in (row.copy(), mx.array(row)):
        with pytest.raises(TrainingError, match="not finite"):
            draw(given, [Draw(0, 0, 0)], Sampling())


def test_case_b51_any_end_counts_once_and_a_stop_string_is_not_text():
    tok = tokenizer(None, eos="</s>", eos_ids=("<|im_end|>",))
    for end in tok.eos_ids:
        answer = Growing(Sampling(max_tokens=9, eos_ids=tok.eos_ids), tok)
        for token in (*tok.encode("ab"), end):
            assert answer.reason is None
            answer.add(Chosen(token, -1.0))
        assert (answer.text, answer.reason, len(answer.ids)) == ("ab", "stop", 3)
    stopped = Growing(Sampling(max_tokens=9, stop=("é!", "END")), tok)
    for token in tok.encode("xé!"):  # é is two tokens
        assert stopped.reason is None
        stopped.add(Chosen(token, -1.0))
    assert (stopped.text, stopped.reason, stopped.ids) == ("x", "stop-string", tok.encode("xé!"))
    cut = Growing(Sampling(max_tokens=2), tok)
    for token in tok.encode("ab"):
        cut.add(Chosen(token, -1.0))
    assert (cut.text, cut.reason) == ("ab", "length")
    assert cut.completion().sampler_logprobs == (-1.0, -1.0)

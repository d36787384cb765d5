"""Rollout engines: what they sample, and what they say of it."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest
from tiny_tokenizers import tokenizer
from toy_model import toy

from mortice.batch import Row, Span
from mortice.context import SpanContext
from mortice.errors import DataError
from mortice.generation import generate_tokens
from mortice.protocols import EngineContext, Request, Sampling
from mortice_plugins.rollouts.kv_cache import KVCache
from mortice_plugins.rollouts.sequential import Sequential

ENGINES = {"sequential": Sequential(), "kv-cache": KVCache(), "kv-cache, few at once": KVCache(rows=2, cache_tokens=24)}
REQUESTS = [Request((1, 2, 3), "a"), Request((4, 5), "b"), Request((1, 2, 3), "c")]


def answers(engine, requests, sampling, model=None):
    context = EngineContext(model or toy(), tokenizer(), lambda *_, **__: None)
    live = engine.open(context)
    found = {(i, k): completion for i, k, completion in live.generate(requests, sampling)}
    live.close()
    return found


def scored(model, prompt, ids, temperature: float) -> list[float]:
    """Log-probabilities of `ids` behind the prompt in one forward over everything."""
    whole = [*prompt, *ids]
    ctx = SpanContext(Row(whole, [Span(0, len(whole), None, 0)], [], [], [], [], []))
    logits = model.output.finish(model.output.project(model.hidden(ctx, ctx.tokens))).astype(mx.float32) / temperature
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [logprobs[len(prompt) - 1 + j, token].item() for j, token in enumerate(ids)]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
class TestEngines:
    def test_greedy_is_greedy(self, engine):
        model = toy()
        found = answers(engine, REQUESTS, Sampling(max_tokens=6, temperature=0.0), model)
        for (i, _), completion in found.items():
            want = list(generate_tokens(model, REQUESTS[i].ids, Sampling(max_tokens=6, temperature=0.0)))
            assert list(completion.ids) == want and completion.finish_reason == "length"

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_logprobs_are_those_of_one_pass_at_the_temperature(self, engine, temperature):
        model = toy()
        found = answers(engine, REQUESTS, Sampling(max_tokens=8, samples=3, temperature=temperature), model)
        assert len(found) == 9
        for (i, _), completion in found.items():
            want = scored(model, REQUESTS[i].ids, completion.ids, temperature)
            assert completion.sampler_logprobs == pytest.approx(want, abs=1e-4)

    def test_case_b50_prompts_of_many_lengths(self, engine):
        """In one batch as one by one, and as one scoring pass has them: no padding is sampled, scored or attended."""
        model = toy()
        asked = [Request(tuple(1 + (7 * i + n) % 12 for i in range(n)), f"{n}") for n in (2, 7, 19)]
        sampling = Sampling(max_tokens=4, temperature=0.0)
        together = answers(engine, asked, sampling, model)
        for i, request in enumerate(asked):
            alone = answers(engine, [request], sampling, model)[0, 0]
            assert together[i, 0].ids == alone.ids
            want = scored(model, request.ids, alone.ids, 1.0)
            assert together[i, 0].sampler_logprobs == pytest.approx(want, abs=1e-4)

    def test_an_answer_does_not_depend_on_what_else_is_asked(self, engine):
        sampling = Sampling(max_tokens=8, samples=2, seed=3)
        together, alone = answers(engine, REQUESTS, sampling), answers(engine, REQUESTS[1:2], sampling)
        assert together[1, 0].ids == alone[0, 0].ids and together[1, 1].ids == alone[0, 1].ids
        assert together[0, 0].ids != together[2, 0].ids  # one prompt, two keys
        assert together[1, 0].ids != together[1, 1].ids

    def test_seeds(self, engine):
        first, again, other = (answers(engine, REQUESTS, Sampling(max_tokens=8, seed=s)) for s in (1, 1, 2))
        assert [c.ids for c in first.values()] == [c.ids for c in again.values()]
        assert [c.ids for c in first.values()] != [c.ids for c in other.values()]

    def test_ends(self, engine):
        free = answers(engine, REQUESTS[:1], Sampling(max_tokens=8, temperature=0.0))[0, 0].ids
        ended = answers(engine, REQUESTS[:1], Sampling(max_tokens=8, temperature=0.0, eos_ids=(free[2],)))[0, 0]
        stop = free.index(free[2])
        assert ended.ids == free[: stop + 1] and ended.finish_reason == "stop"
        assert ended.text == tokenizer().decode(list(free[:stop]))

    def test_a_stop_string_over_token_boundaries_ends_the_text_before_it(self, engine):
        free = answers(engine, REQUESTS[:1], Sampling(max_tokens=8, temperature=0.0))[0, 0]
        stop = free.text[2:4]
        ended = answers(engine, REQUESTS[:1], Sampling(max_tokens=8, temperature=0.0, stop=(stop,)))[0, 0]
        assert len(stop) == 2 and ended.finish_reason == "stop-string"
        assert ended.text == free.text[: free.text.index(stop)]
        assert ended.ids == free.ids[: len(ended.ids)] and len(ended.ids) < len(free.ids)

    def test_refusals(self, engine):
        with pytest.raises(DataError, match="'a' is empty"):
            answers(engine, [Request((), "a")], Sampling())
        with pytest.raises(DataError):
            answers(engine, [Request((10**6,), "a")], Sampling(max_tokens=1))


def test_filtered_sampling_is_told_apart():
    assert not Sampling(temperature=0.3, max_tokens=1, stop=("x",)).filtered
    others = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5}
    assert all(Sampling(**{name: value}).filtered for name, value in others.items())
    assert math.isclose(Sampling().temperature, 1.0)

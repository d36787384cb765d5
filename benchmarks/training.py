"""mortice's side: one training step as a run makes it, timed, with its peak memory and its floating-point operations.

A step is what the trainer does between two log lines: the reference's forward where the loss wants one, gradients, the
optimizer. It leaves out clipping, since the peers do not clip, and logging.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from attrs import field, frozen

from benchmarks import losses, pairs
from benchmarks.flops import step_flops
from benchmarks.memory import PeakMeter
from mortice import blas, load
from mortice.batch import Completion, Group
from mortice.context import Randomness
from mortice.model import Model
from mortice.objective import WeightedLoss
from mortice.plugins import Plugins
from mortice.pretrained import random_model, read_json
from mortice.protocols import LiveOptimizer, Params
from mortice.reference import Reference, reference_params
from mortice.step import Engine


@frozen
class Strategies:
    """What a step is made of: names as a run file has them, and options by kind."""

    loss: str
    head: str
    backward: str
    layout: str
    options: Mapping[str, Mapping[str, Any]] = field(factory=dict)
    mlp_chunk: int = 0

    def engine(self, plugins: Plugins, model: Model) -> Engine:
        def build(kind: str) -> Any:
            return plugins.get(kind, getattr(self, kind)).load()(**self.options.get(kind, {}))

        losses = (WeightedLoss(self.loss, build("loss")),)
        return Engine(model, build("head"), build("backward"), build("layout"), losses, mlp_chunk=self.mlp_chunk)


@frozen
class Recipe:
    """What both sides of a comparison have in common: LoRA on every linear layer, AdamW as `mlx.optimizers` has it."""

    steps: int = 1
    """Timed steps on each batch, behind one that does not count."""
    rank: int = 8
    scale: float = 10.0
    learning_rate: float = 1e-5
    cache_limit: int = 32 * 10**6
    """Bytes that MLX's allocator may keep unused."""


@frozen(eq=False)
class Step:
    """An optimizer step on groups; `params` go in and come out."""

    engine: Engine
    optimizer: LiveOptimizer
    reference: Reference | None = None

    def __call__(self, params: Params, groups: Sequence[Group], number: int) -> tuple[float, Params]:
        """(loss, the parameters after it)."""
        if self.reference is not None:
            groups = self.reference.fill(groups)
            self.engine.model.bind(params)
        tally, gradients = self.engine.gradients(params, groups, Randomness(0, number))
        params = self.optimizer.apply_gradients(gradients, params)
        mx.eval(params, self.optimizer.state)
        self.engine.model.bind(params)
        return tally.loss, params


def step_of(strategies: Strategies, plugins: Plugins, model: Model, recipe: Recipe) -> tuple[Step, Params]:
    """A step of these strategies on the model, and the fresh adapter."""
    adapter = plugins.get("adapter", "lora").load()(rank=recipe.rank, scale=recipe.scale)
    params = adapter.attach(model, 0)
    model.mark_trainable(params)
    engine = strategies.engine(plugins, model)
    reference = None
    if "ref_logprobs" in engine.requires:
        reference = Reference(engine, reference_params("base", adapter, model, params))
    adamw = plugins.get("optimizer", "adamw").load()
    optimizer = adamw(learning_rate=recipe.learning_rate, weight_decay=0.01, bias_correction=False).build()
    optimizer.init(params)
    mx.eval(params)
    return Step(engine, optimizer, reference), params


def timed_steps(step: Step, params: Params, batches: Sequence[Sequence[Group]], steps: int) -> dict[str, Any]:
    """Seconds of `steps` steps on each batch behind one that does not count, and every loss."""
    seconds: list[float] = []
    found: list[float] = []
    for groups in batches:
        for turn in range(1 + steps):
            start = time.perf_counter()
            loss, params = step(params, groups, len(found))
            if turn:
                seconds.append(time.perf_counter() - start)
            found.append(loss)
    return {"seconds": sum(seconds) / len(seconds), "steps": seconds, "losses": found}


def measure(
    build: Callable[[Plugins], Model], batches: Sequence[Sequence[Group]], strategies: Strategies, recipe: Recipe
) -> dict[str, Any]:
    """Seconds a step, losses, tokens that one step on each batch scores, peak memory with the weights in it,
    floating-point operations of a step and MLX's sgemm rate. Each batch is stepped on by itself."""
    plugins = losses.plugins()
    for strategy in plugins.registry.all():
        strategy.load()  # modules belong to the process, not to the step
    mx.set_cache_limit(recipe.cache_limit)
    meter = PeakMeter()
    model = build(plugins)
    named = model.named_parameters()
    mx.eval(named)
    weights = sum(value.nbytes for value in named.values())
    step, params = step_of(strategies, plugins, model, recipe)
    flops = [step_flops(step.engine, params, batch).total for batch in batches]
    meter.restart()
    found = timed_steps(step, params, batches, recipe.steps) | meter.read(weights)
    found["scored"] = sum(group.scored_tokens for batch in batches for group in batch)
    return found | {"flops": sum(flops) / len(flops), "sgemm": blas.measure(2048) * 1e9}


def pair_step(
    model: str, pairs_file: str, objective: str, backward: str, options: Mapping[str, Any], beta: float,
    recipe: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """A step of `objective` (`orpo`, `dpo`, `sft`) on each pair of a file, prompts shared, head `flash-cce`."""
    name, loss = {
        "orpo": ("orpo", {"beta": beta, "sft_scope": "response"}),  # mlx-lm-lora's NLL is that of the answer
        "dpo": ("benchmark-dpo", {"beta": beta}),
        "sft": ("sft", {}),
    }[objective]
    batches = [[pair.group(objective)] for pair in pairs.read(Path(pairs_file))]
    strategies = Strategies(name, "flash-cce", backward, "prefix-shared", {"loss": loss, "backward": options})
    return measure(lambda plugins: load(model, plugins=plugins).model, batches, strategies, Recipe(**recipe))


def group_step(
    model: str, prompt: int, completions: int, length: int, layout: str, backward: str, recipe: Mapping[str, Any]
) -> dict[str, Any]:
    """A policy-gradient step on one group of random token ids, advantages of both signs that sum to 0."""
    vocab = read_json(Path(model) / "config.json")["vocab_size"]
    strategies = Strategies("benchmark-policy-gradient", "flash-cce", backward, layout)
    group = random_group(prompt, completions, length, vocab)
    return measure(lambda plugins: load(model, plugins=plugins).model, [[group]], strategies, Recipe(**recipe))


def random_step(
    config: Mapping[str, Any], prompt: int, length: int, backward: str, recipe: Mapping[str, Any]
) -> dict[str, Any]:
    """An SFT step on one completion of random token ids behind a prompt, by a model with random weights."""
    strategies = Strategies("sft", "flash-cce", backward, "separate")
    group = random_group(prompt, 1, length, config["vocab_size"])
    return measure(
        lambda plugins: random_model(config, 0, plugins=plugins).model, [[group]], strategies, Recipe(**recipe)
    )


def option_step(
    model: str, prompt: int, length: int, backward: str, options: Mapping[str, Any], mlp_chunk: int,
    recipe: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """An SFT step on one completion of random token ids behind a prompt, with options of the backward."""
    strategies = Strategies("sft", "flash-cce", backward, "separate", {"backward": options}, mlp_chunk)
    group = random_group(prompt, 1, length, read_json(Path(model) / "config.json")["vocab_size"])
    return measure(lambda plugins: load(model, plugins=plugins).model, [[group]], strategies, Recipe(**recipe))


def random_group(prompt: int, completions: int, length: int, vocab: int) -> Group:
    """One prompt of random ids with completions of random ids, each with an advantage."""
    ids: Any = mx.random.randint(0, vocab, (prompt + completions * length,), key=mx.random.key(0)).tolist()
    behind = [ids[prompt + k * length : prompt + (k + 1) * length] for k in range(completions)]
    advantages = [2 * k / max(1, completions - 1) - 1 for k in range(completions)]
    return Group("group", ids[:prompt], [Completion(c, advantage=a) for c, a in zip(behind, advantages)])

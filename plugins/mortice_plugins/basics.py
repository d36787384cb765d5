"""The plain strategies, one plugin that is on unless `[plugins] disable` names it: what a run takes by default."""

from __future__ import annotations

from mortice.hookspecs import hookimpl


@hookimpl
def register_heads(register):
    register(
        "dense",
        "mortice_plugins.heads.dense:Dense",
        help="Full logits at once: the plain twin of every other head.",
        default=True,
    )


@hookimpl
def register_backwards(register):
    register(
        "full", "mortice_plugins.backwards.full:Full", help="One value_and_grad over the whole model.", default=True
    )


@hookimpl
def register_layouts(register):
    register(
        "separate",
        "mortice_plugins.layouts.separate:Separate",
        help="One row for each completion, with its own copy of the prompt.",
        default=True,
    )


@hookimpl
def register_rollouts(register):
    register(
        "kv-cache",
        "mortice_plugins.rollouts.kv_cache:KVCache",
        help="Many answers at once: cached keys and values, shared prompts, continuous batching.",
        default=True,
    )
    register(
        "sequential",
        "mortice_plugins.rollouts.sequential:Sequential",
        help="One answer after the other: the plain engine.",
    )


@hookimpl
def register_adapters(register):
    register(
        "lora", "mortice_plugins.adapters.lora:LoRA", help="Low-rank adapters beside frozen weights.", default=True
    )
    register("full", "mortice_plugins.adapters.full:FullWeights", help="All float weights train.")


@hookimpl
def register_sources(register):
    register(
        "dataset",
        "mortice_plugins.sources.dataset:Dataset",
        help="JSON Lines files; each row once an epoch, in a seeded order.",
        default=True,
    )
    register(
        "rollout",
        "mortice_plugins.sources.rollout:Rollout",
        help="Answers sampled from the policy, rewarded, and trained on.",
    )


@hookimpl
def register_optimizers(register):
    register(
        "adamw",
        "mortice_plugins.optimizers.adam:AdamW",
        help="Adam with decoupled weight decay and bias correction.",
        default=True,
    )
    register("adam", "mortice_plugins.optimizers.adam:Adam", help="Adam with bias correction.")


@hookimpl
def register_schedules(register):
    register(
        "cosine",
        "mortice_plugins.schedules.warmup:Cosine",
        help="Warm up, then a half cosine down to `final` times the peak.",
        default=True,
    )
    register(
        "linear",
        "mortice_plugins.schedules.warmup:Linear",
        help="Warm up, then a straight line down to `final` times the peak.",
    )
    register("constant", "mortice_plugins.schedules.warmup:Constant", help="Warm up, then the peak.")


@hookimpl
def register_trackers(register):
    register(
        "progress",
        "mortice_plugins.trackers.progress:Progress",
        help="A progress bar with loss, tokens/s, memory and time left.",
        default=True,
    )
    register(
        "jsonl",
        "mortice_plugins.trackers.jsonl:JSONLines",
        help="metrics.jsonl in the run folder, one line a step.",
        default=True,
    )

"""From a configuration to a run: the one place where strategies are put together.

The order is chosen so that a mistake costs nothing: options and requirements, then the model's structure and what
trains of it, then the data, and only then are weights read and memory spent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen

from mortice import blas
from mortice.errors import ConfigError
from mortice.sizes import readable

if TYPE_CHECKING:
    from mortice.batch import Group
    from mortice.budget import Fitted
    from mortice.checkpoint import RunFolder
    from mortice.config import RunConfig
    from mortice.planning import Estimate
    from mortice.pretrained import Pretrained
    from mortice.protocols import Adapter, LiveSource, Policy, Sampling
    from mortice.reference import Reference
    from mortice.step import Engine
    from mortice.tables import TrainOptions
    from mortice.trainer import Outcome, Signals, Trainer


@define
class Notices:
    """What strategies report while a run is set up and run: shown once, counts kept for the metrics."""

    messages: list[str] = field(factory=list)
    counts: dict[str, int] = field(factory=dict)
    show: Any = None
    progress: Callable[[str], None] = lambda _: None
    """Takes what long work is at; not kept."""

    def __call__(self, message: str, /, *, count: tuple[str, int] | None = None) -> None:
        if count is not None:
            self.counts[count[0]] = self.counts.get(count[0], 0) + count[1]
        if message and message not in self.messages:
            self.messages.append(message)
            if self.show is not None:
                self.show(message)


@frozen(eq=False)
class Prepared:
    """A run before its first step."""

    config: RunConfig
    pretrained: Pretrained
    adapter: Adapter
    policy: Policy
    source: LiveSource
    engine: Engine
    total_steps: int
    notices: Notices
    signals: Signals
    head_params: frozenset[str] = frozenset()
    """Parameters that the head brought, not the adapter."""
    reference: Reference | None = None
    """The reference policy, where a loss needs one."""
    fitted: Fitted | None = None
    """What was changed for `[train] memory_limit`."""

    @property
    def trainable(self) -> int:
        return sum(value.size for value in self.policy.params.values())

    def groups(self) -> Sequence[Group]:
        """All groups of the run, or some as large as any. Raises ConfigError where the source knows neither yet."""
        known = getattr(self.source, "known", None) or getattr(self.source, "largest", None)
        if known is None:
            name, asks = self.config.all("source")[0].name, "mortice plan"
            if self.config.train.memory_limit is not None:
                asks = f"{self.config.file.where(('train', 'memory_limit'))}train.memory_limit"
            raise ConfigError(
                f"{asks}: nothing can be measured, since the source {name!r} does not know its groups before the run "
                "(one that does gives them in known(), others may give the largest in largest())"
            )
        return known()

    @property
    def parameters(self) -> int:
        """All weights of the model, what the adapter adds included; quantized ones counted unpacked."""
        return self.pretrained.size + sum(
            value.size for name, value in self.policy.params.items() if name not in self.pretrained.names
        )


def prepare(config: RunConfig, notices: Notices | None = None, *, train: bool = False) -> Prepared:
    """Check everything and build what a run needs. Weights are mapped, not yet read.

    To `train`, a reference that is another model is scored here: it has to be gone before weights are read.

    Raises ConfigError, CheckpointError, DataError or PluginError for whatever is wrong.
    """
    blas.load()
    import mlx.core as mx

    from mortice.config import check_requirements
    from mortice.data import check_scores, check_vocabulary
    from mortice.pretrained import load, random_model
    from mortice.protocols import Policy, SourceContext
    from mortice.reference_policy import reference_of_run
    from mortice.rewards import named
    from mortice.trainer import Signals
    from mortice.warm_start import attach_adapter, attach_head

    notices = notices or Notices()
    for message in (*config.notices, *(plugin.failure() for plugin in config.plugins.failed)):
        notices(message)
    check_requirements(config)
    seed = config.train.seed
    weights = config.model.config if config.model.init == "random" else config.model.path
    assert weights is not None  # checked by ModelOptions
    if config.model.init == "random":
        pretrained = random_model(weights, seed, plugins=config.plugins, dtype=config.model.dtype)
    else:
        pretrained = load(weights, plugins=config.plugins, dtype=config.model.dtype)
    notices(pretrained.left_out)
    model = pretrained.model

    config, params = attach_adapter(config, model)
    adapter = config.adapter
    head_params = attach_head(config, model)
    params |= head_params
    if not params:
        raise ConfigError("adapter: nothing would train (0 trainable parameters)")
    model.mark_trainable(params)

    engine = make_engine(config, model)
    policy = Policy(model, params, engine.temperature)
    signals = Signals()
    tokenizer = pretrained.tokenizer
    if tokenizer is None:
        raise ConfigError(f"model.path: {pretrained.path} has no tokenizer.json, which training on text needs")
    tokenizer = tokenizer.using(config.model.chat_template, config.model.template_variables)
    source = config.source.open(
        SourceContext(
            data=config.data,
            format=config.format,
            tokenizer=tokenizer,
            batch_size=config.train.batch_size,
            seed=seed,
            report=notices,
            requires=engine.requires,
            rollout=config.rollout,
            sampling=sampling_of(config, tokenizer.eos_ids),
            rewards=named([(chosen.name, chosen.options) for chosen in config.all("reward")]),
            task=config.task,
            folder=config.run_path,
            policy=policy,
            poll=signals.poll,
            formats=config.formats,
            filters=config.filters,
        )
    )
    if not config.samples:
        unused = [f"[{table}]" for table in ("rollout", "reward", "task") if config.all(table)]
        if unused:
            name = config.all("source")[0].name
            notices(f"source {name!r} samples nothing; {', '.join(unused)} changes nothing")
    if config.controllers and not source.can_validate:
        names = ", ".join(name for name, _ in config.controllers)
        raise ConfigError(f"controller {names}: controllers go by validation, and there is none (data.valid)")
    known = getattr(source, "known", None)
    if known is not None:
        check_vocabulary(known(), model.output.vocab)
        if "scores" in engine.requires:
            check_scores(known())
    total = _total_steps(config, source)
    reference = None
    if "ref_logprobs" in engine.requires:
        own = {name: value for name, value in params.items() if name not in head_params}
        reference = reference_of_run(config, pretrained, adapter, own, engine, source, tokenizer, notices)
        if train and reference.other is not None:
            reference.score_other(source, total, config.train.batch_size, notices)
    elif any(key[0] == "reference" for key in config.file.origins):
        notices("no loss of this run needs a reference; [reference] changes nothing")
    for value in params.values():
        mx.eval(value)  # one after the other: a weight that is cast to train is held in both types meanwhile
    ready = Prepared(
        config, pretrained, adapter, policy, source, engine, total, notices, signals, frozenset(head_params),
        reference,
    )  # fmt: skip
    return ready if config.train.memory_limit is None else _within(ready, config.train.memory_limit)


def _within(ready: Prepared, limit: str) -> Prepared:
    """The same run with options that keep it within `[train] memory_limit`. Raises ConfigError where none do."""
    from mortice.budget import Search, fit

    notices = ready.notices
    notices(f"finding out what fits {limit}")
    search = Search(
        ready.config, ready.pretrained.model, ready.policy.params, ready.groups(), make_engine, notices.progress
    )
    fitted = fit(search, limit)
    for reason in fitted.reasons:
        notices(f"memory_limit: {reason}")
    notices(f"predicted peak: {readable(fitted.estimate.peak)} of {limit}")
    engine = make_engine(fitted.config, ready.pretrained.model)
    if ready.reference is not None:
        ready.reference.engine = engine
    return evolve(ready, config=fitted.config, engine=engine, fitted=fitted)


def plan(ready: Prepared) -> Estimate:
    """What a prepared run will need: measured on a few layers of its model and the longest rows of its data."""
    from mortice.planning import estimate, workload

    if ready.fitted is not None:
        return ready.fitted.estimate
    config = ready.config
    work = workload(ready.engine, ready.groups(), config.train.batch_size)
    return estimate(
        ready.engine, ready.policy.params, config.optimizer.build(), work, tell=ready.notices.progress
    )  # fmt: skip


def make_engine(config: RunConfig, model: Any) -> Engine:
    """The strategies of a configuration around a model that is already built."""
    from mortice.batch import Limits
    from mortice.objective import WeightedLoss
    from mortice.step import Engine

    names = config.loss_names
    losses = tuple(WeightedLoss(name, loss, weight) for name, (weight, loss) in zip(names, config.losses))
    chunk = config.context.attention_chunk
    return Engine(
        model=model,
        head=config.head,
        backward=config.backward,
        layout=config.layout,
        losses=losses,
        limits=Limits(groups=config.train.micro_batch_size),
        attention_chunk=chunk if isinstance(chunk, int) else None,
        mlp_chunk=config.context.mlp_chunk,
        temperature=config.sampling.temperature if config.samples else 1.0,
    )


def sampling_of(config: RunConfig, eos_ids: Sequence[int]) -> Sampling:
    """The options of `[rollout]` as an engine takes them."""
    from attrs import asdict

    from mortice.protocols import Sampling

    options = asdict(config.sampling)
    return Sampling(**{**options, "stop": tuple(options["stop"])}, seed=config.train.seed, eos_ids=tuple(eos_ids))


def cache_bytes(limit: float | None) -> int:
    """`[train] cache_limit` in bytes. Without one 32 MB on the CPU, 2 GB on a GPU.

    Rows of every length leave blocks that fit none of the next. On the CPU a cache of 2 GB made no step faster, some
    twice as slow, and the process larger by what it held.
    """
    from mortice.linear import on_cpu

    if limit is None:
        limit = 0.032 if on_cpu() else 2.0
    return int(limit * 1e9)


def _total_steps(config: RunConfig, source: LiveSource) -> int:
    if config.train.steps is not None:
        return config.train.steps
    epochs = 1.0 if config.train.epochs is None else config.train.epochs
    if source.steps_per_epoch is None:
        raise ConfigError("train.epochs: this source has no epochs; set train.steps")
    return max(1, math.ceil(epochs * source.steps_per_epoch))


def train(config: RunConfig, notices: Notices | None = None) -> Outcome:
    """Run a configuration to its end (or to a signal) and say how it went.

    Raises what `prepare` does, TrainingError where the run cannot go on.
    """
    blas.load()

    from mortice import provenance
    from mortice.checkpoint import RunFolder

    prepared = prepare(config, notices, train=True)
    config = prepared.config
    options, best = _checked(prepared)
    with RunFolder.create(
        config.run_path, config.effective_toml(), keep=options.keep, best_mode=options.best_mode or "min",
        keep_every=options.keep_every,
    ) as folder:  # fmt: skip
        provenance.write(folder.path, provenance.provenance(config, prepared.total_steps))
        return _run(prepared, options, folder, best)


def _checked(prepared: Prepared) -> tuple[TrainOptions, str | None]:
    """The options of the loop and the metric that `best` goes by. Raises ConfigError where validation lacks."""
    config, notices = prepared.config, prepared.notices
    options = config.train
    default, mode = getattr(prepared.source, "best", ("valid/loss", "min"))
    best = options.best or (default if prepared.source.can_validate else None)
    if options.best_mode is None:
        options = evolve(options, best_mode=mode if options.best is None else "min")
    if options.best and not prepared.source.can_validate:
        raise ConfigError(f"train.best is {options.best!r}, but there is no validation data (data.valid)")
    share = f"trainable parameters: {prepared.trainable:,} of {prepared.parameters:,}"
    notices(f"{share} ({prepared.trainable / prepared.parameters:.3%})")
    return options, best


def _run(
    prepared: Prepared, options: TrainOptions, folder: RunFolder, best: str | None,
    restore: Callable[[Trainer], None] = lambda trainer: None,
) -> Outcome:  # fmt: skip
    """The loop of a prepared run in its folder, from the start or from where `restore` puts it."""
    from mortice.protocols import RunInfo
    from mortice.trainer import Pace, Trainer

    config, notices, total = prepared.config, prepared.notices, prepared.total_steps
    engine = prepared.engine
    trainer = Trainer(
        engine=engine,
        policy=prepared.policy,
        adapter=prepared.adapter,
        optimizer=config.optimizer.build(),
        learning_rate=config.schedule.build(config.optimizer.learning_rate, total),
        source=prepared.source,
        folder=folder,
        pace=Pace(
            total=total,
            validate_every=options.validate_every or max(1, total // 10),
            save_every=options.save_every,
            clip_norm=options.clip_norm,
            max_nonfinite=options.max_nonfinite,
            best=best,
            best_mode=options.best_mode or "min",
        ),
        seed=options.seed,
        signals=prepared.signals,
        hook=config.plugins.hook,
        reference=prepared.reference,
        trackers=config.trackers,
        controllers=config.controllers,
        head_params=prepared.head_params,
        override=lambda changes: make_engine(config.with_overrides(changes), engine.model),
        notices=lambda: notices.counts,
        count_notices=notices.counts.update,
    )
    restore(trainer)
    info = RunInfo(folder.path, total, prepared.trainable, prepared.parameters, config, trainer.step, trainer.restored)
    shown, notices.show = notices.show, trainer.say
    try:
        with _allocator(options.cache_limit, prepared.fitted):
            return trainer.run(info)
    finally:
        notices.show = shown  # else run and notices hold each other, and the model with them


@contextmanager
def _allocator(cache_limit: float | None, fitted: Fitted | None) -> Iterator[None]:
    """MLX's allocator, within the limits of a run.

    MLX runs up to ten operations ahead of the one that computes, and holds what they write: on a busy machine more
    than on an idle one. Above its memory limit it waits instead.
    """
    import mlx.core as mx

    cache = cache_bytes(cache_limit)
    if fitted is not None and cache_limit is None:
        cache = min(cache, fitted.spare)
    cache_before, memory_before = mx.set_cache_limit(cache), mx.set_memory_limit(0)
    mx.set_memory_limit(memory_before if fitted is None else min(memory_before, fitted.room))
    try:
        yield
    finally:
        mx.set_cache_limit(cache_before)
        mx.set_memory_limit(memory_before)


def resume(
    path: str | Path, *, settings: Sequence[str] = (), force: bool = False, notices: Notices | None = None
) -> Outcome:
    """Go on with the run in a folder, from its last whole checkpoint, as if it had never stopped.

    `settings` are `table.key=value` strings. What the run was made with must be what it was, but for settings that
    change no step (`mortice.provenance.FREE`), unless `force`. A damaged checkpoint is set aside and the one before it
    is taken; a run that has none begins anew.

    Raises ConfigError for a folder without a run, a run that is complete, or one that has changed; and what `train`
    does.
    """
    blas.load()

    from mortice import atomic, provenance
    from mortice.checkpoint import RunFolder
    from mortice.config import load_config

    notices = notices or Notices()
    with RunFolder.open(Path(path)) as folder:
        config = load_config(folder.path / "run.toml", settings=settings)
        config = evolve(config, run_path=folder.path)
        prepared = prepare(config, notices, train=True)
        config = prepared.config
        total = prepared.total_steps
        old, new = provenance.read(folder.path), provenance.provenance(config, total)
        grave, light = provenance.differences(old, new)
        if grave and not force:
            raise ConfigError(
                "\n  ".join([f"{folder.path}: this is not the run that stopped", *grave])
                + "\nbring back what it was, or go on all the same with --force"
            )
        for line in (*grave, *light):
            notices(f"changed: {line}")
        options, best = _checked(prepared)
        folder.keep, folder.best_mode, folder.keep_every = options.keep, options.best_mode or "min", options.keep_every

        def restore(trainer: Trainer) -> None:
            step = _restore(trainer, folder, notices, force=force)
            if step >= total:
                raise ConfigError(
                    f"{folder.path} is complete: it has done {step} of {total} steps (more: --set train.steps=N)"
                )
            if old["total_steps"] != total:
                before = config.schedule.build(config.optimizer.learning_rate, old["total_steps"])
                notices(
                    f"total steps {old['total_steps']} → {total}: the learning rate of step {step + 1} is "
                    f"{trainer.learning_rate(step):.3g}, it was {before(min(step, old['total_steps'] - 1)):.3g}"
                )
            atomic.write_text(folder.path / "run.toml", config.effective_toml())
            provenance.write(folder.path, new)

        return _run(prepared, options, folder, best, restore)


def _restore(trainer: Trainer, folder: RunFolder, notices: Notices, *, force: bool) -> int:
    """Put the trainer where the newest whole checkpoint is; the step, 0 where there is none."""
    from mortice.checkpoint import load_checkpoint
    from mortice.errors import CheckpointError

    for path in reversed(folder.checkpoints()):
        try:
            trainer.restore(load_checkpoint(path), path, force=force)
        except CheckpointError as error:
            aside = folder.set_aside(path)
            notices(f"{error}; it is set aside as {aside.name}, and the one before it is taken")
            continue
        notices(f"going on from step {trainer.step}")
        return trainer.step
    notices("there is no whole checkpoint: the run begins anew")
    return 0


def run(
    file: str | Path | Mapping[str, Any],
    *,
    settings: Sequence[str] = (),
    strategies: Mapping[str, str] | None = None,
) -> Outcome:
    """Train from a run file, or from a mapping of the same tables (paths in it are relative to the working directory).

    `settings` are `table.key=value` strings, `strategies` names by kind (`{"loss": "sft"}`): the flags of
    `mortice train`.
    """
    blas.load()
    from mortice.config import config_from_dict, load_config

    if isinstance(file, Mapping):
        config = config_from_dict(file, settings=settings, strategies=strategies or {})
    else:
        config = load_config(file, settings=settings, strategies=strategies or {})
    return train(config)

"""The training loop: pull groups, take their gradient, step, validate, save.

The trainer knows nothing of where groups come from, what a loss is or how a gradient is made: those are the
source's, the losses' and the engine's. What it owns is time: the order of things, when to validate and save, what to
do with a non-finite gradient, and how a run ends.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from attrs import define, field, frozen
from mlx.utils import tree_flatten

from mortice import atomic
from mortice.batch import Gradients, Group
from mortice.checkpoint import Checkpoint, RunFolder
from mortice.context import Randomness
from mortice.errors import CheckpointError, ConfigError, DataError, TrainingError, suggest
from mortice.objective import Statistics
from mortice.pretrained import some
from mortice.protocols import (
    Adapter,
    Controller,
    LiveOptimizer,
    LiveSource,
    LiveTracker,
    Params,
    Policy,
    RunInfo,
    Tracker,
)
from mortice.reference import Reference, coming
from mortice.step import Engine, clip, restored_statistics, saved_statistics


@frozen
class Pace:
    """When things happen, in optimizer steps."""

    total: int
    validate_every: int
    save_every: int
    clip_norm: float = 1.0
    max_nonfinite: int = 5
    best: str | None = None
    best_mode: str = "min"


@frozen
class Outcome:
    """How a run ended."""

    path: Path
    """The run folder."""
    steps: int
    """Optimizer steps done in all."""
    metrics: Mapping[str, float]
    """Of the last step."""
    before: Mapping[str, float]
    """Validation before the first step."""
    after: Mapping[str, float]
    """Validation at the end."""
    checkpoint: Path | None
    """The newest checkpoint."""
    signal: int | None = None
    """The signal that ended the run early."""
    tokens: int = 0
    seconds: float = 0.0
    """Spent in training steps."""
    peak_gb: float = 0.0
    """The highest peak of MLX's memory in any training step, in GB (10⁹ bytes)."""


class Stopped(Exception):
    """Raised at a safe place after a signal: the step that was running is abandoned."""


class Signals:
    """SIGINT and SIGTERM ask for a clean end; the second one ends the process at once, touching no file."""

    def __init__(self) -> None:
        self.received: int | None = None

    def poll(self) -> None:
        """Raise Stopped once a signal has come."""
        if self.received is not None:
            raise Stopped

    def _handle(self, number: int, _frame: Any) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number

    @contextmanager
    def listening(self) -> Iterator[Signals]:
        """Take the signals over, where this is the main thread, and give them back."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        old = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


@define(eq=False)
class Trainer:
    """One run. Everything it is given is already built; what changes in a run is kept here and in checkpoints."""

    engine: Engine
    policy: Policy
    adapter: Adapter
    optimizer: LiveOptimizer
    learning_rate: Callable[[int], float]
    """Of each optimizer step, counted from 0."""
    source: LiveSource
    folder: RunFolder
    pace: Pace
    seed: int
    signals: Signals
    hook: Any
    reference: Reference | None = None
    trackers: Sequence[Tracker] = ()
    controllers: Sequence[tuple[str, Controller]] = ()
    override: Callable[[Mapping[str, Any]], Engine] | None = None
    """Dotted options to the engine that runs with them, for controllers."""
    head_params: frozenset[str] = frozenset()
    """Parameters that the head attached, and saves itself."""
    notices: Callable[[], Mapping[str, int]] = dict
    """What was counted outside the loop and belongs in every line of metrics."""

    count_notices: Callable[[Mapping[str, int]], None] = lambda counts: None
    """Takes the counts of a run that goes on."""

    restored: bool = False
    step: int = 0
    turn: int = 0
    """Pass over the groups of one pull."""
    left: int = 0
    """Passes of that pull that come."""
    tokens: int = 0
    seconds: float = 0.0
    peak_gb: float = 0.0
    nonfinite: int = 0
    nonfinite_in_a_row: int = 0
    controller_state: dict[str, Mapping[str, Any]] = field(factory=dict)
    overrides: dict[str, Any] = field(factory=dict)
    """Options that controllers have changed so far."""
    start: dict[str, float] = field(factory=dict)
    """The first validation."""
    past: Statistics = field(factory=dict)
    """Of past steps: what losses go by that are told of these."""
    _live: list[LiveTracker] = field(factory=list)
    _best: float | None = None
    _saved_step: int | None = None
    _valid: dict[str, float] = field(factory=dict)
    _valid_step: int | None = None

    @property
    def params(self) -> Params:
        return self.policy.params

    def restore(self, checkpoint: Checkpoint, path: Path, *, force: bool = False) -> None:
        """Be where a run was that saved this checkpoint in `path`. Raises CheckpointError where it does not fit,
        DataError where the source has other data, unless `force`."""
        state = checkpoint.state
        own = {name: value for name, value in self.params.items() if name not in self.head_params}
        wrong = [n for n in self.head_params if n not in checkpoint.weights]
        if wrong:
            raise CheckpointError(f"{path} lacks weights of the head: {', '.join(sorted(wrong))}")
        try:
            params = self.adapter.load(self.engine.model, path / "adapter", own)
            params |= {name: checkpoint.weights[name] for name in self.head_params}
            mx.eval(params)
        except RuntimeError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        self.policy.params = params
        self.engine.model.bind(params)
        self.optimizer.init(params)
        lacking = {name for name, _ in tree_flatten(self.optimizer.state)} ^ set(checkpoint.optimizer)
        if lacking:
            raise CheckpointError(f"{path} holds the state of another optimizer: {some(sorted(lacking))}")
        _fill(self.optimizer.state, checkpoint.optimizer)
        self.step = self._saved_step = checkpoint.step
        self.restored = True
        for name in ("turn", "left", "tokens", "seconds", "peak_gb", "nonfinite", "nonfinite_in_a_row"):
            setattr(self, name, state[name])
        try:
            self.source.restore(state["source"])
        except DataError:
            if not force:
                raise
        self.controller_state, self.overrides = dict(state["controllers"]), dict(state["overrides"])
        if self.overrides:
            assert self.override is not None
            self.engine = self.override(self.overrides)
        self.start, self._best = dict(state["start"]), state["best"]
        self._valid, self._valid_step = dict(state["valid"]), state["valid_step"]
        self.past = restored_statistics(self.engine.losses, state["statistics"])
        self.count_notices(state["notices"])

    def run(self, info: RunInfo) -> Outcome:
        """Train to the end or to a signal, from the start or from where `restore` has put it. The run folder holds a
        complete state either way.

        Raises TrainingError after `max_nonfinite` non-finite gradients in a row.
        """
        if not self._going_on:
            self.optimizer.init(self.params)
        self.policy.logprobs = lambda groups: self.engine.logprobs(self.params, groups, as_trained=True)
        metrics: Mapping[str, float] = {}
        before: Mapping[str, float] = {}
        error: BaseException | None = None
        with self.signals.listening(), ExitStack() as stack:
            stack.callback(getattr(self.source, "close", lambda: None))
            self._live = [stack.enter_context(tracker.open(info)) for tracker in self.trackers]
            self.hook.on_run_start(run=info)
            try:
                try:
                    if self.reference is not None:
                        self._score_ahead(self.reference)
                    if self._going_on:
                        before = self.start
                        self._catch_up()
                    else:
                        before = self._validate()
                    if self.reference is not None:
                        self.reference.settle()
                    self._watched()  # a metric that validation lacks is found before the first step
                    for groups, turn in self._turns():
                        self.turn = turn
                        metrics = self._train_step(groups)
                        if self.step % self.pace.validate_every == 0 or self.step == self.pace.total:
                            self._validate()
                        improved = self._improved()
                        if improved or self.step % self.pace.save_every == 0:
                            self._save()
                        self.signals.poll()
                except Stopped:
                    pass
                checkpoint = self._save()
                self._refuse_ruin(metrics)
                self._write_weights(self.folder.path / "adapter")
            except BaseException as caught:
                error = caught
                raise
            finally:
                self.policy.logprobs = None  # it holds the trainer
                self.hook.on_run_end(run=info, error=error)
        return Outcome(
            self.folder.path, self.step, metrics, before, self._valid, checkpoint, self.signals.received,
            self.tokens, self.seconds, self.peak_gb,
        )  # fmt: skip

    @property
    def _going_on(self) -> bool:
        """Whether the run is restored, beyond its first validation."""
        return self.restored and bool(self.step or self.start)

    def _catch_up(self) -> None:
        """What a run that went through has behind it at this step: scores of the reference for what is held out, and
        the validation of this step, where a signal came before it."""
        if self.reference is not None and self.reference.known and self.source.can_validate:
            self.source.validate(self._only_score)
        due = self.step % self.pace.validate_every == 0 or self.step == self.pace.total
        if due and self.step and self._valid_step != self.step:
            self._validate()
            if self._improved():
                assert self._best is not None
                self.folder.mark_best(self.step, self._best)

    def _turns(self) -> Iterator[tuple[Sequence[Group], int]]:
        """Groups of each optimizer step. A pull may serve several passes; a run may end inside them."""
        while self.step < self.pace.total:
            groups, passes = self.source.next(self.step)
            if not groups or passes < 1:
                raise TrainingError(
                    f"the source gave {len(groups)} groups and {passes} passes for step {self.step + 1}"
                )
            if self.step < self.pace.total:
                groups = self._with_reference(groups, training=True)  # one scoring for all passes
            first = self.turn + 1 if self.left else 0  # a run that goes on may stand between two passes
            for turn in range(first, passes):
                if self.step < self.pace.total:
                    self.left = passes - turn - 1
                    yield groups, turn

    def _train_step(self, groups: Sequence[Group]) -> Mapping[str, float]:
        start = time.perf_counter()
        mx.reset_peak_memory()
        randomness = Randomness(self.seed, self.step, self.turn)
        tally, gradients = self.engine.gradients(self.params, groups, randomness, self.signals.poll, self.past)
        rate = self.learning_rate(self.step)
        norm = self._update(gradients, rate)
        self.past = self.engine.past_after(self.past, tally)
        seconds = time.perf_counter() - start
        self.step += 1
        self.tokens += tally.tokens
        self.seconds += seconds
        held = memory()
        self.peak_gb = max(self.peak_gb, held["memory_peak_gb"])
        metrics = {
            **tally.values(),
            "learning_rate": rate,
            "grad_norm": norm,
            "tokens": tally.tokens,
            "seconds": seconds,
            "tokens_per_second": tally.tokens / seconds,
            **held,
            "nonfinite_steps": self.nonfinite,
            **getattr(self.source, "metrics", dict)(),
            **self.notices(),
        }
        self._log(metrics)
        self.hook.on_step_end(step=self.step, metrics=metrics)
        if self.nonfinite_in_a_row >= self.pace.max_nonfinite:
            self._save()
            raise TrainingError(
                f"the gradient was not finite in {self.nonfinite_in_a_row} steps in a row (up to step {self.step}). "
                f"{self._last_good()}. Lower the learning rate, or look at the data of these steps"
            )
        return metrics

    def _refuse_ruin(self, metrics: Mapping[str, float]) -> None:
        """Raises TrainingError where a run ends on weights that give no finite loss: that is no success."""
        validated = self._valid_step == self.step and "loss" in self._valid
        loss = self._valid["loss"] if validated else metrics.get("loss", 0.0)
        if not math.isfinite(loss):
            what = "validation" if validated else "training"
            raise TrainingError(
                f"the run ended at step {self.step} with a {what} loss of {loss}. {self._last_good()}. "
                "Lower the learning rate, or look at the data"
            )

    def _last_good(self) -> str:
        best = self.folder.best()
        if best is not None:
            return f"The best checkpoint with a finite loss is {best}"
        return f"Checkpoints are in {self.folder.path / 'checkpoints'}; none of them is known to be good"

    def _update(self, gradients: Gradients, rate: float) -> float:
        """Clip and apply; the norm before clipping. A non-finite gradient changes neither weights nor moments."""
        gradients, norm = clip(gradients, self.pace.clip_norm)
        if not math.isfinite(norm):
            self.nonfinite += 1
            self.nonfinite_in_a_row += 1
            self.say(f"step {self.step + 1}: the gradient is not finite (norm {norm}); the step is skipped")
            return norm
        self.nonfinite_in_a_row = 0
        self.optimizer.learning_rate = rate
        self.policy.params = self.optimizer.apply_gradients(gradients, self.params)
        mx.eval(self.params, self.optimizer.state)
        self.engine.model.bind(self.params)  # whoever samples from the model sees the new weights
        return norm

    def _validate(self) -> Mapping[str, float]:
        """Validation metrics at this step, once. Controllers see them and may change options."""
        if not self.source.can_validate or self._valid_step == self.step:
            return self._valid
        start = time.perf_counter()
        found = self.source.validate(self._evaluate)
        self._valid, self._valid_step = {**found, **self._since_start(found)}, self.step
        self._log(
            {f"valid/{name}": value for name, value in self._valid.items()}
            | {"valid/seconds": time.perf_counter() - start}
        )
        self._control()
        return self._valid

    def _since_start(self, found: Mapping[str, float]) -> dict[str, float]:
        """By how much metrics that a loss names have changed since the first validation, which is remembered."""
        if not self.start:
            self.start = dict(found)
        named = {name: source for loss in self.engine.losses for name, source in loss.from_start.items()}
        both = found.keys() & self.start.keys()
        return {name: found[s] - self.start[s] for name, s in named.items() if s in both and name not in found}

    def _evaluate(self, groups: Sequence[Group]) -> dict[str, float]:
        groups = self._with_reference(groups, training=False)
        return self.engine.evaluate(self.params, groups, self.signals.poll, self.past).values()

    def _only_score(self, groups: Sequence[Group]) -> dict[str, float]:
        self._with_reference(groups, training=False, exact=True)
        return {}

    def _score_ahead(self, reference: Reference) -> None:
        """The groups of training under the reference; those held out follow when they are first evaluated."""
        # From the first step on, wherever the run stands: so every score is that of a run that went through.
        steps = coming(self.source, 0, self.pace.total) if reference.known else ()
        reference.ahead(steps, exact=True, poll=self.signals.poll, tell=self.say)

    def _with_reference(
        self, groups: Sequence[Group], *, training: bool, exact: bool | None = None
    ) -> Sequence[Group]:  # fmt: skip
        """Groups with the reference's log-probabilities, where a loss needs them. The policy is bound again.

        At step 0 the policy may be its own reference, and equal to the last bit; later only rounding is at stake.
        """
        if self.reference is None:
            return groups
        filled = self.reference.fill(groups, training=training, exact=self.step == 0 if exact is None else exact)
        self.engine.model.bind(self.params)
        return filled

    def _control(self) -> None:
        for name, controller in self.controllers:
            overrides, state = controller(self.step, self._valid, self.controller_state.get(name, {}))
            self.controller_state[name] = state
            if overrides:
                assert self.override is not None
                self.overrides |= overrides
                self.engine = self.override(self.overrides)
                self._log({f"{name}/{key}": value for key, value in overrides.items()})

    def _watched(self) -> float | None:
        """The metric that `best` goes by, where this step was validated."""
        if self.pace.best is None or self._valid_step != self.step:
            return None
        name = self.pace.best.removeprefix("valid/")
        if name not in self._valid:
            raise ConfigError(
                f"train.best: validation has no metric {name!r}{suggest(name, self._valid)} "
                f"(it has {', '.join(sorted(self._valid))})"
            )
        return self._valid[name]

    def _improved(self) -> bool:
        """Whether this step's validation is the best so far: worth a checkpoint of its own. NaN never is."""
        value = self._watched()
        if value is None or math.isnan(value):
            return False
        better = self._best is None or (value < self._best if self.pace.best_mode == "min" else value > self._best)
        if better:
            self._best = value
        return better

    def _save(self) -> Path | None:
        """A complete state of this step, unless it is on disk already."""
        if self._saved_step == self.step:
            return self.folder.newest()
        checkpoint = Checkpoint(
            step=self.step,
            optimizer=dict(tree_flatten(self.optimizer.state)),
            state={
                "seed": self.seed,
                "turn": self.turn,
                "left": self.left,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "peak_gb": self.peak_gb,
                "nonfinite": self.nonfinite,
                "nonfinite_in_a_row": self.nonfinite_in_a_row,
                "source": self.source.state(),
                "controllers": dict(self.controller_state),
                "overrides": dict(self.overrides),
                "start": self.start,
                "best": self._best,
                "valid": dict(self._valid),
                "valid_step": self._valid_step,
                "notices": dict(self.notices()),
                "statistics": saved_statistics(self.engine.losses, self.past),
            },
            weights={name: self.params[name] for name in self.head_params},
        )
        path = self.folder.save(checkpoint, self._write_weights, self._watched())
        self._saved_step = self.step
        self.hook.on_checkpoint(step=self.step, path=path)
        return path

    def _write_weights(self, folder: Path) -> None:
        """The adapter's folder, and in it what the head trains."""
        own = {name: value for name, value in self.params.items() if name not in self.head_params}
        if not self.head_params:
            self.adapter.save(self.engine.model, own, folder)
            return
        head: Any = self.engine.head
        with atomic.writing_folder(folder) as part:
            self.adapter.save(self.engine.model, own, part)
            head.save({name: self.params[name] for name in self.head_params}, part)

    def _log(self, metrics: Mapping[str, float]) -> None:
        for tracker in self._live:
            tracker.log(self.step, metrics)

    def say(self, message: str) -> None:
        """Show a notice through the trackers that can."""
        for tracker in self._live:
            getattr(tracker, "say", lambda _: None)(message)


def _fill(state: Any, saved: Mapping[str, mx.array], prefix: str = "") -> None:
    """Put saved arrays, flattened, in the places of a state's own."""
    for key, value in list(state.items() if isinstance(state, dict) else enumerate(state)):
        if isinstance(value, (dict, list)):
            _fill(value, saved, f"{prefix}{key}.")
        else:
            state[key] = saved[f"{prefix}{key}"]


def memory() -> dict[str, float]:
    """MLX's peak since the step began, what is held now, what its allocator caches, and what the process has resident,
    in GB (10⁹ bytes)."""
    return {
        "memory_peak_gb": mx.get_peak_memory() / 1e9,
        "memory_active_gb": mx.get_active_memory() / 1e9,
        "memory_cache_gb": mx.get_cache_memory() / 1e9,
        "memory_rss_gb": resident() / 1e9,
    }


def resident() -> int:
    """Resident memory of this process in bytes: on Linux what it is now, elsewhere the most that it has been."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # macOS counts bytes, others KiB

"""The shape of each kind of plugin.

A strategy is one frozen attrs class: its fields are its options, its docstring is what `mortice
describe` prints, and the methods below are its contract. Options are frozen; whatever changes during
a run is returned by `open` (sources, trackers) or passed in and out (controllers).

Two class attributes are optional in every kind. `leaner` maps an option that trades memory to its values, most memory
first (`{"segment_size": (8, 4, 2, 1)}`): among these `[train] memory_limit` may choose. `examples` holds configured
instances (of a model adapter: config.json mappings of tiny models), with which a strategy whose options have no default
joins the tests of all combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from attrs import define, field, frozen

from mortice.batch import Batch, Completion, Example, Gradients, Group, Limits, LossOutput, MicroBatch, TokenLogprobs

if TYPE_CHECKING:
    import mlx.core as mx

    from mortice.context import SpanContext
    from mortice.model import Model, Output
    from mortice.objective import Objective, ObjectiveResult
    from mortice.rewards import NamedReward
    from mortice.tokenizer import Tokenizer

Params: TypeAlias = "dict[str, mx.array]"
"""Trainable parameters by full name."""
Metrics: TypeAlias = Mapping[str, float]


@runtime_checkable
class Loss(Protocol):
    """A pure function of log-probabilities. No I/O, no `.item()`, no state.

    `requires` (a class attribute or a property of the configured instance) names what it needs of the batch:
    `pairs`, `groups` (K > 1), `labels`, `scores` (ratings of all answers), `ref_logprobs`, `old_logprobs`,
    `sampler_logprobs`, `advantages`, `prompt_logprobs`, `entropy`, `values` (of a head that gives these instead of
    log-probabilities), `unrelated`.
    The counts of its terms must not depend on the scores. A loss may say them itself in
    `counts(batch) → {term: count}`; without it they are read from a call with placeholder scores.
    `profile` (optional) maps dotted keys of the run file to the values this loss is best run with. `from_start`
    (optional) maps names of further validation metrics to metrics of the loss: each is by how much that one has changed
    since the first validation of the run.

    A loss that goes by numbers of more than its micro-batch (a mean over the whole step, a running mean) has
    `statistics(scores, batch) → {name: (total, count)}`, as pure as itself, and says in `statistics_of` what it is
    called with: `"step"`, everything of the step, in a forward without gradient ahead of it; `"unrelated"`, the same of
    each group's `unrelated` one (which `requires` then names); `"past"`, the scores of each step as it runs. Totals and
    counts are summed over all micro-batches, of `"past"` over all steps before, where those of earlier steps count
    `statistics_decay` (default 1) times as much with each step and are part of checkpoints. The loss finds total /
    count in `batch.statistics[name]`, a constant: 0 where nothing was counted.
    """

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput: ...


@runtime_checkable
class Head(Protocol):
    """Scored hidden states `[M, D]` to target log-probabilities `[M]`, and ∂logprob/∂hidden `[M, D]` when asked.

    `score` computes in order: logits, soft cap, division by the temperature, all given by `output`. With
    `traced=False` it is called outside every transform and may evaluate between tiles; with `traced=True` it
    runs inside a transform and must not (no `mx.eval`, no numpy): chain tiles with `mx.depends`.

    `differentiable = True` says that autodiff through `score(..., traced=True)` is right by itself, so that
    no custom gradient is put around it. `provides` may hold `entropy`, or `values` for a scalar head.
    `outside_traces` (optional) says that the configured instance needs `traced=False`, which a backward with
    `head_outside_traces = True` gives it; `ready()` (optional) is called once outside every trace, before the first
    score, for what has to be checked on the machine. `output_for(model)` (optional) gives the matrix it multiplies by,
    where that is not the model's own. A head with weights of its own has `attach(model, seed) → params`, which puts
    them into the model as a part, and `save(params, folder)`, which adds them to the adapter's folder; the classmethods
    `claims(folder)` and `from_folder(folder, model) → (head, params)` open them again. `reads_last = True` says that it
    reads the hidden state of each completion's last scored token, once, and not the states that predict its tokens:
    `hidden [M, D]` then has one row a completion, and the targets mean nothing.
    """

    def score(
        self, hidden: mx.array, targets: mx.array, output: Output, *, grad: bool = False,
        entropy: bool = False, traced: bool = False,
    ) -> TokenLogprobs: ...  # fmt: skip

    def output_gradients(
        self, hidden: mx.array, targets: mx.array, output: Output, dlogprobs: mx.array, lse: mx.array, *,
        traced: bool = False,
    ) -> Gradients:  # fmt: skip
        """Gradients of the output's own parameters, in a second vocabulary pass; called only where they train."""
        ...


@runtime_checkable
class Backward(Protocol):
    """Gradients of one micro-batch: from the rows' contexts and the objective to `{name: gradient}`.

    `stride` (optional) is after how many blocks its work repeats, 1 if it does not say; None where it never does. The
    planner runs that many blocks and extrapolates.

    `contexts` holds one context a row, each with its `row`. The strategy runs `model.embed`, `model.blocks` and
    `model.finish` under it, hands all hidden states to the objective at once and brings `d hidden` back.

    `score(model, params, contexts, objective) → ObjectiveResult` (optional) is its forward alone, with scores that
    equal those of a call to the last bit: `objective.scored(hiddens, traced=…)` ends it. The reference policy is
    scored so, that a policy which is its own reference starts at a margin of exactly 0. Without it the whole strategy
    runs for that, and its gradients are dropped.
    """

    def __call__(
        self, model: Model, params: Params, contexts: Sequence[SpanContext], objective: Objective, /
    ) -> tuple[ObjectiveResult, Gradients]: ...


@runtime_checkable
class Layout(Protocol):
    """Groups to micro-batches of rows. Mask and target shift happen here, once. `by_tokens = True` says that
    micro-batches follow a budget of tokens, not `limits.groups`.

    Each group is in one micro-batch, as the object that was given, in any order.

    `prompt_targets` asks for prompt tokens (and masked completion tokens) as targets too, each once a group.
    """

    def __call__(
        self, groups: Sequence[Group], limits: Limits, /, *, prompt_targets: bool = False
    ) -> list[MicroBatch]: ...


@runtime_checkable
class ModelAdapter(Protocol):
    """One model family. Exactly one must claim a checkpoint's `config.json`.

    An adapter for what no other one knows sets `fallback = True`: it is asked only where no other claims.
    """

    def handles(self, config: Mapping[str, Any], /) -> bool: ...

    def build(self, config: Mapping[str, Any], /) -> Model:
        """The modules, without weights. Raises `CheckpointError` naming a missing or unsupported key."""
        ...


@runtime_checkable
class Adapter(Protocol):
    """Which parameters train, and how they are kept.

    Two classmethods let a saved folder be opened without options: `claims(path) → bool`, whether the folder is of this
    kind, and `from_folder(path, model) → (strategy, params)`, which attaches what it holds.

    `attach_saved(model, path, given) → (strategy, params)` (optional) does the same for a run that starts from the
    folder, and raises ConfigError where an option that is named in `given` is another one there. Without it the values
    of these options are compared.
    """

    def attach(self, model: Model, seed: int, /) -> Params:
        """Put the trainable parameters into the model and return them by full name, their initial values keyed by
        `seed` and name. Raises `ConfigError` where a target name matches nothing, or where nothing would train."""
        ...

    def base(self, params: Params, /) -> Params:
        """The same parameters with values that leave the base model's function unchanged (for a `base` reference).
        Raises `ConfigError` where there is no such value."""
        ...

    def save(self, model: Model, params: Params, path: Path, /) -> None:
        """Write a folder that this strategy, and where it can be so mlx-lm, loads."""
        ...

    def load(self, model: Model, path: Path, params: Params, /) -> Params:
        """The values of `params` as saved in `path`. All tensors are checked before anything is returned."""
        ...


@runtime_checkable
class DataFormat(Protocol):
    """A record to an example. `keys` are the keys it accepts; `provides` what its groups bring (`pairs`).

    `matches(record)` says whether a record has this format's shape, for messages and for `format = "auto"`. A format
    whose groups leave answers out has `with_every_answer()`: the same format, which does not.
    """

    keys: frozenset[str]
    provides: frozenset[str]

    def matches(self, record: Mapping[str, Any], /) -> bool: ...

    def __call__(self, record: Mapping[str, Any], tokenizer: Tokenizer, /, *, source: str) -> Example:
        """Raises `DataError` that says what was found and what is accepted; the caller adds file and line."""
        ...


@runtime_checkable
class Filter(Protocol):
    """Which groups of a data file are trained on, which of their pairs, and with what weight.

    Gets all groups of one file, in order and before any is cut to length, and gives back for each what stays of it:
    the group itself, one with fewer pairs (`Group.with_pairs`) or other weights, or None. `reason` says in a few words
    what is wrong with those that go. `requires` (optional) names what it needs of the format: `pairs`. Raises DataError
    where a group lacks what it goes by.
    """

    @property
    def reason(self) -> str: ...

    def __call__(self, groups: Sequence[Group], /) -> Sequence[Group | None]: ...


class Report(Protocol):
    """Where a source or a strategy says what a user should see: shown once, and counted in the metrics."""

    def __call__(self, message: str, /, *, count: tuple[str, int] | None = None) -> None: ...


@define(eq=False)
class Policy:
    """What is being trained, as it is now: the trainer replaces `params` after every optimizer step."""

    model: Model
    params: Params
    temperature: float = 1.0
    logprobs: Callable[[Sequence[Group]], list[list[tuple[float, ...]]]] | None = None
    """Log-probabilities of all completion tokens as training scores them, `[group][completion][token]`."""


@frozen
class SourceContext:
    """What a source may use. Everything is there before the model's weights are, except `policy`."""

    data: Any
    """The `[data]` table: `mortice.config.DataOptions`."""
    format: DataFormat
    tokenizer: Tokenizer
    batch_size: int
    seed: int
    report: Report
    requires: frozenset[str] = frozenset()
    """What the loss needs."""
    rollout: RolloutEngine | None = None
    sampling: Sampling | None = None
    """As the run file says; the seed is the run's."""
    rewards: tuple[NamedReward, ...] = ()
    task: Task | None = None
    """Problems, in place of files."""
    folder: Path | None = None
    """The run folder, which is there once the run starts."""
    policy: Policy | None = None
    """The live policy, for sources that sample."""
    poll: Callable[[], None] = lambda: None
    """To be called now and then in long work: raises when the run is to stop."""
    formats: Callable[[], Mapping[str, DataFormat]] = dict
    """All formats by name, for messages about records that this run's cannot read."""
    filters: tuple[tuple[str, Filter], ...] = ()
    """By name, in the order of the run file: what of the data is left out (`mortice.data.load_groups`)."""


class LiveSource(Protocol):
    """What a source does during a run.

    One that knows all its groups beforehand may give them in `known()`: every group that `next` and `validate` will
    ever use, and `next` is then a function of the step. One that does not may give in `largest()` groups as large as
    any that may come, for planning. `metrics()` (optional) is what it has measured of the groups in use, for every step
    on them; `best` (optional) the validation metric that the best checkpoint goes by, and whether `min` or `max` of it.
    `close()` (optional) is called when training ends, however it ends.
    """

    provides: frozenset[str]

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in which every row is visited once; None where there is no such thing."""
        ...

    @property
    def can_validate(self) -> bool: ...

    def next(self, step: int, /) -> tuple[Sequence[Group], int]:
        """Groups of the step that begins, and how many optimizer steps (passes) are made on them.

        After `restore` between two passes, the same groups again, and all their passes; the trainer goes on from the
        pass that comes.
        """
        ...

    def validate(self, evaluate: Callable[[Sequence[Group]], dict[str, float]], /) -> dict[str, float]:
        """Validation metrics. `evaluate` gives the loss and its metrics over groups, each row once."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON values from which `restore` continues."""
        ...

    def restore(self, state: Mapping[str, Any], /) -> None: ...


@runtime_checkable
class Source(Protocol):
    """Where groups come from: a data set, or a rollout (sample, score, advantage).

    `uses` (optional) names kinds of strategies that it works with and a run may be without (`rollout`): where the run
    file has no table of one, the default strategy is taken, and where there is none, asked for.
    """

    def open(self, context: SourceContext, /) -> LiveSource: ...


@frozen
class Request:
    """A prompt to be answered."""

    ids: tuple[int, ...]
    key: str
    """Names its draws, together with `Sampling.seed` and the sample's number, so that an answer does not depend on what
    else is asked. Two requests of one key and one prompt get the same answers."""


@frozen
class Sampling:
    """How answers are sampled: from softmax(logits / temperature), or what the filters leave of it. Temperature 0 is
    greedy. `seed` (of a run and its step) names every draw, together with the request's key and the sample's number."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    samples: int = 1
    """Answers to each request."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Texts that end an answer, across token boundaries too. They are not part of its `text`."""
    eos_ids: tuple[int, ...] = ()

    @property
    def filtered(self) -> bool:
        """Whether answers come from another distribution than the model's at the temperature."""
        plain = (self.top_p, self.top_k, self.min_p, self.repetition_penalty, self.presence_penalty)
        return plain != (1.0, 0, 0.0, 1.0, 0.0)


@frozen
class EngineContext:
    """What an engine may use while it is open."""

    model: Model
    """Sampled from as it is bound when `generate` is called."""
    tokenizer: Tokenizer
    report: Report
    poll: Callable[[], None] = lambda: None
    """To be called now and then in long work: raises when the run is to stop."""


class LiveEngine(Protocol):
    """What an engine does while it is open."""

    def generate(self, requests: Sequence[Request], sampling: Sampling, /) -> Iterator[tuple[int, int, Completion]]:
        """(index of the request, number of the sample, completion) of each answer as it is finished, in any order.

        A completion holds the ids that were sampled, the one that ended it included, `text` without what ended it,
        `finish_reason` (`stop`: an id of `eos_ids`; `stop-string`; `length`), and, of an engine that provides them,
        `sampler_logprobs`. Raises DataError for an empty prompt or a token that the model has no row for.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions. `provides`: `token-ids`, `logprobs-at-temperature`, `weight-sync` (it samples from the
    weights as they are now); what an engine lacks, training rescores or refuses by name."""

    provides: frozenset[str]

    def open(self, context: EngineContext, /) -> LiveEngine: ...


@runtime_checkable
class Reward(Protocol):
    """A number for a completion; rewards of a run are summed with their `weight`.

    One that takes long or runs code of the user's has `costly = True`: it is not tried on records beforehand. `ready()`
    (optional) raises ConfigError where it cannot be had.
    """

    weight: float

    def __call__(self, completion: str, record: Mapping[str, Any], /) -> float: ...


class LiveOptimizer(Protocol):
    """The part of `mlx.optimizers.Optimizer` that a step uses."""

    learning_rate: Any
    state: dict[str, Any]

    def init(self, parameters: dict[str, Any], /) -> None: ...

    def apply_gradients(self, gradients: dict[str, Any], parameters: dict[str, Any], /) -> dict[str, Any]: ...


@runtime_checkable
class OptimizerBuilder(Protocol):
    learning_rate: float

    def build(self) -> LiveOptimizer: ...


@runtime_checkable
class Schedule(Protocol):
    """The learning rate of each optimizer step, counted from 0. The first one is never 0."""

    def build(self, peak: float, total: int, /) -> Callable[[int], float]: ...


@frozen
class RunInfo:
    """What a tracker or an observer may show of a run."""

    path: Path
    """The run folder, absolute."""
    total_steps: int
    trainable: int
    parameters: int
    config: Any = field(repr=False, default=None)
    """The effective configuration (`mortice.config.RunConfig`)."""
    start_step: int = 0
    resumed: bool = False
    """Whether the run goes on from a checkpoint, that of `start_step`."""


class LiveTracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any], /) -> None: ...


@runtime_checkable
class Tracker(Protocol):
    """Shows or stores metrics. Validation metrics carry the prefix `valid/`; `say` (optional) takes notices."""

    def open(self, run: RunInfo, /) -> AbstractContextManager[LiveTracker]: ...


@runtime_checkable
class Task(Protocol):
    """Verifiable problems with a checker: records with a `prompt` and whatever `check` goes by. Those of one split and
    seed always come in the same order; no problem is in two splits."""

    def problems(self, split: str, seed: int, /) -> Iterator[Mapping[str, Any]]: ...

    def check(self, completion: str, problem: Mapping[str, Any], /) -> Mapping[str, float]: ...


@runtime_checkable
class Controller(Protocol):
    """Changes options of frozen strategies during a run, after each validation.

    Returns overrides by dotted key (`{"loss.beta": 0.2}`) and its next state (JSON values), which is checkpointed.
    """

    def __call__(
        self, step: int, metrics: Metrics, state: Mapping[str, Any], /
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]: ...

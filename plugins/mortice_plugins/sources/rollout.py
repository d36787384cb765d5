"""Groups that are sampled from the policy: prompts → answers → rewards → advantages, or pairs.

What an answer is depends on the weights, the run's seed, the number of the rollout, the prompt and the sample, and on
nothing that was drawn before. What this leaves out: sampling ahead while the policy trains.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from attrs import asdict, define, evolve, field, frozen

from mortice.batch import Completion, Group
from mortice.data import bad_rows, read_records
from mortice.errors import ConfigError, DataError, TrainingError
from mortice.options import ge, in_, option
from mortice.protocols import EngineContext, LiveEngine, Request, Sampling, SourceContext
from mortice.randomness import stable_seed
from mortice.rewards import NamedReward, rewarded
from mortice_plugins.rewards.task import TaskReward
from mortice_plugins.sources.advantages import BASELINES, SCALES, advantages, best_and_worst, without_signal

SAMPLES = "samples.jsonl"
TRIES = 10
"""Rollouts in a row that give nothing to train on, and end a run."""
MEASURED = 256
"""Problems of a task whose prompts are looked at for planning."""


@frozen
class Rollout:
    """Answers sampled from the policy as it is, rewarded, and trained on for `inner_epochs` optimizer steps.

    Prompts come from `[data] train` (each once an epoch, in a seeded order) or from a `[task]`. `[rollout]` says how
    answers are sampled and by which engine, `[[reward]]` what they are worth: the weighted sum. `[train] batch_size`
    counts prompts, `steps` optimizer steps.

    A loss of groups gets advantages: rewards less their `baseline`, divided by the standard deviation of `scale`. A
    loss of pairs gets one pair a group, its best against its worst answer (online DPO and its kin). A group of which
    all answers are rewarded alike has no signal: its advantages are 0, and it makes no pair. Their share is a metric.

    Held-out prompts (`[data] valid`, or the task's `test` split) are answered greedily; the best checkpoint is the one
    with the highest mean reward there. Every answer is written to `samples.jsonl` in the run folder.
    """

    provides: ClassVar[frozenset[str]] = frozenset(
        {"groups", "advantages", "old_logprobs", "sampler_logprobs", "pairs"}
    )

    uses: ClassVar[frozenset[str]] = frozenset({"rollout"})

    inner_epochs: int = option(1, help="optimizer steps on each rollout", validator=ge(1))
    baseline: str = option(
        "group",
        help='what a reward is measured against: the mean of its "group", the "batch", or the "others" of its group',
        validator=in_(BASELINES),
    )
    scale: str = option(
        "group",
        help='whose standard deviation divides it: that of its "group", of the "batch", or "none"',
        validator=in_(SCALES),
    )
    mask_truncated: bool = option(False, help="answers that were cut at max_tokens do not count in the loss")
    old_logprobs: str = option(
        "auto",
        help='log-probabilities of the policy that sampled: "sampled", as the engine gave them, "scored", by a forward '
        'of training, or "auto": sampled where the engine has them and no loss corrects for its sampler',
        validator=in_(("auto", "sampled", "scored")),
    )
    off_policy: bool = option(False, help="take answers of an engine whose weights do not follow training")
    reward_errors: str = option(
        "stop",
        help='a reward that raises or gives no number: "stop" the run, or count "zero"',
        validator=in_(("stop", "zero")),
    )
    valid_prompts: int = option(64, help="held-out problems of a task", validator=ge(1))
    shuffle: bool = option(True, help="a new seeded order of the prompts every epoch; false keeps the file's")

    def open(self, context: SourceContext, /) -> LiveRollout:
        """Read all prompts and check that the engine gives what is needed. Raises ConfigError or DataError."""
        engine, sampling = context.rollout, context.sampling
        if engine is None or sampling is None:
            raise ConfigError('source "rollout" samples; say with what: [rollout] name (`mortice list rollout`)')
        context = evolve(context, rewards=_rewards(context))
        if not context.rewards:
            raise ConfigError(
                'source "rollout" needs [[reward]]: what is an answer worth? (`mortice list reward`; or give a [task])'
            )
        for each in context.rewards:
            getattr(each.reward, "ready", lambda: None)()
        if not context.requires & {"advantages", "pairs"}:
            raise ConfigError(
                'source "rollout": the loss goes neither by advantages nor by pairs, so that no reward would change '
                "anything; choose one that does (grpo, rloo, or one of pairs), or add it"
            )
        gradient = "old_logprobs" in context.requires
        if (context.requires & {"groups", "advantages", "pairs"}) and sampling.samples < 2:
            raise ConfigError(
                f"rollout.samples is {sampling.samples}: an answer is measured against others to the same prompt, "
                "which takes at least 2"
            )
        if gradient and sampling.filtered:
            plain = Sampling()
            names = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
            given = ", ".join(
                f"rollout.{name} = {getattr(sampling, name)}"
                for name in names
                if getattr(sampling, name) != getattr(plain, name)
            )
            raise ConfigError(
                f"{given}: answers would come from another distribution than the one that is trained, and every ratio "
                "would be wrong; leave it out (temperature is allowed: it is that of training too)"
            )
        if "weight-sync" not in engine.provides and not self.off_policy:
            raise ConfigError(
                f"rollout engine {type(engine).__name__} does not follow the weights that are trained; set "
                "source.off_policy = true to train on its answers all the same"
            )
        own = "logprobs-at-temperature" in engine.provides
        if not own and (self.old_logprobs == "sampled" or "sampler_logprobs" in context.requires):
            asked = 'source.old_logprobs = "sampled"' if self.old_logprobs == "sampled" else "the loss"
            raise ConfigError(
                f"{asked} goes by the engine's log-probabilities, and {type(engine).__name__} gives none at the "
                "temperature"
            )
        if self.old_logprobs == "sampled" and "sampler_logprobs" in context.requires:
            raise ConfigError(
                'source.old_logprobs = "sampled": the loss corrects for what training scores otherwise than the '
                "engine, and these would be the engine's own; leave it out"
            )
        auto = "sampled" if own and "sampler_logprobs" not in context.requires else "scored"
        old = (auto if self.old_logprobs == "auto" else self.old_logprobs) if gradient else "none"
        return LiveRollout(self, context, sampling, *_prompts(self, context), old=old)


def _rewards(context: SourceContext) -> tuple[NamedReward, ...]:
    """The run's rewards, bound to its task where they go by one; of a task alone, whether the answer is correct."""
    if context.task is None:
        return context.rewards
    if not context.rewards:
        return (NamedReward("task", TaskReward().bound(context.task)),)
    return tuple(
        evolve(each, reward=each.reward.bound(context.task)) if hasattr(each.reward, "bound") else each
        for each in context.rewards
    )


@frozen
class Prompt:
    """One record to be answered."""

    where: str
    ids: tuple[int, ...]
    record: Mapping[str, Any]


def _prompts(options: Rollout, context: SourceContext) -> tuple[Prompts, list[Prompt]]:
    """Training and held-out prompts, from the task or from files. Raises ConfigError or DataError."""
    if context.filters:
        raise ConfigError('[[filter]] goes over records with their answers, and source "rollout" has prompts alone')
    task, data = context.task, context.data
    if task is not None:
        both = [key for key in ("train", "valid") if getattr(data, key) is not None]
        if both:
            raise ConfigError(f"data.{both[0]} and [task] both say where prompts come from; give one of them")
        held_out = _rendered(context, "test", islice(task.problems("test", 0), options.valid_prompts))
        return TaskPrompts(context), held_out
    if data.train is None:
        raise DataError("data.train is not set: which prompts are to be answered? (or give a [task])")
    stop = options.reward_errors == "stop"
    valid = _read(context, data.valid, stop) if data.valid is not None else []
    if not valid:
        context.report("evaluation is off: data.valid is not set")
    return FilePrompts(_read(context, data.train, stop), context.seed, options.shuffle), valid


def _room(context: SourceContext) -> int:
    """Most tokens of a prompt."""
    assert context.sampling is not None
    return context.data.max_length - context.sampling.max_tokens


def _rendered(
    context: SourceContext, split: str, problems: Iterator[Mapping[str, Any]], start: int = 0
) -> list[Prompt]:
    """Problems of a task from the one at `start` on, as prompts. Raises DataError for one that cannot be."""
    found = []
    room = _room(context)
    for i, record in enumerate(problems):
        where = f"{split}:{start + i + 1}"
        try:
            ids = _ids(context, record, where)
            if len(ids) > room:
                raise DataError(
                    f"a prompt of {len(ids)} tokens leaves no room for {context.data.max_length - room} tokens "
                    f"(rollout.max_tokens) within data.max_length {context.data.max_length}"
                )
            found.append(Prompt(where, ids, record))
        except DataError as error:
            raise DataError(f"task, {where}: {error}") from error
    return found


def _ids(context: SourceContext, record: Mapping[str, Any], where: str) -> tuple[int, ...]:
    ids = context.format(record, context.tokenizer, source=where).group.prompt_ids
    if not ids:
        raise DataError("the prompt is empty")
    return ids


def _read(context: SourceContext, file: Path, stop: bool) -> list[Prompt]:
    """The prompts of a file. Those that leave no room for an answer are left out, and counted.

    Raises one DataError that lists all bad rows.
    """
    # What a reward cannot score is found before anything is sampled, unless that costs as much as scoring.
    quick = [r for r in context.rewards if not getattr(r.reward, "costly", False)] if stop else []
    problems: list[str] = []
    found: list[Prompt] = []
    rows = 0
    for where, record in read_records(file):
        if context.data.limit is not None and rows >= context.data.limit:
            break
        rows += 1
        try:
            if isinstance(record, DataError):
                raise record
            if not isinstance(record, Mapping):
                raise DataError(f"expected a JSON object, found {type(record).__name__}")
            ids = _ids(context, record, where)
            for each in quick:
                _probe(each, record, where)
        except DataError as error:
            problems.append(f"{where}: {str(error).removeprefix(f'{where}: ')}")
            continue
        found.append(Prompt(where, ids, record))
    if problems:
        raise DataError(bad_rows(file, problems, rows))
    room = _room(context)
    kept = [prompt for prompt in found if len(prompt.ids) <= room]
    if len(kept) < len(found):
        context.report(
            f"{file.name}: {len(found) - len(kept)} of {rows} prompts dropped, which leave no room for "
            f"{context.data.max_length - room} tokens within max_length {context.data.max_length}",
            count=("data_dropped", len(found) - len(kept)),
        )
    if not kept:
        raise DataError(f"{file}: nothing is left to be answered")
    return kept


def _probe(reward: NamedReward, record: Mapping[str, Any], where: str) -> None:
    """Raises DataError where a reward refuses the record; what else goes wrong with an answer of no text is no news."""
    try:
        rewarded([reward], "", record, where)
    except DataError as error:
        if isinstance(error.__cause__, DataError):
            raise


@define(eq=False)
class FilePrompts:
    """Prompts of a file: each once an epoch; the last rollout of an epoch may be smaller."""

    prompts: Sequence[Prompt]
    seed: int
    shuffle: bool

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, rollout: int, size: int) -> list[Prompt]:
        """Those of a rollout, counted from 0."""
        epoch, place = divmod(rollout, -(-len(self.prompts) // size))
        order = range(len(self.prompts))
        if self.shuffle:
            generator = np.random.Generator(np.random.PCG64(stable_seed(self.seed, "order", epoch)))
            order = generator.permutation(len(self.prompts)).tolist()
        return [self.prompts[i] for i in order[place * size : (place + 1) * size]]

    def longest(self, size: int) -> list[Prompt]:
        return sorted(self.prompts, key=lambda prompt: -len(prompt.ids))[:size]


@define(eq=False)
class TaskPrompts:
    """Problems of a task, one after the other, without end."""

    context: SourceContext
    _problems: Iterator[Mapping[str, Any]] | None = None
    _taken: int = 0

    def __len__(self) -> int:
        return 0

    def take(self, rollout: int, size: int) -> list[Prompt]:
        assert self.context.task is not None
        start = rollout * size
        if self._problems is None or start < self._taken:
            self._problems, self._taken = self.context.task.problems("train", self.context.seed), 0
        problems = islice(self._problems, start - self._taken, start - self._taken + size)
        found = _rendered(self.context, "train", problems, start)
        self._taken = start + size
        if not found:
            raise TrainingError(f"the task has no more problems after {start}; ask for fewer steps, or a wider task")
        return found

    def longest(self, size: int) -> list[Prompt]:
        """Of those that come first: there may be no end of them."""
        assert self.context.task is not None
        records = []
        with suppress(ConfigError):  # used up: a small task
            for record in islice(self.context.task.problems("train", self.context.seed), max(size, MEASURED)):
                records.append(record)
        found = _rendered(self.context, "train", iter(records))
        return sorted(found, key=lambda prompt: -len(prompt.ids))[:size]


Prompts = FilePrompts | TaskPrompts


@define(eq=False)
class LiveRollout:
    """One rollout at a time, in use for `inner_epochs` steps."""

    options: Rollout
    context: SourceContext
    sampling: Sampling
    prompts: Prompts
    held_out: Sequence[Prompt]
    old: str
    """Where `old_logprobs` come from: `sampled`, `scored`, or `none` is needed."""
    rollout: int = 0
    """The one that comes."""
    end: int = 0
    """The step behind the groups in use."""
    groups: Sequence[Group] = ()
    measured: dict[str, float] = field(factory=dict)
    failures: dict[str, int] = field(factory=dict)
    """Answers that a reward failed on, by its name."""
    _engine: LiveEngine | None = None

    best: ClassVar = ("valid/reward", "max")

    @property
    def provides(self) -> frozenset[str]:
        return self.options.provides

    @property
    def steps_per_epoch(self) -> int | None:
        rollouts = -(-len(self.prompts) // self.context.batch_size)
        return rollouts * self.options.inner_epochs if rollouts else None

    @property
    def can_validate(self) -> bool:
        return bool(self.held_out)

    @property
    def engine(self) -> LiveEngine:
        if self._engine is None:
            assert self.context.rollout is not None and self.context.policy is not None
            about = EngineContext(
                self.context.policy.model, self.context.tokenizer, self.context.report, self.context.poll
            )
            self._engine = self.context.rollout.open(about)
        return self._engine

    def largest(self) -> Sequence[Group]:
        """Groups as large as any that may come, for planning."""
        ids = (self.context.tokenizer.eos_ids or (0,))[:1] * self.sampling.max_tokens
        wanted = self.context.requires
        count, pairs = (2, ((0, 1),)) if "pairs" in wanted else (self.sampling.samples, ())
        answers = [Completion(ids, advantage=1.0, reward=1.0)] * count
        size = self.context.batch_size
        return [Group(prompt.where, prompt.ids, answers, pairs) for prompt in self.prompts.longest(size)]

    def next(self, step: int, /) -> tuple[Sequence[Group], int]:
        if step >= self.end:
            self.groups = self._sample()
            self.end = step + self.options.inner_epochs
        return self.groups, self.options.inner_epochs

    def _sample(self) -> Sequence[Group]:
        """The groups of the next rollout. Raises TrainingError where ten in a row give nothing to train on."""
        for _ in range(TRIES):
            number = self.rollout
            prompts = self.prompts.take(number, self.context.batch_size)
            start = time.perf_counter()
            seed = stable_seed(self.context.seed, "rollout", number)
            answers = self._answers(prompts, evolve(self.sampling, seed=seed))
            seconds = time.perf_counter() - start
            groups = [self._group(prompt, own, number) for prompt, own in zip(prompts, answers)]
            ready = self._with_old(self._prepared(groups))
            # Only now: a signal may end what is above, and the state that is saved then must not count it.
            self.rollout, self.measured = number + 1, self._measure(groups, seconds)
            self._write(number, groups)
            if ready:
                return ready
        if "pairs" in self.context.requires:
            raise TrainingError(
                f"{TRIES} rollouts in a row gave no pair: all answers to a prompt were rewarded alike. Raise "
                "rollout.temperature or rollout.samples, or give rewards that tell answers apart"
            )
        raise TrainingError(
            f"all answers of {TRIES} rollouts in a row were cut at rollout.max_tokens = {self.sampling.max_tokens} and "
            "masked (source.mask_truncated): raise it"
        )

    def _answers(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        policy = self.context.policy
        assert policy is not None
        policy.model.read()
        policy.model.bind(policy.params)
        found: dict[tuple[int, int], Completion] = {}
        # Named by their lines: equal prompts of one batch get answers of their own.
        requests = [Request(prompt.ids, prompt.where) for prompt in prompts]
        for i, k, completion in self.engine.generate(requests, sampling):
            found[i, k] = completion
        return [[found[i, k] for k in range(sampling.samples)] for i in range(len(prompts))]

    def _group(self, prompt: Prompt, answers: Sequence[Completion], number: int) -> Group:
        """Answers with their rewards; each reward among the extras, by its name."""
        scored = []
        for k, answer in enumerate(answers):
            where = f"{prompt.where}, sample {k}"
            got = rewarded(self.context.rewards, answer.text or "", prompt.record, where, self._failed)
            extras = {f"reward/{name}": value for name, value in got.values.items()}
            weight = 0.0 if self.options.mask_truncated and answer.finish_reason == "length" else 1.0
            scored.append(evolve(answer, reward=got.total, extras=extras, weight=weight))
        return Group(f"{number}/{prompt.where}", prompt.ids, scored, (), prompt.record)

    @property
    def _failed(self) -> Callable[[str, DataError], None] | None:
        return None if self.options.reward_errors == "stop" else self._count_failure

    def _count_failure(self, name: str, error: DataError) -> None:
        """The first of each reward is shown."""
        text = "" if name in self.failures else f"{error}; it counts as 0, and so will others"
        self.failures[name] = self.failures.get(name, 0) + 1
        self.context.report(text, count=(f"reward_errors_{name}", 1))

    def _prepared(self, groups: Sequence[Group]) -> list[Group]:
        """Groups as the losses take them: with pairs, else with advantages."""
        rewards = [[_reward(c) for c in group.completions] for group in groups]
        if "pairs" in self.context.requires:
            found = [(group, best_and_worst(own)) for group, own in zip(groups, rewards)]
            return [
                evolve(group, completions=tuple(group.completions[k] for k in pair), pairs=((0, 1),))
                for group, pair in found
                if pair is not None and group.completions[pair[0]].weight
            ]
        gains = advantages(rewards, self.options.baseline, self.options.scale)
        return [
            group.with_completions([evolve(c, advantage=gain) for c, gain in zip(group.completions, own)])
            for group, own in zip(groups, gains)
            if any(c.weight for c in group.completions)
        ]

    def _with_old(self, groups: Sequence[Group]) -> Sequence[Group]:
        if self.old == "none" or not groups:
            return groups
        if self.old == "sampled":
            return [
                g.with_completions([evolve(c, old_logprobs=c.sampler_logprobs) for c in g.completions]) for g in groups
            ]
        policy = self.context.policy
        assert policy is not None and policy.logprobs is not None
        scored = policy.logprobs(groups)
        return [
            group.with_completions([evolve(c, old_logprobs=x) for c, x in zip(group.completions, own)])
            for group, own in zip(groups, scored)
        ]

    def metrics(self) -> Mapping[str, float]:
        return self.measured

    def _measure(self, groups: Sequence[Group], seconds: float) -> dict[str, float]:
        answers = [c for group in groups for c in group.completions]
        tokens = sum(len(c.ids) for c in answers)
        rewards = np.asarray([_reward(c) for c in answers])
        flat = sum(without_signal([_reward(c) for c in group.completions]) for group in groups)
        return {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
            **_means([c.extras for c in answers]),
            "zero_signal": flat / len(groups),
            **_lengths(answers),
            "rollout_tokens": tokens,
            "rollout_seconds": seconds,
            "rollout_tokens_per_second": tokens / seconds,
        }

    def validate(self, evaluate: Callable[[Sequence[Group]], dict[str, float]], /) -> dict[str, float]:
        """Greedy answers to the held-out prompts: mean rewards and lengths."""
        greedy = evolve(self.sampling, temperature=0.0, samples=1)
        answers = self._answers(self.held_out, greedy)
        groups = [self._group(prompt, own, -1) for prompt, own in zip(self.held_out, answers)]
        found = [c for group in groups for c in group.completions]
        return {
            "reward": float(np.mean([_reward(c) for c in found])),
            **_means([c.extras for c in found]),
            **_lengths(found),
        }

    def _write(self, number: int, groups: Sequence[Group]) -> None:
        """Every answer of a rollout, one line each."""
        if self.context.folder is None or not self.context.folder.is_dir():
            return
        lines = []
        for group in groups:
            for k, answer in enumerate(group.completions):
                line = {
                    "rollout": number, "prompt": group.id.partition("/")[2], "sample": k, "text": answer.text,
                    "tokens": len(answer.ids), "finish_reason": answer.finish_reason, "reward": answer.reward,
                    **answer.extras,
                }  # fmt: skip
                lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        with (self.context.folder / SAMPLES).open("a" if number else "w", encoding="utf-8") as file:
            file.write("".join(lines))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def state(self) -> dict[str, Any]:
        """Where the prompts are, and the groups in use, which other weights would not give again."""
        file = self.context.folder / SAMPLES if self.context.folder is not None else None
        return {
            "rollout": self.rollout,
            "end": self.end,
            "groups": [_written(group) for group in self.groups],
            "measured": self.measured,
            "failures": self.failures,
            "samples_bytes": file.stat().st_size if file is not None and file.exists() else 0,
        }

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Go on from a state; what `samples.jsonl` holds beyond it is taken off."""
        self.rollout, self.end = state["rollout"], state["end"]
        self.groups = [_read_group(group) for group in state["groups"]]
        self.measured = dict(state["measured"])
        for name, count in state["failures"].items():
            self.context.report("", count=(f"reward_errors_{name}", count - self.failures.get(name, 0)))
        self.failures = dict(state["failures"])
        file = self.context.folder / SAMPLES if self.context.folder is not None else None
        if file is not None and file.exists() and file.stat().st_size > state["samples_bytes"]:
            os.truncate(file, state["samples_bytes"])


def _reward(completion: Completion) -> float:
    assert completion.reward is not None
    return completion.reward


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([each[name] for each in found])) for name in found[0]}


def _lengths(answers: Sequence[Completion]) -> dict[str, float]:
    lengths = [len(c.ids) for c in answers]
    cut = [c.finish_reason == "length" for c in answers]
    return {"length": float(np.mean(lengths)), "length_max": float(max(lengths)), "truncated": float(np.mean(cut))}


def _written(group: Group) -> dict[str, Any]:
    """A group in JSON values. Records stay out: rewards are given by now."""
    return {**asdict(group, filter=lambda attribute, _: attribute.name not in ("record", "unrelated"))}


def _read_group(value: Mapping[str, Any]) -> Group:
    completions = [Completion(**{**c, "prompt_ids": _tuple(c["prompt_ids"])}) for c in value["completions"]]
    pairs = tuple((c, r) for c, r in value["pairs"])
    return Group(**{**value, "completions": completions, "pairs": pairs})


def _tuple(value: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)

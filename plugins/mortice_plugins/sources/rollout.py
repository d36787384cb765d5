"""Groups that are sampled from the policy: prompts → answers → rewards → advantages, or pairs.

What an answer is depends on the weights, the run's seed, the number of the rollout, the prompt and the sample, and on
nothing that was drawn before. What this leaves out: sampling ahead while the policy trains.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from mortice.rewards import rewarded
from mortice_plugins.sources.advantages import BASELINES, SCALES, advantages, best_and_worst, without_signal

SAMPLES = "samples.jsonl"
TRIES = 10
"""Rollouts in a row that give nothing to train on, and end a run."""
VECTORS = ("old_logprobs", "sampler_logprobs")


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
        if not context.rewards:
            raise ConfigError('source "rollout" needs [[reward]]: what is an answer worth? (`mortice list reward`)')
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
        auto = "sampled" if own and "sampler_logprobs" not in context.requires else "scored"
        old = (auto if self.old_logprobs == "auto" else self.old_logprobs) if gradient else "none"
        return LiveRollout(self, context, sampling, *_prompts(self, context), old=old)


@frozen
class Prompt:
    """One record to be answered."""

    where: str
    ids: tuple[int, ...]
    record: Mapping[str, Any]


def _prompts(options: Rollout, context: SourceContext) -> tuple[Prompts, list[Prompt]]:
    """Training and held-out prompts, from the task or from files."""
    task, data = context.task, context.data
    if task is not None:
        both = [key for key in ("train", "valid") if getattr(data, key) is not None]
        if both:
            raise ConfigError(f"data.{both[0]} and [task] both say where prompts come from; give one of them")
        held_out = _rendered(context, "test", islice(task.problems("test", 0), options.valid_prompts))
        return TaskPrompts(context), held_out
    if data.train is None:
        raise DataError("data.train is not set: which prompts are to be answered? (or give a [task])")
    valid = _read(context, data.valid) if data.valid is not None else []
    if not valid:
        context.report("evaluation is off: data.valid is not set")
    return FilePrompts(_read(context, data.train), context.seed, options.shuffle), valid


def _rendered(context: SourceContext, split: str, problems: Iterator[Mapping[str, Any]]) -> list[Prompt]:
    """Problems of a task as prompts. Raises DataError for one that cannot be."""
    found = []
    for i, record in enumerate(problems):
        where = f"{split}:{i + 1}"
        try:
            found.append(Prompt(where, _ids(context, record, where), record))
        except DataError as error:
            raise DataError(f"task, {where}: {error}") from error
    return found


def _ids(context: SourceContext, record: Mapping[str, Any], where: str) -> tuple[int, ...]:
    return context.format(record, context.tokenizer, source=where).group.prompt_ids


def _read(context: SourceContext, file: Path) -> list[Prompt]:
    """The prompts of a file. Those that leave no room for an answer are left out, and counted.

    Raises one DataError that lists all bad rows.
    """
    assert context.sampling is not None
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
            for each in context.rewards:  # what a reward cannot score is found before anything is sampled
                rewarded([each], "", record, where)
        except DataError as error:
            problems.append(f"{where}: {str(error).removeprefix(f'{where}: ')}")
            continue
        found.append(Prompt(where, ids, record))
    if problems:
        raise DataError(bad_rows(file, problems, rows))
    room = context.data.max_length - context.sampling.max_tokens
    kept = [prompt for prompt in found if len(prompt.ids) <= room]
    if len(kept) < len(found):
        context.report(
            f"{file.name}: {len(found) - len(kept)} of {rows} prompts dropped, which leave no room for "
            f"{context.sampling.max_tokens} tokens within max_length {context.data.max_length}",
            count=("data_dropped", len(found) - len(kept)),
        )
    if not kept:
        raise DataError(f"{file}: nothing is left to be answered")
    return kept


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
        found = [
            evolve(prompt, where=f"train:{start + i + 1}")
            for i, prompt in enumerate(_rendered(self.context, "train", problems))
        ]
        self._taken = start + size
        if not found:
            raise TrainingError(f"the task has no more problems after {start}; ask for fewer steps, or a wider task")
        return found

    def longest(self, size: int) -> list[Prompt]:
        return self.take(0, size)


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
    _engine: LiveEngine | None = None
    _failing: set[str] = field(factory=set)

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
            number, self.rollout = self.rollout, self.rollout + 1
            prompts = self.prompts.take(number, self.context.batch_size)
            start = time.perf_counter()
            seed = stable_seed(self.context.seed, "rollout", number)
            answers = self._answers(prompts, evolve(self.sampling, seed=seed))
            seconds = time.perf_counter() - start
            groups = [self._group(prompt, own, number) for prompt, own in zip(prompts, answers)]
            self.measured = self._measure(groups, seconds)
            self._write(number, groups)
            groups = self._prepared(groups)
            if groups:
                return self._with_old(groups)
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
        text = "" if name in self._failing else f"{error}; it counts as 0, and so will others"
        self._failing.add(name)
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
        if self.old == "none":
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
        with (self.context.folder / SAMPLES).open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def state(self) -> dict[str, Any]:
        """Where the prompts are, and the groups in use, which other weights would not give again."""
        file = self.context.folder / SAMPLES if self.context.folder is not None else None
        return {
            "rollout": self.rollout,
            "end": self.end,
            "groups": [_written(group) for group in self.groups],
            "measured": self.measured,
            "samples_bytes": file.stat().st_size if file is not None and file.exists() else 0,
        }

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Go on from a state; what `samples.jsonl` holds beyond it is taken off."""
        self.rollout, self.end = state["rollout"], state["end"]
        self.groups = [_read_group(group) for group in state["groups"]]
        self.measured = dict(state["measured"])
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

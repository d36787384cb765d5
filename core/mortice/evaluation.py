"""How good a model is: answers to the problems of tasks, perplexity, preference accuracy.

Answers are greedy by default, and keyed draws otherwise, so an evaluation that is run again gives the same. Each answer
is written to a file as it comes; an evaluation that was stopped takes from it what is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

from attrs import asdict, define, field, frozen

from mortice.batch import Completion, Group
from mortice.errors import ConfigError, DataError
from mortice.protocols import DataFormat, LiveEngine, Request, Sampling, Task
from mortice.tokenizer import Tokenizer

SURE = 1.96
"""Standard errors on each side of a mean that hold it in 95 of 100 cases."""


@frozen
class Problem:
    """One problem of a task, as it is put to the model."""

    task: str
    number: int
    record: Mapping[str, Any]
    ids: tuple[int, ...]

    @property
    def key(self) -> str:
        """Names the problem, whatever its place."""
        text = json.dumps([self.task, self.record], sort_keys=True, ensure_ascii=False, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@frozen
class Graded:
    """An answer to a problem, and what the task's checker says of it."""

    text: str
    tokens: int
    finish_reason: str
    scores: Mapping[str, float]


@frozen
class Measure:
    """A mean with the half width of its 95 % interval."""

    mean: float
    margin: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Measure:
        mean = math.fsum(values) / len(values)
        if len(values) < 2:
            return cls(mean, math.nan, len(values))
        variance = math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1)
        return cls(mean, SURE * math.sqrt(variance / len(values)), len(values))

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.margin:.4f}" if math.isfinite(self.margin) else f"{self.mean:.4f}"


def problems_of(
    name: str, task: Task, form: DataFormat, tokenizer: Tokenizer, *, split: str, seed: int, limit: int | None
) -> list[Problem]:
    """The first problems of a task's split. Raises DataError for one that cannot be put to the model, ConfigError for
    a task without any."""
    found = []
    for number, record in enumerate(islice(task.problems(split, seed), limit), start=1):
        try:
            ids = form(record, tokenizer, source=f"{name}:{number}").group.prompt_ids
        except DataError as error:
            raise DataError(f"task {name}, problem {number}: {error}") from error
        found.append(Problem(name, number, record, ids))
    if not found:
        raise ConfigError(f"task {name} has no problems in the split {split!r}")
    return found


@define(eq=False)
class Answers:
    """The answers so far: a file of one line a problem, headed by what they were made with."""

    path: Path
    facts: Mapping[str, Any]
    graded: dict[str, Graded] = field(factory=dict)
    """By the key of their problem."""
    _file: IO[bytes] | None = None

    @classmethod
    @contextmanager
    def open(cls, path: Path, facts: Mapping[str, Any]) -> Iterator[Answers]:
        """Read what is there, and hold the file. A last line that a killed run left unfinished is taken off.

        Raises ConfigError where another process holds the file or it was made with other facts, DataError where it is
        damaged.
        """
        found = cls(path, json.loads(json.dumps(facts, default=str)))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"{path} is in use by another process") from error
            found._file = file
            found._read()
            yield found

    def _read(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            self._file.truncate(len(whole))
        if not whole:
            self._append(self.facts)
            return
        head, found = read_answers(self.path, whole)
        changed = [name for name in {**self.facts, **head} if head.get(name) != self.facts.get(name)]
        if changed:
            told = "; ".join(f"{name} was {head.get(name)!r}, is {self.facts.get(name)!r}" for name in changed)
            raise ConfigError(
                f"{self.path} holds answers that were made otherwise ({told}); choose another output, or delete it to "
                "begin anew"
            )
        self.graded |= {key: graded for key, (_, graded) in found.items()}

    def add(self, problem: Problem, graded: Graded) -> None:
        self.graded[problem.key] = graded
        line = {"key": problem.key, "task": problem.task, "problem": problem.number, **asdict(graded)}
        self._append(line)

    def _append(self, value: Mapping[str, Any]) -> None:
        """One line, on disk before anything else happens."""
        assert self._file is not None
        self._file.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read_answers(path: Path, content: bytes | None = None) -> tuple[dict[str, Any], dict[str, tuple[str, Graded]]]:
    """What answers were made with, and by key the task and the answer. Raises DataError for a damaged file."""
    try:
        head, *rest = [json.loads(line) for line in (path.read_bytes() if content is None else content).splitlines()]
        return head, {
            entry["key"]: (
                entry["task"],
                Graded(entry["text"], entry["tokens"], entry["finish_reason"], entry["scores"]),
            )
            for entry in rest
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged ({error}); delete it to begin anew") from error


def answer(
    problems: Sequence[Problem], tasks: Mapping[str, Task], engine: LiveEngine, sampling: Sampling, answers: Answers,
    told: Callable[[int, int, str], None] = lambda done, whole, at: None,
) -> list[Graded]:  # fmt: skip
    """An answer to each problem, in their order; those that `answers` has are not asked again."""
    open_ = [problem for problem in problems if problem.key not in answers.graded]
    done = len(problems) - len(open_)
    requests = [Request(problem.ids, problem.key) for problem in open_]
    for index, _, completion in engine.generate(requests, sampling) if requests else ():
        problem = open_[index]
        answers.add(problem, grade(completion, problem, tasks[problem.task]))
        done += 1
        told(done, len(problems), f"{problem.task} {problem.number}")
    return [answers.graded[problem.key] for problem in problems]


def grade(completion: Completion, problem: Problem, task: Task) -> Graded:
    """What the task's checker says. Raises DataError, naming the problem, where it fails."""
    text = completion.text or ""
    try:
        scores = task.check(text, problem.record)
    except Exception as error:  # the plugin boundary: a task may be anyone's code
        raise DataError(f"task {problem.task}, problem {problem.number}: {type(error).__name__}: {error}") from error
    return Graded(text, len(completion.ids), completion.finish_reason or "", dict(scores))


def summary(task: Task, graded: Sequence[Graded]) -> dict[str, Measure]:
    """Means of all scores; a task with `summary(scores) → {name: values}` says itself what they are means of."""
    own: Any = getattr(task, "summary", None)
    scores = [each.scores for each in graded]
    if own is not None:
        values = own(scores)
    else:
        values = {name: [each[name] for each in scores if name in each] for name in scores[0]}
    values["tokens"] = [float(each.tokens) for each in graded]
    values["truncated"] = [float(each.finish_reason == "length") for each in graded]
    return {name: Measure.of(found) for name, found in values.items()}


def differences(before: Mapping[str, Graded], after: Mapping[str, Graded]) -> dict[str, Measure]:
    """Of each score that both have, the mean over their common problems of after − before, paired."""
    common = [key for key in after if key in before]
    names = dict.fromkeys(name for key in common for name in after[key].scores if name in before[key].scores)
    return {
        name: Measure.of(
            [
                after[key].scores[name] - before[key].scores[name]
                for key in common
                if name in after[key].scores and name in before[key].scores
            ]
        )
        for name in names
    }


def perplexity(groups: Sequence[Group], logprobs: Sequence[Sequence[Sequence[float]]]) -> dict[str, Any]:
    """exp of the mean negative log-probability of all scored tokens; NaN marks those that are not scored."""
    found = [x for group in logprobs for tokens in group for x in tokens if not math.isnan(x)]
    nll = -math.fsum(found) / len(found)
    return {
        "perplexity": math.exp(nll) if nll < 700 else math.inf,
        "nll": nll,
        "tokens": len(found),
        "rows": len(groups),
    }


def preference(groups: Sequence[Group], logprobs: Sequence[Sequence[Sequence[float]]]) -> dict[str, Measure]:
    """How often a chosen answer is likelier than a rejected one, by the sum and by the mean over its tokens (a tie is
    half), and by how much, over all pairs."""
    gaps: dict[str, list[float]] = {"sum": [], "mean": []}
    for group, own in zip(groups, logprobs):
        scored = [[x for x in tokens if not math.isnan(x)] for tokens in own]
        for chosen, rejected in group.pairs:
            sums = [math.fsum(scored[k]) for k in (chosen, rejected)]
            means = [total / max(1, len(scored[k])) for total, k in zip(sums, (chosen, rejected))]
            gaps["sum"].append(sums[0] - sums[1])
            gaps["mean"].append(means[0] - means[1])
    if not gaps["sum"]:
        raise DataError("there are no pairs, so nothing is preferred")
    wins = {f"accuracy_{name}": [(x > 0) + 0.5 * (x == 0) for x in found] for name, found in gaps.items()}
    margins = {f"margin_{name}": found for name, found in gaps.items()}
    return {name: Measure.of(found) for name, found in (wins | margins).items()}

"""Preference pairs from a model's own answers and a checker: sample, score, pair right answers with wrong ones.

Every draw is keyed by seed, prompt and sample, so neither the order of the prompts nor a run that was killed changes an
answer. Answers and their rewards are appended to a file beside the output, one line a prompt; a run that starts again
takes from it what is there. The pairs are written at the end, whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from attrs import asdict, define, evolve, field, frozen

from mortice import atomic
from mortice.batch import Completion
from mortice.data import bad_rows, read_records
from mortice.errors import ConfigError, DataError
from mortice.protocols import LiveEngine, Request, Sampling
from mortice.randomness import stable_seed
from mortice.rewards import NamedReward, rewarded
from mortice.tokenizer import Tokenizer

GREEDY = "greedy"
"""The sample that takes the likeliest token every time."""
TOGETHER = 32
"""Prompts that are asked together: what a killed run loses at most."""
CARRIED = ("system", "tools", "weight")
"""Keys that a pair takes over from the record of its prompt."""


@frozen
class Prompt:
    """One record to be answered."""

    where: str
    """`file:line`."""
    record: Mapping[str, Any]
    prompt: str | list[Any]
    ids: tuple[int, ...]
    occurrence: int
    """How many records before it have the same prompt: each of them gets answers of its own."""

    @property
    def key(self) -> str:
        """Names the record, whatever line it stands on."""
        text = json.dumps(self.record, sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(f"{self.occurrence}\n{text}".encode(), digest_size=16).hexdigest()

    @property
    def request(self) -> Request:
        """Its draws are named by its token ids and its occurrence, whatever line it stands on."""
        return Request(self.ids, f"{stable_seed(self.ids):016x}-{self.occurrence}")


@frozen
class Answer:
    """One answer of the model, and what it was rewarded with."""

    sample: int | str
    """Its number, or `greedy`."""
    text: str
    tokens: int
    """The end of the sequence included."""
    finish_reason: str
    """`stop`: the model ended it; `length`: it was cut at `max_tokens`."""
    reward: float
    rewards: Mapping[str, float]


@frozen
class Choice:
    """Which answers make pairs."""

    threshold: float
    """An answer is right from this total reward on."""
    most: int = 1
    """Pairs a prompt."""


@frozen
class Outcome:
    """What became of the prompts."""

    prompts: int = 0
    paired: int = 0
    """Gave at least one pair."""
    pairs: int = 0
    all_right: int = 0
    all_wrong: int = 0
    only_cut: int = 0
    """Had a right answer, but only ones that were cut at `max_tokens`, which are never chosen."""
    answers: int = 0
    right: int = 0
    cut: int = 0
    """Answers that reached `max_tokens`."""
    greedy: int = 0
    greedy_right: int = 0
    reused: int = 0
    """Prompts whose answers an earlier run had sampled."""


def read_prompts(
    file: Path, tokenizer: Tokenizer, *, key: str = "prompt", raw: bool = False, limit: int | None = None
) -> list[Prompt]:
    """The records of a file with the token ids of their prompts: strings or message lists under `key`.

    Raises one DataError that lists all bad rows.
    """
    problems: list[str] = []
    found: list[Prompt] = []
    seen: dict[tuple[int, ...], int] = {}
    rows = 0
    for where, record in read_records(file):
        if limit is not None and rows >= limit:
            break
        rows += 1
        try:
            if isinstance(record, DataError):
                raise record
            prompt, ids = _prompt(record, tokenizer, key, raw)
        except DataError as error:
            problems.append(f"{where}: {error}")
            continue
        found.append(Prompt(where, record, prompt, ids, seen.get(ids, 0)))
        seen[ids] = seen.get(ids, 0) + 1
    if problems:
        raise DataError(bad_rows(file, problems, rows))
    return found


def _prompt(record: Any, tokenizer: Tokenizer, key: str, raw: bool) -> tuple[Any, tuple[int, ...]]:
    if not isinstance(record, Mapping):
        raise DataError(f"expected a JSON object, found {type(record).__name__}")
    if key not in record:
        raise DataError(f"no {key!r}, found {', '.join(map(repr, record)) or 'no key at all'}")
    prompt = record[key]
    if isinstance(prompt, str) and (raw or not tokenizer.has_template):
        ids = tokenizer.encode(prompt, add_special=True)
    else:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        good = isinstance(turns, list) and all(
            isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in turns
        )
        if not good or not turns:
            raise DataError(f"{key!r} must be a string or a list of messages with role and content")
        if raw:
            raise DataError(f"{key!r} is a list of messages, which raw text cannot hold")
        system = record.get("system")
        if isinstance(system, str) and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": system}, *turns]
        ids = tokenizer.render_prompt(turns, record.get("tools"))
    if not ids:
        raise DataError(f"{key!r} is empty")
    return prompt, tuple(ids)


def check_rewards(file: Path, prompts: Sequence[Prompt], rewards: Sequence[NamedReward]) -> None:
    """Score an empty answer to every record: what a reward cannot score is found before anything is sampled.

    Raises one DataError that lists all of them.
    """
    problems = []
    for prompt in prompts:
        try:
            rewarded(rewards, "", prompt.record, prompt.where)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError(bad_rows(file, problems, len(prompts)))


def answers(
    engine: LiveEngine, prompts: Sequence[Prompt], sampling: Sampling, rewards: Sequence[NamedReward], *,
    greedy: bool = True,
) -> Iterator[list[Answer]]:  # fmt: skip
    """For each prompt in order, the greedy answer (with `greedy`) and `sampling.samples` drawn ones, scored. Some
    prompts are asked together.

    Raises DataError where a reward fails.
    """
    for start in range(0, len(prompts), TOGETHER):
        part = prompts[start : start + TOGETHER]
        requests = [prompt.request for prompt in part]
        found: list[dict[int, Completion]] = [{} for _ in part]
        if greedy:
            for i, _, completion in engine.generate(requests, evolve(sampling, temperature=0.0, samples=1)):
                found[i][-1] = completion
        wanted, told = sampling.samples + greedy, 0
        for i, sample, completion in engine.generate(requests, sampling):
            found[i][sample] = completion
            while told < len(part) and len(found[told]) == wanted:
                yield [_scored(part[told], k, each, rewards) for k, each in sorted(found[told].items())]
                told += 1


def _scored(prompt: Prompt, sample: int, completion: Completion, rewards: Sequence[NamedReward]) -> Answer:
    text = completion.text or ""
    got = rewarded(rewards, text, prompt.record, prompt.where)
    name = GREEDY if sample < 0 else sample
    return Answer(name, text, len(completion.ids), str(completion.finish_reason), got.total, got.values)


def choose(answers: Iterable[Answer], choice: Choice) -> list[tuple[Answer, Answer]]:
    """(right, wrong) pairs, at most `choice.most`: first those of a greedy answer that is wrong, then in the order of
    the samples, each wrong answer once before any comes again. Of equal texts one counts; what was cut at its length is
    never chosen."""
    distinct = {a.text: a for a in reversed(list(answers))}
    ordered = sorted(distinct.values(), key=lambda a: -1 if isinstance(a.sample, str) else a.sample)
    right = [a for a in ordered if a.reward >= choice.threshold and a.finish_reason != "length"]
    wrong = [a for a in ordered if a.reward < choice.threshold]
    pairs = [(right[(i + turn) % len(right)], bad) for turn in range(len(right)) for i, bad in enumerate(wrong)]
    return pairs[: choice.most]


def pair_record(prompt: Prompt, chosen: Answer, rejected: Answer, facts: Mapping[str, Any]) -> dict[str, Any]:
    """A record that the format `preference` reads. `origin` says how the pair was made."""

    def told(each: Answer) -> dict[str, Any]:
        return {k: v for k, v in asdict(each).items() if k not in ("text", "reward")}

    return {
        "prompt": prompt.prompt,
        **{key: prompt.record[key] for key in CARRIED if key in prompt.record},
        "chosen": chosen.text,
        "rejected": rejected.text,
        "score_chosen": chosen.reward,
        "score_rejected": rejected.reward,
        "origin": {"prompt": prompt.where, "chosen": told(chosen), "rejected": told(rejected), **facts},
    }


def samples_file(output: Path) -> Path:
    """Where the answers of a pairs file are kept."""
    return output.with_name(f"{output.stem}.samples.jsonl")


@define(eq=False)
class Samples:
    """The answers so far: a file of one line a prompt, headed by what they were made with."""

    path: Path
    facts: Mapping[str, Any]
    answers: dict[str, list[Answer]] = field(factory=dict)
    """By the key of their prompt."""
    _file: IO[bytes] | None = None

    @classmethod
    @contextmanager
    def open(cls, path: Path, facts: Mapping[str, Any]) -> Iterator[Samples]:
        """Read what is there, and hold the file. A last line that a killed run left unfinished is taken off.

        Raises ConfigError where another process holds the file or it was made with other facts, DataError where it is
        damaged.
        """
        found = cls(path, json.loads(json.dumps(facts)))
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
        lines = whole.splitlines()
        if not lines:
            self._append(self.facts)
            return
        try:
            head, *rest = [json.loads(line) for line in lines]
            for entry in rest:
                self.answers[entry["key"]] = [Answer(**each) for each in entry["answers"]]
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{self.path} is damaged ({error}); delete it to sample anew") from error
        changed = [name for name in {**self.facts, **head} if head.get(name) != self.facts.get(name)]
        if changed:
            told = "; ".join(f"{name} was {head.get(name)!r}, is {self.facts.get(name)!r}" for name in changed)
            raise ConfigError(
                f"{self.path} holds answers that were made otherwise ({told}); choose another output, or delete it to "
                "sample anew"
            )

    def add(self, prompt: Prompt, answers: list[Answer]) -> None:
        self.answers[prompt.key] = answers
        self._append({"key": prompt.key, "prompt": prompt.where, "answers": [asdict(each) for each in answers]})

    def _append(self, value: Mapping[str, Any]) -> None:
        """One line, on disk before anything else happens."""
        assert self._file is not None
        self._file.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def make_pairs(
    prompts: Sequence[Prompt], ask: Callable[[Sequence[Prompt]], Iterable[list[Answer]]], output: Path, choice: Choice,
    facts: Mapping[str, Any], told: Callable[[int, Outcome], None] = lambda done, outcome: None,
) -> Outcome:  # fmt: skip
    """Answer every prompt that has no answers yet and write the pairs of all of them to `output`, whole.

    `ask` gives the answers of the prompts that it is called with, in their order. `facts` are what answers depend on
    beside their prompt; they stand in every pair. `told` is called after each prompt with the count of those that are
    done. Raises DataError where no prompt gave a pair; the answers are kept.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    outcome = Outcome()
    with Samples.open(samples_file(output), facts) as samples:
        asked = iter(ask([prompt for prompt in prompts if prompt.key not in samples.answers]))
        for done, prompt in enumerate(prompts, start=1):
            answers = samples.answers.get(prompt.key)
            reused = answers is not None
            if answers is None:
                answers = next(asked)
                samples.add(prompt, answers)
            pairs = choose(answers, choice)
            lines += [json.dumps(pair_record(prompt, *pair, facts), ensure_ascii=False) + "\n" for pair in pairs]
            outcome = _count(outcome, answers, len(pairs), reused, choice.threshold)
            told(done, outcome)
        if not lines:
            raise DataError(
                f"no prompt gave a pair: of {outcome.prompts}, {outcome.all_right} had only right answers, "
                f"{outcome.all_wrong} only wrong ones, {outcome.only_cut} right ones that were all cut; "
                f"the answers are in {samples.path}"
            )
        atomic.write_text(output, "".join(lines))
    return outcome


def _count(outcome: Outcome, answers: Sequence[Answer], pairs: int, reused: bool, threshold: float) -> Outcome:
    right = [a.reward >= threshold for a in answers]
    greedy = [r for a, r in zip(answers, right) if a.sample == GREEDY]
    mixed = any(right) and not all(right)
    return Outcome(
        prompts=outcome.prompts + 1,
        paired=outcome.paired + (pairs > 0),
        pairs=outcome.pairs + pairs,
        all_right=outcome.all_right + all(right),
        all_wrong=outcome.all_wrong + (not any(right)),
        only_cut=outcome.only_cut + (mixed and not pairs),
        answers=outcome.answers + len(answers),
        right=outcome.right + sum(right),
        cut=outcome.cut + sum(a.finish_reason == "length" for a in answers),
        greedy=outcome.greedy + len(greedy),
        greedy_right=outcome.greedy_right + sum(greedy),
        reused=outcome.reused + reused,
    )


def folder_facts(folder: Path) -> dict[str, Any]:
    """A model or adapter folder, and what tells it from a changed one: the names, sizes and times of its files."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in (".safetensors", ".json", ".jinja"))
    text = repr([(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files])
    return {"path": str(folder), "files": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}

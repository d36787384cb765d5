"""`mortice eval`: how good a model is, with or without an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attrs import asdict
from cyclopts import Parameter

from mortice.cli.generate import template_variable
from mortice.cli.output import bar, print_json, print_table, warn
from mortice.errors import ConfigError

if TYPE_CHECKING:
    from mortice.evaluation import Measure
    from mortice.rating import Rater

EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal."""
AT_ONCE = 8
"""Rows between two movements of the bar."""


def evaluate(
    model: str,
    output: Path | None = None,
    *,
    adapter: Path | None = None,
    task: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    split: str = "test",
    perplexity: Path | None = None,
    preference: Path | None = None,
    format: str | None = None,
    prompt: str = "prompt",
    template: str | None = None,
    variable: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    rollout: str = "kv-cache",
    max_tokens: int = 512,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    limit: int | None = None,
    max_length: int = 2048,
    against: Path | None = None,
    json: bool = False,
) -> int:
    """Put tasks to a model and grade its answers; measure perplexity and preference accuracy.

    Every answer is written beside the output as it comes; the same command goes on from there.

    Parameters
    ----------
    model
        Model folder or hub id.
    output
        Results file (JSON); answers go to NAME.answers.jsonl beside it.
    adapter
        Adapter folder.
    task
        A task by name, or '{name = "gsm8k", file = "test.jsonl"}' with options. May be given several times.
    split
        Split of the tasks.
    perplexity
        File of texts or answers: exp of the mean negative log-probability of what is scored.
    preference
        File of pairs: how often the chosen answer is likelier than the rejected one.
    format
        What the records of these files are (default: "text" for perplexity, "preference" for pairs).
    prompt
        How a problem becomes a prompt: a format, or '{name = "prompt", template = "none"}' with options.
    template
        Chat template: a name among the checkpoint's own, or a .jinja file.
    variable
        NAME=VALUE that the chat template is given, such as enable_thinking=false. May be given several times.
    rollout
        Engine that samples: a name, or an inline table with options.
    max_tokens
        Cut an answer after this many tokens.
    temperature
        0 takes the likeliest token every time.
    top_p
        Sample from the likeliest tokens that together have this probability.
    top_k
        Sample from this many likeliest tokens; 0 for all.
    seed
        Names the draws, and the order of generated problems.
    limit
        Only the first problems, or rows.
    max_length
        Cut rows of perplexity and preference files at this many tokens.
    against
        Results file of another evaluation: differences, paired by problem.
    json
        Print JSON.
    """
    from mortice import blas

    blas.load()
    from mortice.cli.pairs import strategy_of
    from mortice.plugins import load_plugins
    from mortice.protocols import Sampling
    from mortice.rating import open_rater

    if not task and perplexity is None and preference is None:
        raise ConfigError("say what to measure: --task NAME, --perplexity FILE or --preference FILE")
    for name, value, good in (
        ("--max-tokens", max_tokens, max_tokens >= 1),
        ("--temperature", temperature, temperature >= 0),
        ("--top-p", top_p, 0 < top_p <= 1),
        ("--top-k", top_k, top_k >= 0),
        ("--limit", limit, limit is None or limit >= 1),
        ("--max-length", max_length, max_length >= 2),
    ):
        if not good:
            raise ConfigError(f"{name} {value} is out of range")
    if against is not None and not against.expanduser().is_file():
        raise ConfigError(f"--against {against}: no such file")
    plugins = load_plugins()
    chosen = [strategy_of(plugins, "task", text, "--task") for text in task]
    names = _numbered([each.name for each in chosen])
    tasks = dict(zip(names, (each.options for each in chosen)))
    rater = open_rater(model, adapter, plugins=plugins)
    if rater.tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer.json")
    tokenizer = rater.tokenizer.using(template, dict(map(template_variable, variable)))
    sampling = Sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, eos_ids=tokenizer.eos_ids
    )
    facts = {
        "model": _folder(rater, model),
        "adapter": _adapter(adapter),
        "template": template,
        "variables": dict(map(template_variable, variable)),
        "prompt": prompt,
        "split": split,
        "sampling": {
            "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed,
        },
    }  # fmt: skip
    found: dict[str, Mapping[str, Any]] = {}
    if tasks:
        form = strategy_of(plugins, "data", prompt, "--prompt").options
        engine = strategy_of(plugins, "rollout", rollout, "--rollout").options
        try:
            found |= _tasks(
                rater,
                tokenizer,
                tasks,
                form,
                engine,
                sampling,
                facts,
                output,
                against,
                split=split,
                limit=limit,
                quiet=json,
            )
        except KeyboardInterrupt:
            warn("stopped" + ("" if output is None else "; the same command goes on from what is there"))
            return 130
    files = (("perplexity", perplexity, "text"), ("preference", preference, "preference"))
    for kind, file, usual in files:
        if file is not None:
            form = strategy_of(plugins, "data", format or usual, "--format")
            found[kind] = _over_file(rater, tokenizer, plugins, form, file.expanduser(), kind, max_length, limit, json)
    results = {**facts, "results": {name: {k: _plain(v) for k, v in each.items()} for name, each in found.items()}}
    if output is not None:
        import json as json_

        from mortice import atomic

        atomic.write_text(output.expanduser(), json_.dumps(results, indent=1, ensure_ascii=False, default=str) + "\n")
    if json:
        print_json(results)
        return 0
    rows = [
        (name, key, str(v) if not isinstance(v, float) else f"{v:.4f}")
        for name, each in found.items()
        for key, v in each.items()
    ]
    print_table(None, ("", "", "mean ± 95 %"), rows)
    return 0


def _numbered(names: list[str]) -> list[str]:
    counts: dict[str, int] = {}
    found = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        found.append(name if counts[name] == 1 else f"{name}-{counts[name]}")
    return found


def _folder(rater: Rater, model: str) -> Any:
    from mortice.pairing import folder_facts
    from mortice.pretrained import resolve

    return folder_facts(resolve(model))


def _adapter(adapter: Path | None) -> Any:
    from mortice.pairing import folder_facts

    return None if adapter is None else folder_facts(adapter.expanduser().absolute())


def _tasks(
    rater: Rater, tokenizer: Any, tasks: Mapping[str, Any], form: Any, engine: Any, sampling: Any,
    facts: Mapping[str, Any], output: Path | None, against: Path | None, *, split: str, limit: int | None, quiet: bool,
) -> dict[str, Mapping[str, Any]]:  # fmt: skip
    """Answers to all problems of all tasks, their means, and differences to another evaluation."""
    import tempfile

    from mortice.evaluation import Answers, answer, differences, problems_of, read_answers, summary
    from mortice.protocols import EngineContext

    problems = [
        problem
        for name, task in tasks.items()
        for problem in problems_of(name, task, form, tokenizer, split=split, seed=sampling.seed, limit=limit)
    ]
    rater.engine.model.read()
    rater.engine.model.bind(rater.params)
    live = engine.open(EngineContext(rater.engine.model, tokenizer, lambda text, **_: warn(text)))
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "answers.jsonl" if output is None else answers_file(output)
        with Answers.open(file, facts) as answers, bar("problems", quiet=quiet, every=EVERY) as show:
            try:
                graded = answer(problems, tasks, live, sampling, answers, show)
            finally:
                live.close()
            before = {} if against is None else read_answers(answers_file(against))[1]
            known = dict(answers.graded)
    found: dict[str, Mapping[str, Any]] = {}
    for name, task in tasks.items():
        own = [each for problem, each in zip(problems, graded) if problem.task == name]
        found[name] = {"problems": len(own), **summary(task, own)}
        if against is not None:
            keys = {problem.key for problem in problems if problem.task == name}
            old = {key: each for key, (_, each) in before.items() if key in keys}
            if not old:
                raise ConfigError(f"--against {against} has no answer to a problem of task {name}")
            changes = differences(old, {key: known[key] for key in keys})
            found[f"{name} − before"] = {"problems": len(old), **changes}
    return found


def answers_file(output: Path) -> Path:
    """Where the answers of a results file are kept."""
    output = output.expanduser()
    return output.with_name(f"{output.stem}.answers.jsonl")


def _over_file(
    rater: Rater, tokenizer: Any, plugins: Any, form: Any, file: Path, kind: str, max_length: int, limit: int | None,
    quiet: bool,
) -> Mapping[str, Any]:  # fmt: skip
    from mortice.cli.score import _Lengths
    from mortice.config import formats_of
    from mortice.data import load_groups
    from mortice.evaluation import perplexity, preference

    if rater.gives != "logprobs":
        raise ConfigError(f"--{kind}: a reward model gives no log-probabilities; leave out --adapter")
    groups, counts = load_groups(
        file, form.options, tokenizer, _Lengths(max_length, limit), name=form.name, formats=partial(formats_of, plugins)
    )
    for message, _ in counts.messages(file, max_length):
        warn(message)
    logprobs: list[Any] = []
    with bar("rows", quiet=quiet, every=EVERY) as show:
        for start in range(0, len(groups), AT_ONCE):
            logprobs += rater.engine.logprobs(rater.params, groups[start : start + AT_ONCE])
            show(len(logprobs), len(groups), groups[min(len(logprobs), len(groups) - 1)].id)
    return perplexity(groups, logprobs) if kind == "perplexity" else preference(groups, logprobs)


def _plain(value: Measure | float | int) -> Any:
    return value if isinstance(value, (int, float)) else asdict(value)

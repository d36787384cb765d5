"""`mortice pairs`: preference pairs from a model's own answers, told right from wrong by rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from attrs import asdict
from cyclopts import Parameter

from mortice.cli.generate import template_variable
from mortice.cli.output import bar, print_json, print_table, warn
from mortice.errors import ConfigError

EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal."""


def pairs(
    model: str,
    prompts: Path,
    output: Path,
    *,
    reward: Annotated[tuple[str, ...], Parameter(negative="")],
    adapter: Path | None = None,
    key: str = "prompt",
    raw: bool = False,
    template: str | None = None,
    variable: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    samples: int = 4,
    greedy: bool = True,
    max_pairs: int = 1,
    threshold: float | None = None,
    max_tokens: Annotated[int, Parameter(name=["--max-tokens", "-n"])] = 256,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    limit: int | None = None,
    rollout: str | None = None,
    json: bool = False,
) -> int:
    """Sample answers to prompts, score them, and write pairs of a right and a wrong one.

    The output is data for format = "preference". Answers are kept in a file beside it (OUTPUT.samples.jsonl): the same
    command goes on where a stopped one was, and other --max-pairs or --threshold choose from the same answers.

    Parameters
    ----------
    model
        Model folder or hub id.
    prompts
        JSON Lines: a string or a list of messages under --key, and what the rewards read.
    output
        File of pairs to write.
    reward
        A reward by name, or '{name = "regex", pattern = "yes"}' with options; repeatable, they are added up.
    adapter
        Adapter folder (mortice, mlx-lm or PEFT).
    key
        Key of the prompt in the records.
    raw
        Continue strings as they are, without the chat template; then train with template = "none".
    template
        Chat template: a name among the checkpoint's own, or a .jinja file.
    variable
        NAME=VALUE that the chat template is given, such as enable_thinking=false. May be given several times.
    samples
        Answers drawn for each prompt.
    greedy
        The greedy answer too: where it is wrong, it is rejected first.
    max_pairs
        Most pairs a prompt.
    threshold
        An answer is right from this sum of rewards on (default: what all rewards at 1 give).
    max_tokens
        Cut an answer after this many tokens; one that was cut is never chosen.
    temperature
        Of the drawn answers.
    top_p
        Sample from the likeliest tokens that together have this probability.
    top_k
        Sample from this many likeliest tokens; 0 for all.
    seed
        Names the draws, together with prompt and sample.
    limit
        Read only the first prompts.
    rollout
        The engine that samples: a name, or '{name = "kv-cache", rows = 32}' with options (`mortice list rollout`).
    json
        Print JSON.
    """
    from mortice import blas

    blas.load()
    from mortice.pairing import Choice, answers, check_rewards, folder_facts, make_pairs, read_prompts, samples_file
    from mortice.plugins import load_plugins
    from mortice.pretrained import load
    from mortice.protocols import EngineContext, Sampling
    from mortice.rewards import full_marks

    for name, value, good in (
        ("--samples", samples, samples >= 1),
        ("--max-pairs", max_pairs, max_pairs >= 1),
        ("--max-tokens", max_tokens, max_tokens >= 1),
        ("--temperature", temperature, temperature > 0),
        ("--top-p", top_p, 0 < top_p <= 1),
        ("--top-k", top_k, top_k >= 0),
        ("--limit", limit, limit is None or limit >= 1),
    ):
        if not good:
            raise ConfigError(f"{name} {value} is out of range")
    if raw and (template is not None or variable):
        raise ConfigError("--template and --variable have no place in raw text; leave out --raw or them")
    output = output.expanduser().absolute()
    if output.exists() and not samples_file(output).exists():
        raise ConfigError(f"{output} exists, and was not made by this command; choose another output")
    if prompts.expanduser().absolute() in (output, samples_file(output)):
        raise ConfigError(f"{prompts} is the file of prompts; choose another output")
    plugins = load_plugins()
    scored = rewards_of(reward, plugins)
    chosen = engine_of(plugins, rollout)
    pretrained = load(model, plugins=plugins, adapter=adapter)
    tokenizer, network = pretrained.tokenizer, pretrained.model
    if tokenizer is None or pretrained.path is None:
        raise ConfigError(f"{pretrained.path} has no tokenizer.json")
    variables = dict(map(template_variable, variable))
    tokenizer = tokenizer.using(template, variables)
    found = read_prompts(prompts.expanduser(), tokenizer, key=key, raw=raw, limit=limit)
    check_rewards(prompts, found, scored)
    sampling = Sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, samples=samples, seed=seed,
        eos_ids=tokenizer.eos_ids,
    )  # fmt: skip
    facts = {
        "model": folder_facts(pretrained.path),
        "adapter": None if adapter is None else folder_facts(adapter.expanduser().absolute()),
        "rewards": {each.name: asdict(each.reward, value_serializer=_fact) for each in scored},
        "template": "none" if raw else template,
        "template_variables": variables,
        "sampling": {
            **{name: getattr(sampling, name) for name in ("seed", "samples", "temperature", "top_p", "top_k")},
            "max_tokens": max_tokens,
            "greedy": greedy,
        },
    }
    if "weight-sync" not in chosen.options.provides:  # whose answers they are, then, the engine alone says
        facts["rollout"] = {"name": chosen.name, **asdict(chosen.options, value_serializer=_fact)}
    engine = chosen.options.open(EngineContext(network, tokenizer, lambda message, **_: warn(message)))
    choice = Choice(full_marks(scored) if threshold is None else threshold, max_pairs)
    try:
        with bar("prompts", quiet=json, every=EVERY) as show:
            outcome = make_pairs(
                found,
                lambda left: answers(engine, left, sampling, scored, greedy=greedy),
                output,
                choice,
                facts,
                lambda done, so_far: show(
                    done, len(found), f"{so_far.pairs} pairs, {so_far.right} of {so_far.answers} answers right"
                ),
            )
    except KeyboardInterrupt:
        warn(f"stopped; the same command goes on from {samples_file(output)}")
        return 130
    finally:
        engine.close()
    if json:
        print_json({"output": str(output), "threshold": choice.threshold, **asdict(outcome)})
        return 0
    print_table(None, ("", ""), [(name, text) for name, text in summary(outcome, choice.threshold) if text])
    print(f"\n{output}")
    return 0


def _fact(instance: Any, field: Any, value: Any) -> Any:
    """An option as JSON holds it; of a folder, what is in it counts."""
    from mortice.pairing import folder_facts

    if isinstance(value, Path):
        return folder_facts(value.absolute()) if value.is_dir() else str(value)
    return value


def summary(outcome: Any, threshold: float) -> list[tuple[str, str]]:
    """What became of the prompts, in words."""

    def share(part: int, whole: int) -> str:
        return f"{part:,} of {whole:,} ({part / whole:.0%})" if whole else ""

    return [
        ("pairs", f"{outcome.pairs:,}"),
        ("prompts with pairs", share(outcome.paired, outcome.prompts)),
        ("all answers right", share(outcome.all_right, outcome.prompts)),
        ("all answers wrong", share(outcome.all_wrong, outcome.prompts)),
        ("right ones all cut", share(outcome.only_cut, outcome.prompts) if outcome.only_cut else ""),
        (f"answers right (reward ≥ {threshold:g})", share(outcome.right, outcome.answers)),
        ("greedy answers right", share(outcome.greedy_right, outcome.greedy)),
        ("answers cut at their length", share(outcome.cut, outcome.answers)),
        ("answers from an earlier run", share(outcome.reused, outcome.prompts) if outcome.reused else ""),
    ]


def rewards_of(texts: tuple[str, ...], plugins: Any) -> Any:
    """Rewards by name, or as inline TOML tables. Raises ConfigError or PluginError."""
    from mortice.rewards import named

    if not texts:
        raise ConfigError(f"--reward is missing (available: {', '.join(plugins.registry.names('reward')) or 'none'})")
    chosen = [strategy_of(plugins, "reward", text, "--reward") for text in texts]
    return named([(each.name, each.options) for each in chosen])


def engine_of(plugins: Any, text: str | None) -> Any:
    """The rollout engine of a flag, or the default one. Raises ConfigError or PluginError."""
    if text is None:
        defaults = plugins.registry.defaults("rollout")
        if len(defaults) != 1:
            raise ConfigError(f"--rollout is missing (available: {', '.join(plugins.registry.names('rollout'))})")
        text = defaults[0].name
    return strategy_of(plugins, "rollout", text, "--rollout")


def strategy_of(plugins: Any, kind: str, text: str, flag: str) -> Any:
    """A strategy by name, or as an inline TOML table with its options. Raises ConfigError or PluginError."""
    import tomllib

    from mortice.config import build_strategy

    table: Any = text
    if text.lstrip().startswith("{"):
        try:
            table = tomllib.loads(f"{kind} = {text}")[kind]
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{flag} {text}: no inline TOML table: {error}") from error
    try:
        return build_strategy(plugins, kind, table)
    except ConfigError as error:
        raise ConfigError(f"{flag} {text}: {str(error).replace('configuration: ', '')}") from error

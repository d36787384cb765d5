"""`mortice score`: rewards (or log-probabilities) of the answers in a data file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attrs import frozen
from cyclopts import Parameter

from mortice.cli.generate import template_variable
from mortice.cli.output import bar, print_json, print_table, warn
from mortice.errors import ConfigError

if TYPE_CHECKING:
    from mortice.batch import Group

AT_ONCE = 8
"""Rows between two movements of the bar."""
EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal."""


@frozen
class _Lengths:
    max_length: int
    limit: int | None
    truncation: str = "keep-end"


def score(
    model: str,
    data: Path,
    output: Path | None = None,
    *,
    adapter: Path | None = None,
    format: str = "completion",
    template: str | None = None,
    variable: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    max_length: int = 2048,
    limit: int | None = None,
    json: bool = False,
) -> None:
    """Rate the answers in a data file with a trained reward model.

    A reward model is an adapter folder that was trained with a head of its own ([head] name = "reward"). Of any other
    model the number is the log-probability of the answer, summed over its tokens.

    Parameters
    ----------
    model
        Model folder or hub id.
    data
        JSON Lines, or a .json list.
    output
        File to write: each record with its "reward" ("logprob"), or "rewards" of several answers, in order (chosen ones
        first).
    adapter
        Adapter folder of the trained model.
    format
        What the records are, as in [data]: a name, or '{name = "rated", min_gap = 1.0}' with options.
    template
        Chat template: a name among the checkpoint's own, or a .jinja file.
    variable
        NAME=VALUE that the chat template is given, such as enable_thinking=false. May be given several times.
    max_length
        Cut prompts so that they and their longest answer have this many tokens.
    limit
        Read only the first rows.
    json
        Print JSON.
    """
    from mortice import blas

    blas.load()
    from mortice.cli.pairs import strategy_of
    from mortice.config import formats_of
    from mortice.data import load_groups
    from mortice.plugins import load_plugins
    from mortice.rating import open_rater

    for name, value, good in (("--max-length", max_length, max_length >= 2), ("--limit", limit, (limit or 1) >= 1)):
        if not good:
            raise ConfigError(f"{name} {value} is out of range")
    data = data.expanduser()
    if output is not None and output.expanduser().absolute() == data.absolute():
        raise ConfigError(f"{data} is the file of answers; choose another output")
    plugins = load_plugins()
    form = strategy_of(plugins, "data", format, "--format")
    rater = open_rater(model, adapter, plugins=plugins)
    if rater.tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer.json")
    tokenizer = rater.tokenizer.using(template, dict(map(template_variable, variable)))
    whole = getattr(form.options, "with_every_answer", lambda: form.options)()
    groups, counts = load_groups(
        data, whole, tokenizer, _Lengths(max_length, limit), name=form.name, formats=partial(formats_of, plugins),
        training=False,
    )  # fmt: skip
    for message, _ in counts.messages(data, max_length):
        warn(message)
    found: list[list[float]] = []
    with bar("rows", quiet=json, every=EVERY) as show:
        for start in range(0, len(groups), AT_ONCE):
            found += rater.rate(groups[start : start + AT_ONCE])
            show(len(found), len(groups), groups[min(len(found), len(groups) - 1)].id)
    if output is not None:
        _write(output.expanduser(), groups, found, rater.gives)
    facts = summary(groups, found, rater.gives)
    if json:
        print_json({"output": None if output is None else str(output.expanduser().absolute()), **facts})
        return
    print_table(None, ("", ""), [(name, f"{v:.4f}" if isinstance(v, float) else str(v)) for name, v in facts.items()])
    if output is not None:
        print(f"\n{output.expanduser().absolute()}")


def _write(output: Path, groups: Sequence[Group], found: Sequence[Sequence[float]], gives: str) -> None:
    import json

    from mortice import atomic

    lines = []
    for group, numbers in zip(groups, found):
        own = {gives: list(numbers)} if len(numbers) > 1 else {gives.removesuffix("s"): numbers[0]}
        lines.append(json.dumps({**(group.record or {}), **own}, ensure_ascii=False) + "\n")
    atomic.write_text(output, "".join(lines))


def summary(groups: Sequence[Group], found: Sequence[Sequence[float]], gives: str) -> dict[str, Any]:
    """Mean and spread of all numbers; of pairs, how often and by how much the chosen one is ahead; of labelled answers,
    the means of both kinds."""
    from mortice.batch import LABEL

    flat = [x for numbers in found for x in numbers]
    mean = sum(flat) / len(flat)
    facts: dict[str, Any] = {
        "rows": len(groups),
        "answers": len(flat),
        "mean": mean,
        "standard deviation": (sum((x - mean) ** 2 for x in flat) / len(flat)) ** 0.5,
        "lowest": min(flat),
        "highest": max(flat),
    }
    margins = [numbers[c] - numbers[r] for group, numbers in zip(groups, found) for c, r in group.pairs]
    if margins:
        facts |= {
            "pairs": len(margins),
            "accuracy": sum(m > 0 for m in margins) / len(margins),
            "margin": sum(margins) / len(margins),
        }
    labels = [c.extras.get(LABEL) for group in groups for c in group.completions]
    for label, name in ((1.0, "desirable"), (0.0, "undesirable")):
        own = [x for x, known in zip(flat, labels) if known == label]
        if own:
            facts[f"mean of {name}"] = sum(own) / len(own)
    return {"gives": gives, **facts}

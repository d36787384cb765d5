"""`mortice data`: what becomes of the records of a run, before a model sees them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mortice.batch import SCORE
from mortice.cli.output import print_json, print_table, warn
from mortice.cli.run_flags import RunFlags, load

if TYPE_CHECKING:
    from mortice.batch import Group
    from mortice.data import DataCounts

BARS = 8
"""Bars of a histogram."""


def data(file: Path, *, rows: int = 2, json: bool = False, flags: RunFlags | None = None) -> None:
    """Show counts, histograms and the first rows of a run's data: what is scored, what is cut, what is dropped.

    Parameters
    ----------
    file
        Run file (TOML).
    rows
        How many rows to show token by token.
    json
        Print JSON.
    """
    from mortice.data import load_groups
    from mortice.errors import ConfigError
    from mortice.hub import looks_like_hub_id
    from mortice.tokenizer import Tokenizer

    if rows < 0:
        raise ConfigError(f"--rows must be 0 or more, found {rows}")
    config = load(file, flags)
    for notice in config.notices:
        warn(notice)
    if config.data.train is None and config.task is not None:
        raise ConfigError(f"the prompts are those of task {config.all('task')[0].name!r}; this command shows files")
    if config.data.train is None:
        raise ConfigError("data.train is not set: which file is to be shown?")
    path = config.model.config or config.model.path or ""
    folder = Path(path).parent if path.endswith(".json") else Path(path)
    if not folder.is_dir() and looks_like_hub_id(path):
        from mortice import hub

        folder = hub.fetch(path)
    if not folder.is_dir():
        raise ConfigError(f"model.path: no such folder: {folder}")
    tokenizer = Tokenizer.load(folder).using(config.model.chat_template, config.model.template_variables)
    sampled = config.samples
    reports: list[dict[str, Any]] = []
    for name in ("train", "valid"):
        part = getattr(config.data, name)
        if part is None:
            continue
        groups, counts = load_groups(
            part, config.format, tokenizer, config.data, name=config.data.format, formats=config.formats,
            filters=config.filters, to_sample=config.sampling.max_tokens if sampled else None,
        )  # fmt: skip
        reports.append(
            {
                "file": str(part),
                "counts": counts.asdict(),
                "left out": left_out(counts, part, config.data.max_length),
                "spreads": {name: spread(values) for name, values in measures(groups).items()},
                "scored tokens": sum(g.scored_tokens for g in groups),
                "groups": groups[:rows] if name == "train" else [],
            }
        )
    if json:
        print_json([report | {"groups": [shown(g, tokenizer) for g in report["groups"]]} for report in reports])
        return
    for report in reports:
        print(f"{report['file']}")
        facts = [
            (name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, tuple) else str(value))
            for name, value in report["counts"].items()
            if (value or name in ("rows", "kept")) and name not in ("filtered", "tied_examples")
        ]
        if not sampled:
            facts.append(("scored tokens", f"{report['scored tokens']:,}"))
        print_table(None, ("", ""), facts)
        for message in report["left out"]:
            print(message)
        for name, found in report["spreads"].items():
            print_table(None, (name, "", ""), histogram(found))
        for group in report["groups"]:
            print_group(group, tokenizer)


def left_out(counts: DataCounts, file: Path, max_length: int) -> list[str]:
    """What filters and ties took from a file, with lines."""
    messages = counts.messages(file, max_length)
    return [text for text, (name, _) in messages if name.startswith(("data_filter_", "data_tied"))]


def measures(groups: Sequence[Group]) -> dict[str, list[float]]:
    """What is worth a histogram, by name: lengths in tokens and, of pairs, how far their answers are apart."""
    pairs = [(g.completions[c], g.completions[r]) for g in groups for c, r in g.pairs]
    found: dict[str, list[float]] = {"prompt tokens": [len(g.prompt_ids) for g in groups]} if groups else {}
    if not any(g.completions for g in groups):
        return found
    if not pairs:
        return found | {"completion tokens": [len(c.ids) for g in groups for c in g.completions]}
    for side, name in enumerate(("chosen", "rejected")):
        answers = [g.completions[k] for g in groups for k in dict.fromkeys(pair[side] for pair in g.pairs)]
        found[f"{name} tokens"] = [len(answer.ids) for answer in answers]
    found["length difference, chosen − rejected tokens"] = [len(c.ids) - len(r.ids) for c, r in pairs]
    scored = [(c.extras[SCORE], r.extras[SCORE]) for c, r in pairs if SCORE in c.extras and SCORE in r.extras]
    if scored:
        found["score gap, chosen − rejected"] = [round(chosen - rejected, 9) for chosen, rejected in scored]
    weights = [weight for g in groups for weight in g.pair_weights]
    return found | ({"pair weight": weights} if weights else {})


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Smallest, median and largest of some values, and how many fall into each of a few equal bins."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    summary = {"min": low, "median": ordered[len(ordered) // 2], "max": high}
    if all(isinstance(value, int) for value in ordered):
        width = max(1, -(-(high - low + 1) // BARS))
        starts = range(int(low), int(high) + 1, int(width))
        to = "–" if low >= 0 else " to "
        names = [f"{n}{to}{n + width - 1}" if width > 1 else str(n) for n in starts]
        counts = [sum(n <= value < n + width for value in ordered) for n in starts]
        return summary | {"bins": dict(zip(names, counts))}
    if low == high:
        return summary | {"bins": {f"{low:g}": len(ordered)}}
    edges = [low + (high - low) * i / BARS for i in range(BARS + 1)]
    places = [min(BARS - 1, bisect.bisect_right(edges, value) - 1) for value in ordered]
    return summary | {"bins": {f"{edges[i]:.3g} to {edges[i + 1]:.3g}": places.count(i) for i in range(BARS)}}


def histogram(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """One row a bin: its bounds, its count, a bar. Then the smallest, the median and the largest."""
    most = max(found["bins"].values())
    rows = [(name, str(count), "█" * round(40 * count / most)) for name, count in found["bins"].items()]
    return [*rows, *((name, f"{found[name]:g}", "") for name in ("min", "median", "max"))]


def shown(group: Any, tokenizer: Any) -> dict[str, Any]:
    """A group as text, for JSON."""
    return {
        "id": group.id,
        "prompt": tokenizer.decode(group.prompt_ids),
        "prompt_ids": list(group.prompt_ids),
        "pairs": [list(pair) for pair in group.pairs],
        "completions": [
            {"text": tokenizer.decode(c.ids), "ids": list(c.ids), "scored": list(c.loss_mask)}
            for c in group.completions
        ],
    }


def print_group(group: Any, tokenizer: Any) -> None:
    """Prompt and completions with what is scored marked: bold and green on a terminal, between ⟦ ⟧ everywhere."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(f"\n── {group.id} " + "─" * 20)
    console.print(Text(tokenizer.decode(group.prompt_ids), style="dim"), soft_wrap=True)
    for k, completion in enumerate(group.completions):
        label = label_of(group, k)
        text = Text(f"[{label}, {sum(completion.loss_mask)} of {len(completion.ids)} tokens scored] ", style="bold")
        for scored, ids in runs(completion.ids, completion.loss_mask):
            piece = tokenizer.decode(ids)
            text.append(f"⟦{piece}⟧" if scored else piece, style="green" if scored else "dim")
        console.print(text, soft_wrap=True)


def label_of(group: Any, k: int) -> str:
    """What a completion is to its group, with its score where it has one."""
    roles = {role for pair in group.pairs for role, other in zip(("chosen", "rejected"), pair) if other == k}
    name = roles.pop() if len(roles) == 1 else f"completion {k}"
    if len(group.completions) > 2 and group.pairs:
        name = f"{name} {k}" if "completion" not in name else name
    score = group.completions[k].extras.get(SCORE)
    return name if score is None else f"{name}, score {score:g}"


def runs(ids: Any, mask: Any) -> list[tuple[bool, list[int]]]:
    """Neighbours with the same mask, together."""
    out: list[tuple[bool, list[int]]] = []
    for token, scored in zip(ids, mask):
        if out and out[-1][0] == scored:
            out[-1][1].append(token)
        else:
            out.append((scored, [token]))
    return out

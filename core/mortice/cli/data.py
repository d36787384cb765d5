"""`mortice data`: what becomes of the records of a run, before a model sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mortice.cli.output import print_json, print_table, warn
from mortice.cli.run_flags import RunFlags, load

BARS = 8
"""Bars of a histogram."""


def data(file: Path, *, rows: int = 2, json: bool = False, flags: RunFlags | None = None) -> None:
    """Show counts, lengths and the first rows of a run's data: what is scored, what is cut, what is dropped.

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
    reports: list[dict[str, Any]] = []
    for name in ("train", "valid"):
        part = getattr(config.data, name)
        if part is None:
            continue
        groups, counts = load_groups(
            part, config.format, tokenizer, config.data, name=config.data.format, formats=config.formats
        )
        reports.append(
            {
                "file": str(part),
                "counts": counts.asdict(),
                "prompt tokens": spread([len(g.prompt_ids) for g in groups]),
                "completion tokens": spread([len(c.ids) for g in groups for c in g.completions]),
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
            (name.replace("_", " "), ", ".join(value) if isinstance(value, tuple) else str(value))
            for name, value in report["counts"].items()
            if value or name in ("rows", "kept")
        ]
        facts.append(("scored tokens", f"{report['scored tokens']:,}"))
        print_table(None, ("", ""), facts)
        for name in ("prompt tokens", "completion tokens"):
            print_table(None, (name, "", ""), histogram(report[name]))
        for group in report["groups"]:
            print_group(group, tokenizer)


def spread(lengths: list[int]) -> dict[str, Any]:
    """Smallest, median and largest of some lengths, and how many fall into each of a few equal bins."""
    ordered = sorted(lengths)
    low, high = ordered[0], ordered[-1]
    width = max(1, -(-(high - low + 1) // BARS))
    bins = {
        f"{start}–{start + width - 1}": sum(start <= n < start + width for n in ordered)
        for start in range(low, high + 1, width)
    }
    return {"min": low, "median": ordered[len(ordered) // 2], "max": high, "bins": bins}


def histogram(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """One row a bin: its bounds, its count, a bar. Then the smallest, the median and the largest."""
    most = max(found["bins"].values())
    rows = [(name, str(count), "█" * round(40 * count / most)) for name, count in found["bins"].items()]
    return [*rows, *((name, str(found[name]), "") for name in ("min", "median", "max"))]


def shown(group: Any, tokenizer: Any) -> dict[str, Any]:
    """A group as text, for JSON."""
    return {
        "id": group.id,
        "prompt": tokenizer.decode(group.prompt_ids),
        "prompt_ids": list(group.prompt_ids),
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
    names = ("chosen", "rejected") if group.pairs and len(group.completions) == 2 else None
    for k, completion in enumerate(group.completions):
        label = names[k] if names else f"completion {k}"
        text = Text(f"[{label}, {sum(completion.loss_mask)} of {len(completion.ids)} tokens scored] ", style="bold")
        for scored, ids in runs(completion.ids, completion.loss_mask):
            piece = tokenizer.decode(ids)
            text.append(f"⟦{piece}⟧" if scored else piece, style="green" if scored else "dim")
        console.print(text, soft_wrap=True)


def runs(ids: Any, mask: Any) -> list[tuple[bool, list[int]]]:
    """Neighbours with the same mask, together."""
    out: list[tuple[bool, list[int]]] = []
    for token, scored in zip(ids, mask):
        if out and out[-1][0] == scored:
            out[-1][1].append(token)
        else:
            out.append((scored, [token]))
    return out

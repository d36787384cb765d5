"""`mortice plan`: what a run will need, before it is made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mortice.cli.output import print_json, print_table, spinner
from mortice.cli.run_flags import RunFlags, load
from mortice.sizes import parse_size, readable

if TYPE_CHECKING:
    from mortice.launch import Prepared
    from mortice.planning import Estimate

BAR = 44
"""Characters of a bar."""
NOTEWORTHY = 0.01
"""Share of the peak from which on what is held beside the run is shown."""


def plan(file: Path, *, json: bool = False, flags: RunFlags | None = None) -> None:
    """Predict peak memory and time of a run, from a few layers of its model on the longest rows of its data.

    With train.memory_limit the options that were left open are chosen so that the run fits, and the choice is shown.
    Nothing is trained or written.

    Parameters
    ----------
    file
        Run file (TOML).
    json
        Print JSON.
    """
    from mortice import blas

    blas.load()
    from mortice.cli.output import warn
    from mortice.launch import Notices, prepare
    from mortice.launch import plan as predict

    config = load(file, flags)
    with spinner(quiet=json) as progress:
        notices = Notices(show=None if json else warn, progress=progress)
        ready = prepare(config, notices)
        estimate = predict(ready)
    limit = ready.config.train.memory_limit
    if json:
        print_json(_facts(ready, estimate, notices.messages))
        return
    _show(ready, estimate, None if limit is None else parse_size(limit))


def _facts(ready: Prepared, estimate: Estimate, messages: list[str]) -> Mapping[str, Any]:
    changes = {} if ready.fitted is None else dict(ready.fitted.changes)
    return {
        "peak": estimate.peak,
        "parts": dict(estimate.parts),
        "update": estimate.update,
        "elsewhere": estimate.elsewhere,
        "head": estimate.head,
        "attention": estimate.attention,
        "seconds_per_step": estimate.seconds,
        "steps": ready.total_steps,
        "tokens": estimate.tokens,
        "longest_row": estimate.longest,
        "scored": estimate.scored,
        "micro_batches": estimate.micro_batches,
        "layers_run": list(estimate.layers),
        "layers": estimate.all_layers,
        "memory_limit": ready.config.train.memory_limit,
        "changes": changes,
        "strategies": _strategies(ready),
        "notices": messages,
    }


def _strategies(ready: Prepared) -> dict[str, str]:
    return {c.kind: c.name for c in ready.config.chosen if c.kind in ("layout", "head", "backward")}


def _show(ready: Prepared, estimate: Estimate, limit: int | None) -> None:
    from mortice.planning import MEANING, PARTS, machine_memory

    whole = max(estimate.peak, limit or 0)
    rows = [
        (name, readable(size), _bar(size, whole), MEANING[name])
        for name in PARTS
        if (size := estimate.parts[name]) or name == "working"
    ]
    if estimate.elsewhere > NOTEWORTHY * estimate.peak:
        rows.append(("elsewhere", readable(estimate.elsewhere), _bar(estimate.elsewhere, whole), "held beside the run"))
    rows.append(("peak", readable(estimate.peak), _bar(estimate.peak, whole), ""))
    if estimate.update > sum(estimate.parts.values()):
        rows[-1] = (*rows[-1][:3], "while the optimizer steps")
    if limit is not None:
        rows.append(("limit", readable(limit), _bar(limit, whole), "train.memory_limit"))
    print_table(None, ("memory", "", "", ""), rows)
    alone = [("head", readable(estimate.head), f"alone, on {estimate.scored:,} scored tokens")]
    if estimate.attention:
        alone.append(("attention", readable(estimate.attention), f"one layer alone, on {estimate.longest:,} tokens"))
    print_table(None, ("working memory", "", ""), alone)
    total = estimate.seconds * ready.total_steps
    count = estimate.micro_batches
    micros = f"{count} micro-batch{'es' if count > 1 else ''}, the largest of {estimate.tokens:,} tokens"
    ran = " and ".join(map(str, estimate.layers))
    how = "all" if estimate.layers[0] == estimate.all_layers else f"{ran} of {estimate.all_layers}"
    print_table(
        None,
        ("time", ""),
        [
            ("a step of the longest rows", f"{_seconds(estimate.seconds)} ({micros})"),
            (f"{ready.total_steps:,} steps", f"at most about {_seconds(total)}, validation left out"),
            ("strategies", ", ".join(f"{kind} {name}" for kind, name in _strategies(ready).items())),
            ("measured on", f"{how} layers; this machine: {readable(machine_memory())}"),
        ],
    )


def _bar(size: float, whole: float) -> str:
    """A bar in eighths of a character."""
    eighths = round(8 * BAR * size / whole) if whole else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _seconds(value: float) -> str:
    if value < 100:
        return f"{value:.2f} s"
    minutes, hours = value / 60, value / 3600
    return f"{minutes:.0f} min" if minutes < 100 else f"{hours:.1f} h"

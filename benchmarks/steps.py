"""Section `steps`: an ORPO, a DPO and an SFT step on prompt-heavy real pairs, against mlx-lm-lora and mlx-lm."""

from __future__ import annotations

from typing import Any

from benchmarks import pairs
from benchmarks.measurement import Contender, Measurement, ratio, value
from benchmarks.report import Report, Table, mib
from benchmarks.settings import Settings

PEERS = {"orpo": "mlx-lm-lora", "dpo": "mlx-lm-lora", "sft": "mlx-lm"}
BETA = 0.1
RECIPE = {"rank": 8, "scale": 10.0, "learning_rate": 1e-5}
"""Of both sides; 10 is mlx-lm-lora's default scale."""


def run(settings: Settings) -> Report:
    report = Report(
        "steps",
        "A step on real pairs",
        "One pair (for SFT one answer) a step, LoRA on every linear layer, AdamW. The peers run their own trainers on "
        "the same token ids. Seconds: mean over the pairs, the first step on each left out; median over the rounds. "
        "Peak: the highest over all steps, weights included.",
        {"pairs": count(settings), "timed steps a pair": 1, **RECIPE, "beta": BETA, "dtype": "float32"},
    )
    if settings.model is None or settings.pairs is None:
        report.notes.append("Left out: it needs --model and --pairs.")
        return report
    if settings.peers is None:
        report.notes.append("The peers' rows are left out: no --peers PYTHON was given.")
    file, chosen = chosen_pairs(settings)
    report.tables.append(Table("The pairs, in tokens", [pair.lengths() for pair in chosen]))

    rows: list[dict[str, Any]] = []
    for objective in PEERS:
        contenders = [*peers(settings, objective, file), *ours(settings, objective, file)]
        found = settings.measure("steps", {"objective": objective}, contenders)
        report.measurements += found
        rows += [_row(objective, c.name, found) for c in contenders]
    report.tables.append(Table("Steps", rows))
    return report


def count(settings: Settings) -> int:
    """Pairs that are trained on."""
    return 1 if settings.quick else 3


def chosen_pairs(settings: Settings) -> tuple[str, list[pairs.Pair]]:
    """The pairs, and the file that both sides read them from."""
    assert settings.model is not None and settings.pairs is not None
    prompt = pairs.QUICK_PROMPT if settings.quick else pairs.PROMPT
    chosen = pairs.select_from(settings.pairs, settings.model, count(settings), prompt)
    file = (settings.out / f"pairs-{len(chosen)}.json").absolute()
    pairs.write(chosen, file)
    return str(file), chosen


def ours(settings: Settings, objective: str, file: str) -> list[Contender]:
    """mortice with every registered backward, and with each way that it offers to keep more between its passes."""
    recipe = {"steps": 1, "cache_limit": settings.cache_limit, **RECIPE}
    common = {
        "model": str(settings.model), "pairs_file": file, "objective": objective, "beta": BETA, "recipe": recipe,
    }  # fmt: skip
    ways = [(f"mortice, {name}", name, {}) for name in settings.names("backward")]
    if "segmented" in settings.names("backward"):
        ways.append(("mortice, segmented, everything kept", "segmented", {"keep": "everything"}))
    return [
        Contender(name, "benchmarks.training:pair_step", common | {"backward": backward, "options": options})
        for name, backward, options in ways
    ]


def peers(settings: Settings, objective: str, file: str) -> list[Contender]:
    """The peer that has the objective; none without a Python that has it."""
    if settings.peers is None:
        return []
    arguments = {
        "model": str(settings.model), "pairs": file, "objective": objective, "beta": BETA, "steps": 1,
        "cache_limit": settings.cache_limit, **RECIPE, **settings.peer_blas,
    }  # fmt: skip
    return [Contender(PEERS[objective], "benchmarks.peers", arguments, settings.peers)]


def versions(measurements: list[Measurement]) -> dict[str, str]:
    """What the peers' processes said of themselves."""
    return next((m.values["versions"] for m in measurements if "versions" in m.values), {})


def _row(objective: str, name: str, found: list[Measurement]) -> dict[str, Any]:
    peer = PEERS[objective]
    mine = [m for m in found if m.contender == name and not m.failed]
    return {
        "objective": objective,
        "side": name,
        "s a step": value(found, name, "seconds"),
        "peak MiB": mib(value(found, name, "peak")),
        "above the weights MiB": mib(value(found, name, "above")),
        "MLX's peak MiB": mib(value(found, name, "peak_mlx")),
        "time, peer / it": None if name == peer else ratio(found, peer, name, "seconds"),
        "memory above the weights, peer / it": None if name == peer else ratio(found, peer, name, "above"),
        "tokens scored": mine[0].values["scored"] if mine else None,
        "first loss": mine[0].values["losses"][0] if mine else None,
    }

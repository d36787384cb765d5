"""Every hook of mortice on one page.

`register_*` hooks are called once, when plugins are loaded, each with a `register` bound to the
plugin's distribution: `register(name, Class)` or, lazily, `register(name, "module:Class", help="…")`.
The `on_*` hooks observe a run; they are called on every enabled plugin, at most once a step.

Writing a plugin takes a module with implementations marked by `mortice.hookimpl` and one line under
`[project.entry-points.mortice]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from mortice.protocols import RunInfo
    from mortice.registry import Register

PROJECT = "mortice"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_losses(register: Register) -> None:
    """`loss`: `(scores: TokenLogprobs, batch: Batch) → LossOutput`. See `mortice.protocols.Loss`."""


@hookspec
def register_heads(register: Register) -> None:
    """`head`: hidden states to log-probabilities and their unit gradient. See `mortice.protocols.Head`."""


@hookspec
def register_sources(register: Register) -> None:
    """`source`: where groups come from. See `mortice.protocols.Source`."""


@hookspec
def register_backwards(register: Register) -> None:
    """`backward`: gradients of one micro-batch. See `mortice.protocols.Backward`."""


@hookspec
def register_layouts(register: Register) -> None:
    """`layout`: groups to rows. See `mortice.protocols.Layout`."""


@hookspec
def register_models(register: Register) -> None:
    """`model`: a model family. See `mortice.protocols.ModelAdapter`."""


@hookspec
def register_adapters(register: Register) -> None:
    """`adapter`: which parameters train. See `mortice.protocols.Adapter`."""


@hookspec
def register_formats(register: Register) -> None:
    """`data`: a record to an example. See `mortice.protocols.DataFormat`."""


@hookspec
def register_filters(register: Register) -> None:
    """`filter`: which rows and pairs of a data file are trained on. See `mortice.protocols.Filter`."""


@hookspec
def register_rollouts(register: Register) -> None:
    """`rollout`: samples completions. See `mortice.protocols.RolloutEngine`."""


@hookspec
def register_rewards(register: Register) -> None:
    """`reward`: a number for a completion. See `mortice.protocols.Reward`."""


@hookspec
def register_optimizers(register: Register) -> None:
    """`optimizer`: builds an `mlx.optimizers` object. See `mortice.protocols.OptimizerBuilder`."""


@hookspec
def register_schedules(register: Register) -> None:
    """`schedule`: step to learning rate. See `mortice.protocols.Schedule`."""


@hookspec
def register_trackers(register: Register) -> None:
    """`tracker`: shows or stores metrics. See `mortice.protocols.Tracker`."""


@hookspec
def register_tasks(register: Register) -> None:
    """`task`: verifiable problems. See `mortice.protocols.Task`."""


@hookspec
def register_controllers(register: Register) -> None:
    """`controller`: changes an option during a run. See `mortice.protocols.Controller`."""


@hookspec
def on_run_start(run: RunInfo) -> None:
    """A run is about to make its first step."""


@hookspec
def on_step_end(step: int, metrics: Mapping[str, Any]) -> None:
    """An optimizer step is done; `step` counts from 1."""


@hookspec
def on_checkpoint(step: int, path: Path) -> None:
    """A checkpoint is complete on disk."""


@hookspec
def on_run_end(run: RunInfo, error: BaseException | None) -> None:
    """The run is over; `error` is what ended it, or None."""


HOOKS: dict[str, str] = {
    "loss": "register_losses",
    "head": "register_heads",
    "source": "register_sources",
    "backward": "register_backwards",
    "layout": "register_layouts",
    "model": "register_models",
    "adapter": "register_adapters",
    "data": "register_formats",
    "filter": "register_filters",
    "rollout": "register_rollouts",
    "reward": "register_rewards",
    "optimizer": "register_optimizers",
    "schedule": "register_schedules",
    "tracker": "register_trackers",
    "task": "register_tasks",
    "controller": "register_controllers",
}
"""The hook that registers each kind. A kind is also the name of its table in the run file."""

"""The adapter of a run, and the weights of its head: fresh ones, or with `[adapter] init` those trained before."""

from __future__ import annotations

from typing import Any

from mortice.config import RunConfig
from mortice.errors import ConfigError
from mortice.model import Model
from mortice.pretrained import adapter_strategy
from mortice.protocols import Params
from mortice.runfile import plain
from mortice.structure import fields


def attach_adapter(config: RunConfig, model: Model) -> tuple[RunConfig, Params]:
    """Attach the run's adapter: its parameters, and the run with the options that are in force.

    Raises ConfigError where the file names something that the folder has otherwise, CheckpointError where the folder
    does not fit the model. All is checked before anything is attached.
    """
    folder = config.adapter_init
    chosen = config.all("adapter")[0]
    if folder is None:
        return config, chosen.options.attach(model, config.train.seed)
    given = config.given("adapter")
    saved = adapter_strategy(config.plugins, folder)
    cls: Any = saved.load()
    where = config.file.where(("adapter", "init"))
    if type(chosen.options) is not cls:
        named = isinstance(config.file.tables["adapter"], dict) and "name" in config.file.tables["adapter"]
        if named or given:
            said = (
                f"adapter.name is {chosen.name!r}" if named else f"{', '.join(sorted(given))} belongs to another kind"
            )
            raise ConfigError(f"{where}adapter.init: {folder} holds an adapter of the kind {saved.name!r}, but {said}")
        strategy, params = cls.from_folder(folder, model)
    elif hasattr(chosen.options, "attach_saved"):
        strategy, params = chosen.options.attach_saved(model, folder, given)
    else:
        strategy, params = cls.from_folder(folder, model)
        wrong = [
            f"{name} is {getattr(strategy, name)} there, the run has {getattr(chosen.options, name)}"
            for name in sorted(given)
            if getattr(strategy, name) != getattr(chosen.options, name)
        ]
        if wrong:
            raise ConfigError(f"{where}adapter.init: {folder}: {'; '.join(wrong)}")
    found = {name: getattr(strategy, name) for name in fields(cls) if name not in given}
    changes = {f"adapter.{name}": plain(value) for name, value in found.items() if value is not None}
    return config.with_overrides({"adapter.name": saved.name, **changes}, origin="adapter.init"), params


def attach_head(config: RunConfig, model: Model) -> Params:
    """Attach the weights that the run's head brings, where it brings any: those in the folder that the run starts from,
    or fresh ones. Raises CheckpointError for weights that do not fit."""
    head: Any = config.head
    if not hasattr(head, "attach"):
        return {}
    folder = config.adapter_init
    if folder is not None and hasattr(head, "claims") and head.claims(folder):
        return dict(head.from_folder(folder, model)[1])
    return dict(head.attach(model, config.train.seed))

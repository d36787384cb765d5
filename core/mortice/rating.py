"""Rating answers with a trained model: rewards of a reward model, or log-probabilities of any other.

What this leaves out: losses and gradients (`scoring`), and reading files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from mortice.batch import Group
from mortice.errors import ConfigError
from mortice.plugins import load_plugins
from mortice.pretrained import load, open_head
from mortice.step import Engine

if TYPE_CHECKING:
    from mortice.plugins import Plugins
    from mortice.protocols import Params
    from mortice.tokenizer import Tokenizer


@frozen(eq=False)
class Rater:
    """A model that rates answers."""

    engine: Engine
    params: Params
    tokenizer: Tokenizer | None
    gives: str
    """`rewards`, of a head with weights of its own, or `logprobs`: sums over the scored tokens of an answer."""

    def rate(self, groups: Sequence[Group]) -> list[list[float]]:
        """One number for every completion, `[group][completion]`. Raises DataError for a token id outside the
        vocabulary."""
        found = self.engine.logprobs(self.params, groups)
        return [[sum(x for x in scores if not math.isnan(x)) for scores in group] for group in found]


def open_rater(
    model: str | Path, adapter: str | Path | None = None, *, plugins: Plugins | None = None, dtype: str = "auto"
) -> Rater:
    """A model from a folder or a hub id, its adapter, and the head whose weights lie in the adapter's folder.

    Raises CheckpointError for what cannot be read, ConfigError where the plugins offer no head or layout by default.
    """
    plugins = plugins or load_plugins()
    pretrained = load(model, plugins=plugins, adapter=adapter, dtype=dtype)
    params = dict(pretrained.params)
    found = None if adapter is None else open_head(plugins, Path(adapter).expanduser(), pretrained.model)
    plain = {kind: plugins.registry.defaults(kind) for kind in ("head", "backward", "layout")}
    if lacking := [kind for kind, strategies in plain.items() if not strategies]:
        raise ConfigError(f"no {lacking[0]} by default: enable the plugin that brings it")
    defaults = {kind: strategies[0].load()() for kind, strategies in plain.items()}
    if found is not None:
        defaults["head"], own = found
        params |= own
        pretrained.model.mark_trainable(params)
    gives = "logprobs" if found is None else "rewards"
    return Rater(Engine(pretrained.model, **defaults), params, pretrained.tokenizer, gives)

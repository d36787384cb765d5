"""The adapter: which configs are mlx-lm's, and how a model comes to be.

Relied upon are names and conventions of mlx-lm, not its internals (`model.py`, `attention.py`, `caches.py`); so every
architecture is proved before use (`twin.py`). What differs is refused by name.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from mortice.errors import CheckpointError
from mortice_mlx_lm.refusal import Refused

if TYPE_CHECKING:
    import mlx.nn as nn

    from mortice.model import Model


def module_of(config: Mapping[str, Any]) -> str | None:
    """The name of mlx-lm's module for a config, None where it has none. Nothing outside of mlx-lm is ever imported."""
    from mlx_lm import utils

    kind = config.get("model_type")
    if not isinstance(kind, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", kind):
        return None
    kind = utils.MODEL_REMAPPING.get(kind, kind)
    name = f"mlx_lm.models.{kind}"
    return name if kind.isidentifier() and importlib.util.find_spec(name) is not None else None


def build(config: Mapping[str, Any]) -> nn.Module:
    """mlx-lm's model of a config, without weights."""
    name = module_of(config)
    assert name is not None
    module = importlib.import_module(name)
    return module.Model(module.ModelArgs.from_dict(copy.deepcopy(dict(config))))


def taken_apart(config: Mapping[str, Any]) -> Model:
    """The model of a config once its small twin is proved: with its layers' attention led to the context where that
    gives the same, else with all layers as mlx-lm wrote them. Raises Refused where neither does."""
    from mortice_mlx_lm.model import MlxLmModel, logit_law
    from mortice_mlx_lm.twin import prove, small_twin, with_few_words

    small = small_twin(config)
    law = logit_law(build(small))

    def proved(*, carried: bool) -> None:
        prove(build(small), lambda: MlxLmModel(small, build(small), law, carried=carried))

    carried = False
    try:
        proved(carried=False)
    except Exception as first:  # whatever mlx-lm's code says where it is given neither a mask nor a cache
        try:
            proved(carried=True)
        except Exception as error:
            raise error from first
        carried = True
    real = logit_law(build(with_few_words(config)))  # a factor may follow from sizes
    return MlxLmModel(config, build(config), real, carried=carried)


@frozen
class MlxLmAdapter:
    """Any architecture of mlx-lm that can be taken apart into blocks, where no other adapter claims it.

    Each is first proved on a small twin with random weights against mlx-lm's own forward; what differs is refused.
    """

    fallback: ClassVar = True
    examples: ClassVar = ()

    def handles(self, config: Mapping[str, Any], /) -> bool:
        return module_of(config) is not None

    def build(self, config: Mapping[str, Any], /) -> Model:
        kind = config.get("model_type")
        try:
            return taken_apart(config)
        except Refused as error:
            raise CheckpointError(f"mlx-lm's {kind} cannot be trained here: {error}") from error
        except (Exception, SystemExit) as error:  # mlx-lm's own code; a module may even leave the process
            said = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"mlx-lm's {kind} cannot be built from this config: {said}") from error

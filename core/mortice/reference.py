"""Log-probabilities under the reference policy: the adapter that the run started from, or the base.

One model is resident: the reference is a frozen copy of the trainable parameters alone, bound for a forward and
taken out again. Completions that already carry `ref_logprobs` are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import evolve, frozen

from mortice.batch import Group
from mortice.model import Model
from mortice.protocols import Adapter, Params
from mortice.step import Engine


def reference_params(policy: str, adapter: Adapter, model: Model, params: Params) -> Params:
    """What the reference binds. `initial`: a copy of `params`; `base`: the values that leave the base model as it is;
    else the folder of an adapter of the same shape.

    Raises ConfigError where the adapter has no base, CheckpointError where the folder does not fit.
    """
    if policy == "initial":
        return dict(params)
    if policy == "base":
        return adapter.base(params)
    return adapter.load(model, Path(policy), params)


@frozen(eq=False)
class Reference:
    """The reference policy of a run."""

    engine: Engine
    params: Params

    def fill(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with `ref_logprobs` on every completion. Runs one forward over those that lack them."""
        lacking = [i for i, g in enumerate(groups) if any(c.ref_logprobs is None for c in g.completions)]
        if not lacking:
            return list(groups)
        filled = list(groups)
        for i, found in zip(lacking, self.engine.logprobs(self.params, [groups[i] for i in lacking])):
            scored = zip(groups[i].completions, found)
            filled[i] = groups[i].with_completions([evolve(c, ref_logprobs=c.ref_logprobs or v) for c, v in scored])
        return filled

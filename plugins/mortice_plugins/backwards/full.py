"""One `value_and_grad` over the whole model: the plain twin of every other backward.

Every activation of every layer is kept. The head still runs in tiles, inside the trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from attrs import frozen

from mortice.batch import Gradients
from mortice.context import SpanContext
from mortice.model import Model
from mortice.objective import Objective, ObjectiveResult
from mortice.protocols import Params


@frozen
class Full:
    """One value_and_grad over the whole model; keeps every activation, needs no second forward."""

    def __call__(
        self, model: Model, params: Params, contexts: Sequence[SpanContext], objective: Objective, /
    ) -> tuple[ObjectiveResult, Gradients]:
        def loss(values: Params):
            model.bind(values)
            return objective.traced([model.hidden(ctx, ctx.tokens) for ctx in contexts])

        try:
            (value, (terms, metrics, scores)), gradients = mx.value_and_grad(loss)(params)
        finally:
            model.bind(params)
        mx.eval(value, terms, metrics, scores.logprobs, gradients)
        return ObjectiveResult(value, scores, terms, metrics), gradients

    def score(
        self, model: Model, params: Params, contexts: Sequence[SpanContext], objective: Objective, /
    ) -> ObjectiveResult:
        return plain_forward(model, params, contexts, objective)


def plain_forward(
    model: Model, params: Params, contexts: Sequence[SpanContext], objective: Objective
) -> ObjectiveResult:
    """The forward of one trace, outside of it: the same operations, and so the same numbers to the last bit."""
    model.bind(params)
    result = objective.scored([model.hidden(ctx, ctx.tokens) for ctx in contexts], traced=True)
    mx.eval(result.scores.logprobs)
    return result

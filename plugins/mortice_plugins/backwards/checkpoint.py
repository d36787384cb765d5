"""One `value_and_grad` in which segments of the model are run again for their backward (Chen et al. 2016,
arXiv:1604.06174), through `mx.checkpoint`.

Beside `segmented` it is the simpler machine: MLX orders the recomputation, and the head runs inside the trace. It keeps
the carry between segments, as `segmented` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice.batch import Gradients
from mortice.context import SpanContext
from mortice.model import Carry, Model
from mortice.objective import Objective, ObjectiveResult
from mortice.options import ge, option
from mortice.protocols import Params
from mortice_plugins.backwards.full import plain_forward


@frozen
class Checkpoint:
    """One value_and_grad that keeps the carry between segments and recomputes what is inside them."""

    segment_size: int = option(
        2, help="blocks a segment; a decoder layer is two blocks (attention, MLP)", validator=ge(1)
    )

    leaner: ClassVar = {"segment_size": (8, 4, 2, 1)}

    @property
    def stride(self) -> int:
        return self.segment_size

    def __call__(
        self, model: Model, params: Params, contexts: Sequence[SpanContext], objective: Objective, /
    ) -> tuple[ObjectiveResult, Gradients]:
        def hidden(ctx: SpanContext, values: Params) -> mx.array:
            carry = model.begin(ctx, ctx.tokens)
            for start in range(0, len(model.blocks), self.segment_size):
                carry = _recomputed(model, ctx, start, start + self.segment_size, values, carry)
            return model.finish(carry)

        def loss(values: Params):
            model.bind(values)
            return objective.traced([hidden(ctx, values) for ctx in contexts])

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


def _recomputed(model: Model, ctx: SpanContext, start: int, stop: int, params: Params, carry: Carry) -> Carry:
    """Blocks `start` to `stop`, whose insides are computed again in the backward.

    mx.checkpoint takes captured arrays for constants, so that what trains is passed in and bound inside.
    """
    names, inputs = model.names_of(model.blocks[start:stop], params), list(carry)
    outputs: list[str] = []

    @mx.checkpoint
    def segment(*arrays: mx.array) -> list[mx.array]:
        model.bind(dict(zip(names, arrays)))
        found = model.run(dict(zip(inputs, arrays[len(names) :])), ctx, start, stop)
        outputs[:] = list(found)
        # Each a node of its own: the gradient of an array that stands twice among the outputs would be lost.
        return [mx.expand_dims(value, 0) for value in found.values()]

    values = segment(*(params[name] for name in names), *carry.values())
    model.bind({name: params[name] for name in names})
    return {name: value[0] for name, value in zip(outputs, values)}

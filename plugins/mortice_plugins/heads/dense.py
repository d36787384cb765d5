"""Full logits at once: the plain twin of every other head, and the one that autodiff goes through.

Memory is that of `[M, V]` in float32, several times over. What it leaves out is any thrift; see `flash_cce`.
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice.batch import Gradients, TokenLogprobs
from mortice.model import Output


@frozen
class Dense:
    """Full logits at once, in float32: simple, and right by autodiff; memory grows with the vocabulary."""

    provides: ClassVar = frozenset({"entropy"})
    differentiable: ClassVar = True

    def score(
        self, hidden: mx.array, targets: mx.array, output: Output, *, grad: bool = False,
        entropy: bool = False, traced: bool = False,
    ) -> TokenLogprobs:  # fmt: skip
        """Log-probability of each target; `dhidden` is `Σ_v (δ_vy − p_v) · slope_v · W_v`."""
        if not hidden.shape[0]:
            return _nothing(hidden, grad=grad, entropy=entropy)
        raw = output.project(hidden)  # [M, V]
        logits = output.finish(raw)
        lse = mx.logsumexp(logits, axis=1)  # [M]
        logprobs = mx.take_along_axis(logits, targets[:, None], axis=1).squeeze(1) - lse
        found_entropy = dhidden = None
        if entropy:
            centred = mx.stop_gradient(logits - lse[:, None])
            found_entropy = -(mx.exp(centred) * centred).sum(axis=1)
        if grad:
            dhidden = output.pull(_dlogits(raw, targets, output, lse))
        return TokenLogprobs(logprobs, lse=lse, entropy=found_entropy, dhidden=dhidden)

    def output_gradients(
        self, hidden: mx.array, targets: mx.array, output: Output, dlogprobs: mx.array, lse: mx.array, *,
        traced: bool = False,
    ) -> Gradients:  # fmt: skip
        """Gradients of the output's parameters, through `d logprob / d raw logits` of the whole vocabulary."""
        gradients = {name: mx.zeros(value.shape) for name, value in output.parameters().items()}
        if hidden.shape[0]:
            g = dlogprobs[:, None] * _dlogits(output.project(hidden), targets, output, lse)  # [M, V]
            output.accumulate(hidden, g, 0, output.vocab, gradients)
        return gradients


def _dlogits(raw: mx.array, targets: mx.array, output: Output, lse: mx.array) -> mx.array:
    """d logprob / d raw logits, `[M, V]`."""
    hit = targets[:, None] == mx.arange(output.vocab)
    return (hit - mx.exp(output.finish(raw) - lse[:, None])) * output.slope(raw)


def _nothing(hidden: mx.array, *, grad: bool, entropy: bool) -> TokenLogprobs:
    """The scores of no tokens, for which MLX has no reductions."""
    none = mx.zeros((0,))
    return TokenLogprobs(
        none, lse=none, entropy=none if entropy else None, dhidden=mx.zeros(hidden.shape) if grad else None
    )

"""Losses of the benchmark's own, a plugin like any other: a sigmoid DPO and the policy-gradient part of GRPO.

They stand here so that what is measured stays the same when mortice's own losses gain options.
"""

from __future__ import annotations

from importlib import metadata
from typing import ClassVar

import mlx.core as mx
from attrs import frozen

from mortice import Batch, LossOutput, TokenLogprobs, hookimpl, option
from mortice.options import gt
from mortice.plugins import Plugins, load_plugins


@frozen
class SigmoidDPO:
    """−log σ(beta · h), h = (c − c_ref) − (r − r_ref) of summed log-probabilities (Rafailov et al. 2023)."""

    requires: ClassVar = frozenset({"pairs", "ref_logprobs"})

    beta: float = option(0.1, help="strength of the preference", validator=gt(0))

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        gain = batch.sum(scores.logprobs - batch.ref_logprobs)  # [C]
        h = self.beta * (gain[batch.pairs[:, 0]] - gain[batch.pairs[:, 1]])  # [N]
        return LossOutput({"dpo": (mx.logaddexp(mx.zeros_like(h), -h).sum(), h.size)})


@frozen
class PolicyGradient:
    """−Σ advantage · logprob over all tokens, divided by their number: the first update of GRPO without a KL term."""

    requires: ClassVar = frozenset({"groups", "advantages"})

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        total = (batch.advantages * batch.sum(scores.logprobs)).sum()
        return LossOutput({"policy": (-total, batch.lengths.sum())})


@hookimpl
def register_losses(register):
    register("benchmark-dpo", SigmoidDPO)
    register("benchmark-policy-gradient", PolicyGradient)


def plugins() -> Plugins:
    """All installed plugins and this one."""
    own = metadata.EntryPoint("benchmarks", "benchmarks.losses", "mortice")
    return load_plugins(entry_points=[*metadata.entry_points(group="mortice"), own])

"""Next-token cross-entropy.

The NLL is one mean over all scored tokens of a step, not a mean of rows' means. What it leaves out: label
smoothing, and any choice of tokens beyond the loss mask.
"""

from __future__ import annotations

import mlx.core as mx
from attrs import frozen

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import in_, option


@frozen
class SFT:
    """Next-token cross-entropy of completions, or of everything.

    `nll = −Σ w · logprob / Σ w` over the tokens of a step, w being the weight of the token's completion. With
    `scope = "full"` prompts count too, each once, all tokens but the first. Of a preference pair only the chosen
    answer is learned.
    """

    scope: str = option(
        "completion",
        help="tokens that count: completion (those in the loss mask), or full (prompt and completion)",
        validator=in_(("completion", "full")),
    )

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"prompt_logprobs"}) if self.scope == "full" else frozenset()

    def __call__(self, scores: TokenLogprobs, batch: Batch, /) -> LossOutput:
        chosen, rejected = ((batch.owner[:, None] == batch.pairs[None, :, side]).any(axis=1) for side in (0, 1))  # [M]
        counted = chosen | ~rejected
        if self.scope == "completion":
            counted = counted & ~batch.is_prompt
        weights = mx.where(counted, batch.weights[batch.owner], 0.0)
        total = -(weights * mx.where(counted, scores.logprobs, 0.0)).sum()
        return LossOutput({"nll": (total, weights.sum())})

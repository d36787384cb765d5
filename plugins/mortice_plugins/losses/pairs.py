"""What losses of preference pairs share: the two sides of a pair, means over pairs, label smoothing, metrics.

A batch has C completions and N pairs; a pair counts with the weight of its chosen completion, times its own.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mortice.batch import Batch, LossOutput, TokenLogprobs
from mortice.options import and_, ge, gt, le, option, optional

Sides = tuple[mx.array, mx.array]
"""Of chosen and rejected, `[N]` each."""

FARTHEST = 30.0
"""Where e^x of a metric stops growing, so that one token does not make it infinite."""

PROFILE = {
    "optimizer.learning_rate": 1e-5,
    "schedule.name": "cosine",
    "schedule.warmup": 0.03,
    "adapter.rank": 16,
    "adapter.scale": 2.0,
}


def max_loss_option() -> Any:
    """The option `max_loss`, of every loss of pairs."""
    return option(
        None,
        help="largest loss of a pair: one beyond it counts as much as this and has no gradient (against wrong labels)",
        validator=optional(gt(0.0)),
    )


def smoothing_option(help: str = "chance ε that a label is wrong") -> Any:
    """The option `label_smoothing`: above ½ it would prefer the rejected."""
    return option(0.0, help=help, validator=and_(ge(0.0), le(0.5)))


def refuse_smoothed_hinge(variant: str, label_smoothing: float) -> None:
    """Raises ValueError where `label_smoothing` would have no effect."""
    if variant == "hinge" and label_smoothing:
        raise ValueError(f"label_smoothing is {label_smoothing}, which variant 'hinge' does not use; leave it out")


def sides(x: mx.array, batch: Batch) -> Sides:
    """`[C]` → what chosen and rejected have of it, `[N]` each."""
    return x[batch.pairs[:, 0]], x[batch.pairs[:, 1]]


def mean_over_pairs(x: mx.array, batch: Batch) -> tuple[mx.array, mx.array]:
    """(total, count) of `x [N]`."""
    return (batch.pair_weights * x).sum(), batch.pair_weights.sum()


def log_ratios(scores: TokenLogprobs, batch: Batch) -> mx.array:
    """`[M]`: log π/π_ref of every scored token. Taken before any sum, so that equal policies give exactly 0."""
    assert batch.ref_logprobs is not None
    return scores.logprobs - batch.ref_logprobs


def log_sigmoid(x: mx.array) -> mx.array:
    return -mx.logaddexp(mx.zeros_like(x), -x)


def smoothed(margin: mx.array, epsilon: float) -> mx.array:
    """−(1−ε) log σ(margin) − ε log σ(−margin): each label is wrong with probability ε."""
    loss = -log_sigmoid(margin)
    return loss if epsilon == 0 else (1 - epsilon) * loss - epsilon * log_sigmoid(-margin)


def chosen_nll(scores: TokenLogprobs, batch: Batch, *, prompts: bool = False) -> tuple[mx.array, mx.array]:
    """(total, count) of −logprob over the tokens of all chosen completions, each once; with `prompts`, over those of
    their prompts too, which belong to the chosen."""
    counted = (batch.owner[:, None] == batch.pairs[None, :, 0]).any(axis=1)  # [M]
    if not prompts:
        counted = counted & ~batch.is_prompt
    weights = mx.where(counted, batch.weights[batch.owner], 0.0)
    return -(weights * mx.where(counted, scores.logprobs, 0.0)).sum(), weights.sum()


def clipped(loss: mx.array, max_loss: float | None) -> mx.array:
    """`loss [N]` up to `max_loss`, flat beyond it."""
    return loss if max_loss is None else mx.minimum(loss, max_loss)


def clipped_share(loss: mx.array, max_loss: float | None, batch: Batch) -> dict[str, tuple[mx.array, mx.array]]:
    """The metric `clipped`: how many pairs are beyond `max_loss`, and without a gradient."""
    return {} if max_loss is None else {"clipped": mean_over_pairs(loss > max_loss, batch)}


def preference(
    loss: mx.array, rewards: Sides, scores: TokenLogprobs, batch: Batch, max_loss: float | None
) -> LossOutput:  # fmt: skip
    """The mean over pairs of `loss [N]`, up to `max_loss` each, with the metrics of `pair_metrics`."""
    terms = {"preference": mean_over_pairs(clipped(loss, max_loss), batch)}
    return LossOutput(terms, metrics=pair_metrics(rewards, scores, batch) | clipped_share(loss, max_loss, batch))


FROM_START = {"displacement": "lw"}
"""`from_start` of a loss without a reference: there the chosen answers are compared with how they stood at first."""


def pair_metrics(rewards: Sides, scores: TokenLogprobs, batch: Batch) -> dict[str, tuple[mx.array, mx.array]]:
    """What is shown of every loss of pairs, as (total, count) over pairs.

    Both rewards, their margin and how often it is above 0; the log-probabilities of both answers, summed and a token
    (`lw`, `lr`). With reference log-probabilities: `displacement`, by how much `lw` is above the reference's, and two
    estimates of the KL divergence from it a token, on the tokens of both answers (Schulman, "Approximating KL
    Divergence", 2020): k1 = log π/π_ref and k3 = π_ref/π − 1 − log π_ref/π. These answers were not sampled from the
    policy, so k1 may be below 0; k3 is not.
    """
    chosen, rejected = rewards
    summed, mean = sides(batch.sum(scores.logprobs), batch), sides(batch.mean(scores.logprobs), batch)
    over_pairs = {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "margin": chosen - rejected,
        "accuracy": chosen > rejected,
        "logprobs_chosen": summed[0],
        "logprobs_rejected": summed[1],
        "lw": mean[0],
        "lr": mean[1],
    }
    over_tokens = {}
    if batch.ref_logprobs is not None:
        ratios = log_ratios(scores, batch)  # [M]
        over_pairs["displacement"] = batch.mean(ratios)[batch.pairs[:, 0]]
        over_tokens = {"kl_k1": ratios, "kl_k3": mx.expm1(mx.minimum(-ratios, FARTHEST)) + ratios}
    metrics = {name: mean_over_pairs(value, batch) for name, value in over_pairs.items()}
    for name, value in over_tokens.items():
        metrics[name] = _of_both(batch.sum(value), batch), _of_both(batch.lengths, batch)
    return metrics


def _of_both(x: mx.array, batch: Batch) -> mx.array:
    """`x [C]` of chosen and rejected of all pairs together."""
    chosen, rejected = sides(x, batch)
    return mean_over_pairs(chosen + rejected, batch)[0]

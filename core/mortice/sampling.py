"""Tokens from logits: one softmax a row, and draws that are keyed.

Every engine samples here, so that they agree. A draw is a function of the logits, the seed of its answer and its place
in it: one uniform number, looked up in the cumulated probabilities in the vocabulary's order. What else is in a batch
does not enter.

Log-probabilities are those of the model's whole distribution at the temperature, whatever filters or penalties then
left of it. Each filter is judged on that distribution (with penalties, where there are any), so their order means
nothing; what several leave is what all of them leave. Of equally likely tokens all stay or none. The repetition penalty
(Keskar et al. 2019, arXiv:1909.05858) goes over prompt and answer, the presence penalty over the answer.

On the CPU this is numpy, whose exp is many times faster than MLX's there. On a GPU the softmax and the draw are MLX's;
rows with filters or penalties go through numpy there too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from attrs import frozen

from mortice.errors import TrainingError
from mortice.protocols import Request, Sampling
from mortice.randomness import stable_seed

BLOCK = 512
"""Probabilities that are summed before they are cumulated."""
LIKELIEST = 1024
"""Tokens that `top_p` looks at first; only where these have not its mass is everything sorted."""
SLACK = 1e-6
"""What `top_p` may fall short by: sums of float32 numbers are no better."""
STEEPEST = 80.0
"""Bound of the exponent of a token that a penalty below 1, or below 0, made likelier than every other."""


@frozen
class Draw:
    """One token to be chosen."""

    row: int
    """Of the logits; several draws may share one."""
    seed: int
    """Names the answer."""
    place: int
    """Of the token in the answer."""
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    """What came before, for penalties."""


@frozen
class Chosen:
    token: int
    logprob: float
    """At the temperature (at 1 where that is 0), of the whole distribution."""


def answer_seed(sampling: Sampling, request: Request, sample: int) -> int:
    """Names an answer: the seed, the request's key and the sample's number, and nothing else."""
    return stable_seed(sampling.seed, request.key, sample)


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1): 53 bits, named by the answer and the place in it."""
    return (stable_seed(seed, "token", place) >> 10) / 2**53


def draw(logits: np.ndarray | mx.array, draws: Sequence[Draw], sampling: Sampling) -> list[Chosen]:
    """Choose tokens from `logits [M, V]` (soft-capped, not divided by the temperature), one a draw.

    numpy logits are used up. Raises TrainingError where a row has no finite maximum.
    """
    if isinstance(logits, mx.array):
        if not sampling.filtered:
            return _drawn_by_mlx(logits, draws, sampling)
        logits = np.array(logits.astype(mx.float32))
    found: list[Chosen | None] = [None] * len(draws)
    of_row: dict[int, list[int]] = {}
    for i, each in enumerate(draws):
        of_row.setdefault(each.row, []).append(i)
    weights = np.empty(logits.shape[1], np.float32)
    for row, places in of_row.items():
        scaled = logits[row]
        if sampling.temperature not in (0.0, 1.0):
            scaled /= np.float32(sampling.temperature)
        distribution = _Distribution.of(scaled, weights)
        for i in places:
            token = _choose(distribution, draws[i], sampling)
            found[i] = Chosen(token, float(scaled[token]) - distribution.log_normaliser)
    return [each for each in found if each is not None]


@frozen(eq=False)
class _Distribution:
    scaled: np.ndarray
    """Logits over temperature, `[V]`."""
    weights: np.ndarray
    """exp(scaled − peak)."""
    peak: float
    log_normaliser: float

    @classmethod
    def of(cls, scaled: np.ndarray, weights: np.ndarray) -> _Distribution:
        """In one pass; `weights` is written."""
        peak = scaled.max()
        if not math.isfinite(peak):
            raise TrainingError("the model's logits are not finite: it has diverged, or its weights are damaged")
        np.subtract(scaled, peak, out=weights)
        np.exp(weights, out=weights)
        return cls(scaled, weights, float(peak), float(peak) + math.log(float(weights.sum())))


def _choose(d: _Distribution, draw: Draw, sampling: Sampling) -> int:
    if not sampling.filtered:
        if sampling.temperature == 0:
            return int(d.scaled.argmax())
        return _looked_up(d.weights, uniform(draw.seed, draw.place))
    scaled, weights = _penalised(d, draw, sampling)
    if sampling.temperature == 0:
        return int(scaled.argmax())
    return _looked_up(_filtered(weights, sampling), uniform(draw.seed, draw.place))


def _penalised(d: _Distribution, draw: Draw, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Copies with penalties; the distribution's own where there are none."""
    repetition, presence = sampling.repetition_penalty, sampling.presence_penalty
    scaled, weights = d.scaled, d.weights
    if repetition == 1.0 and presence == 0.0:
        return scaled, weights
    scaled, weights = scaled.copy(), weights.copy()
    answer = np.unique(np.asarray(draw.answer, np.int64))
    seen = np.union1d(answer, np.asarray(draw.prompt, np.int64))
    if repetition != 1.0:
        own = scaled[seen]
        scaled[seen] = np.where(own > 0, own / repetition, own * repetition)
    if presence:
        scaled[answer] -= presence / (sampling.temperature or 1.0)
    weights[seen] = np.exp(np.minimum(scaled[seen] - d.peak, STEEPEST))
    return scaled, weights


def _filtered(weights: np.ndarray, sampling: Sampling) -> np.ndarray:
    """A copy in which what top-k, top-p and min-p leave out is 0."""
    least = 0.0
    if sampling.top_k:
        least = max(least, _largest(weights, sampling.top_k)[-1])
    if sampling.min_p:
        least = max(least, sampling.min_p * weights.max())
    if sampling.top_p < 1:
        least = max(least, _least_of_mass(weights, sampling.top_p))
    return np.where(weights < least, np.float32(0), weights)


def _largest(weights: np.ndarray, count: int) -> np.ndarray:
    """The largest ones, falling."""
    at = len(weights) - min(count, len(weights))
    return np.sort(np.partition(weights, at)[at:])[::-1]


def _least_of_mass(weights: np.ndarray, mass: float) -> float:
    """The least of the fewest largest ones that have this share of the total."""
    wanted = mass * float(weights.sum(dtype=np.float64)) * (1 - SLACK)
    for count in (LIKELIEST, len(weights)):
        ranked = _largest(weights, count)
        reached = np.cumsum(ranked, dtype=np.float64)
        if reached[-1] >= wanted:
            break
    return float(ranked[min(int(np.searchsorted(reached, wanted)), len(ranked) - 1)])


def _looked_up(weights: np.ndarray, u: float) -> int:
    """The first token up to which more than the share `u` of the total lies. Never one of weight 0."""
    starts = np.arange(0, len(weights), BLOCK)
    reached = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    target = u * reached[-1]
    block = min(int(np.searchsorted(reached, target, side="right")), len(reached) - 1)
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    within = np.cumsum(inside, dtype=np.float64)
    rest = target - (reached[block - 1] if block else 0.0)
    place = int(np.searchsorted(within, rest, side="right"))
    # A block's sum is rounded, so the last of it may lie a rounding below what is looked for.
    return block * BLOCK + (place if place < len(inside) else int(np.flatnonzero(inside)[-1]))


def _drawn_by_mlx(logits: mx.array, draws: Sequence[Draw], sampling: Sampling) -> list[Chosen]:
    """The same in MLX, without filters and penalties: only what was chosen leaves the device."""
    scaled = logits.astype(mx.float32)
    if sampling.temperature not in (0.0, 1.0):
        scaled = scaled / sampling.temperature
    peak = scaled.max(axis=-1, keepdims=True)
    weights = mx.exp(scaled - peak)  # [M, V]
    normaliser = (peak + mx.log(weights.sum(axis=-1, keepdims=True)))[:, 0]  # [M]
    rows = mx.array([each.row for each in draws])
    if sampling.temperature == 0:
        tokens = mx.argmax(scaled, axis=-1)[rows]
    else:
        reached = mx.cumsum(weights, axis=-1)
        share = mx.array([uniform(each.seed, each.place) for each in draws])[:, None]
        own = reached[rows]
        tokens = (own <= share * own[:, -1:]).sum(axis=-1)
        last = (own < own[:, -1:]).sum(axis=-1)  # where the target rounds to the total
        tokens = mx.minimum(tokens, last)
    logprobs = scaled[rows, tokens] - normaliser[rows]
    mx.eval(tokens, logprobs)
    if not bool(mx.all(mx.isfinite(logprobs)).item()):
        raise TrainingError("the model's logits are not finite: it has diverged, or its weights are damaged")
    return [Chosen(int(t), float(p)) for t, p in zip(tokens.tolist(), logprobs.tolist())]  # type: ignore[arg-type]

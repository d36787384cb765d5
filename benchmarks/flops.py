"""The floating-point operations of one training step's products, counted from its rows.

Counted are the products a step has to make: linear layers, LoRA, attention and head, with a second forward where the
backward strategy makes one. Of attention only what is causal counts, so masked halves of computed tiles do not.
Left out is all that is no product (norms, softmax, rotations, optimizer).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import field, frozen

from mortice.batch import Group, Row
from mortice.protocols import Params
from mortice.step import Engine

ONE_FORWARD = ("full",)
"""Backward strategies that keep every activation; any other one runs a second forward, but for what it `keep`s."""


def forwards(backward: Any) -> tuple[int, int]:
    """How often linear layers and attention run forward."""
    keep = getattr(backward, "keep", "cuts")
    if type(backward).__name__.lower() in ONE_FORWARD or keep == "everything":
        return 1, 1
    return 2, 1 if keep in ("auto", "attention") else 2


@frozen
class Flops:
    """By where they are spent; a multiplication and an addition are two."""

    linear: float
    lora: float
    attention: float
    head: float
    total: float = field(init=False)

    @total.default
    def _sum(self) -> float:
        return self.linear + self.lora + self.attention + self.head


def step_flops(engine: Engine, params: Params, groups: Sequence[Group]) -> Flops:
    """Of a step over `groups` with LoRA on linear layers alone; the reference's forward is not counted."""
    micros = engine.lay_out(groups)
    rows = [row for micro in micros for row in micro.rows]
    config = engine.model.config
    heads = config["num_attention_heads"]
    width = heads * (config.get("head_dim") or config["hidden_size"] // heads)
    linear, attention = forwards(engine.backward)
    return count(
        tokens=sum(row.length for row in rows),
        pairs=sum(map(attended, rows)),
        scored=sum(row.scored for row in rows),
        linear=list(linear_shapes(params)),
        layers=engine.model.num_layers,
        width=width,
        output=(engine.model.output.vocab, config["hidden_size"]),
        forwards=linear,
        attention_forwards=attention,
    )


def count(
    *, tokens: int, pairs: int, scored: int, linear: Sequence[tuple[int, int, int]], layers: int, width: int,
    output: tuple[int, int], forwards: int, attention_forwards: int,
) -> Flops:  # fmt: skip
    """`pairs` of query and key, `linear` as (in, rank, out), `width` of all heads together, `output` as (V, D).

    Forward, then dx for every linear layer (frozen weights have no gradient). LoRA: two thin products forward, four
    backward. Attention: scores and values forward; backward the scores again, and four products of that size. The
    head: logits and the expected output row.
    """
    matrices = sum(inputs * outputs for inputs, _, outputs in linear)
    thin = sum(rank * (inputs + outputs) for inputs, rank, outputs in linear)
    vocab, hidden = output
    return Flops(
        linear=2 * tokens * matrices * (forwards + 1),
        lora=2 * tokens * thin * (forwards + 2),
        attention=2 * pairs * width * layers * (2 * attention_forwards + 5),
        head=2 * scored * vocab * hidden * 2,
    )


def linear_shapes(params: Params) -> Iterable[tuple[int, int, int]]:
    """(in, rank, out) of every layer with a LoRA."""
    for name, a in params.items():
        if name.endswith(".lora_a"):
            b = params[name.removesuffix("a") + "b"]
            yield a.shape[0], a.shape[1], b.shape[1]


def attended(row: Row) -> int:
    """Pairs of a query and a key that it attends to: its ancestors' tokens and its own span up to itself."""
    before = {None: 0}
    found = 0
    for index, span in enumerate(row.spans):
        reach = before[span.parent]
        before[index] = reach + span.length
        found += span.length * reach + span.length * (span.length + 1) // 2
    return found

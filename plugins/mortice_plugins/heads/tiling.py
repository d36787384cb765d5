"""How large a tile of tokens × vocabulary is, within a budget of memory.

A tile of t tokens and v vocabulary entries at width D holds, in float32, its logits `[t, v]` (several times over, as
the tile loop says), the output rows `[v, D]` as floats, and the product `[t, D]` with the sum that it is added to. Its
two products do 4·t·v·D operations and move `[v, D]` once and `[t, D]` three times, so the traffic of an operation is
proportional to 1/t + 3/v: of the tiles that fill the budget, the one with the least of that is taken.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

FLOAT = 4
"""Bytes."""
ALIGN = 64
"""Vocabulary entries; blocks of such a multiple suit every matrix unit."""

FILTER_BLOCK = 512
"""Vocabulary entries that are left out of the unit gradient, or kept, together."""

LOG_HIGHEST = 80.0
"""e to this is still a float32."""


def spans(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of runs of at most `size` that cover `count`."""
    for start in range(0, count, size):
        yield start, min(start + size, count)


def worth_gathering(kept: int, count: int) -> bool:
    """Whether a product for `kept` of `count` tokens pays for the copy of their weights."""
    return 4 * kept <= 3 * count


@frozen
class TileCost:
    """What one tile holds, in float32 numbers."""

    width: int
    """D."""
    logits: int = 1
    """Arrays `[t, v]` that live at the same time."""
    filtered: bool = False
    """Whether rows of weights are gathered for a product of their own."""

    @property
    def _token(self) -> int:
        """Of one token, beside its logits."""
        return 2 * self.width + (FILTER_BLOCK + self.width if self.filtered else 0)

    def bytes(self, tokens: int, vocab: int) -> int:
        return FLOAT * (self.logits * tokens * vocab + tokens * self._token + vocab * self.width)

    def vocab_within(self, budget: int, tokens: int) -> int:
        """The most vocabulary entries for that many tokens; 0 or less where none fit."""
        return (budget // FLOAT - tokens * self._token) // (self.logits * tokens + self.width)

    def tokens_within(self, budget: int, vocab: int) -> int:
        """The most tokens for that many vocabulary entries; 0 or less where none fit."""
        return (budget // FLOAT - vocab * self.width) // (self.logits * vocab + self._token)


def choose_tile(
    budget: int, tokens: int, vocab: int, cost: TileCost, *,
    token_tile: int | None = None, vocab_tile: int | None = None,
) -> tuple[int, int]:  # fmt: skip
    """(tokens, vocabulary entries) of a tile within `budget` bytes, for `tokens` scored tokens; one of them may be set.

    Raises ValueError, saying what the least tile takes, where nothing fits.
    """
    if vocab_tile is not None:
        vocab_tile = min(vocab_tile, vocab)
        found = [(cost.tokens_within(budget, vocab_tile), vocab_tile)]
    else:
        counts = [min(token_tile, tokens)] if token_tile is not None else _even_parts(tokens)
        found = [(t, min(cost.vocab_within(budget, t), vocab)) for t in counts]
    fitting = [(t, v) for t, v in found if t >= 1 and v >= 1]
    if not fitting:
        least = cost.bytes(1 if token_tile is None else found[0][0], 1 if vocab_tile is None else vocab_tile)
        raise ValueError(f"{budget:,} bytes are too few for a tile: the least takes {least:,} at width {cost.width}")
    t, v = min(fitting, key=lambda tile: 1 / tile[0] + 3 / tile[1])
    return min(t, tokens), v if vocab_tile is not None else _even(vocab, v)


def _even_parts(count: int) -> list[int]:
    """`count` whole, in halves, in quarters, …, down to one."""
    parts = [count]
    while parts[-1] > 1:
        parts.append(-(-count // 2 ** len(parts)))
    return parts


def _even(count: int, most: int) -> int:
    """A size of at most `most` that cuts `count` into the fewest, nearly equal parts; aligned where there is room."""
    size = -(-count // -(-count // most))
    return min(most, -(-size // ALIGN) * ALIGN)

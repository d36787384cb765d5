"""Log-probabilities and their gradient in one pass over the vocabulary, without ever holding `[M, V]`.

For each tile of tokens × vocabulary the running maximum, the running sum and the running expectation of the output
rows are rescaled as FlashAttention does, so that log-probability, `∂logprob/∂hidden` and entropy come out of one pass.
The loss later scales each row of that unit gradient; no second pass is needed. The memory is that of one tile
(`tiling` says what it holds and how its shape follows from `tile_memory`) and the unit gradient itself.

With `eps` the product that makes the unit gradient leaves out, block by block of the vocabulary, tokens for which no
entry of the block is more probable than `eps` (times the slope of a soft cap). Probabilities are relative to what is
known of the normaliser when the block is reached: the sum so far, or the target's own weight where that is larger.
Either is a lower bound of the final one, so nothing that ends up above `eps` is left out, in one pass. The target's own
row always counts in full. Log-probabilities, `lse` and entropy are exact at any `eps`.

Cut your losses in large-vocabulary language models: Wijmans et al., 2024 (arXiv:2411.09009), also for the filter; the
rescaling: Dao et al., FlashAttention, 2022 (arXiv:2205.14135). On a GPU one kernel does what lies between the two
products of a tile, see `kernels`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import mlx.core as mx
from attrs import frozen

from mortice.batch import Gradients, TokenLogprobs
from mortice.errors import ConfigError
from mortice.linear import on_cpu
from mortice.model import Output
from mortice.options import and_, ge, in_, lt, option, optional
from mortice.sizes import parse_size, size
from mortice_plugins.heads import mlx_tiles, numpy_tiles
from mortice_plugins.heads.kernels.tile import MODES, epilogue
from mortice_plugins.heads.tiling import choose_tile

TILE_MEMORY = "16MB"
"""Where the run file does not say."""


def _runs_kernels(head: FlashCCE, attribute: attrs.Attribute[str], mode: str) -> None:
    """Validator: a kernel may be insisted on where there can be one."""
    if mode != "on":
        return
    if on_cpu():
        raise ValueError(
            "'kernel' is 'on', but MLX runs on the CPU here and the kernel is written for Metal and CUDA; 'auto' uses "
            "it on a GPU only"
        )
    if head.backend == "numpy":
        raise ValueError("'kernel' is 'on', but with backend = 'numpy' no kernel runs; allowed: 'auto', 'off'")


@frozen
class FlashCCE:
    """Log-probabilities and their gradient in one pass over vocabulary tiles; never holds full logits.

    The tile is chosen within `tile_memory` by the scored tokens, the width and the vocabulary: tokens whole, in halves,
    in quarters, …, each with as much of the vocabulary as the budget leaves room for (logits, output rows as floats,
    product), and of these the tile whose products move the least memory. `token_tile` or `vocab_tile` sets one side and
    leaves the other to the budget; both together are the tile.
    """

    provides: ClassVar = frozenset({"entropy"})
    leaner: ClassVar = {"tile_memory": (None, "8MB", "4MB", "2MB")}

    tile_memory: str | None = option(
        None, help=f'most memory of one tile, such as "32MB"; {TILE_MEMORY} if not set', validator=optional(size)
    )
    token_tile: int | None = option(
        None, help="tokens in a tile; chosen by tile_memory if not set", validator=optional(ge(1))
    )
    vocab_tile: int | None = option(
        None, help="vocabulary entries in a tile; chosen by tile_memory if not set", validator=optional(ge(1))
    )
    eps: float = option(
        0.0,
        help="probability up to which vocabulary entries may be left out of the unit gradient; 0 is exact; "
        'needs a backward that runs the head outside a trace ("segmented")',
        validator=and_(ge(0), lt(1)),
    )
    backend: str = option(
        "auto",
        help="auto (numpy where MLX runs on the CPU and no trace is open, else mlx), mlx, or numpy",
        validator=in_(("auto", "mlx", "numpy")),
    )
    kernel: str = option(
        "auto",
        help="one kernel between the products of a tile: auto (on a GPU, where it proves right), on (or an error), off",
        validator=and_(in_(MODES), _runs_kernels),
    )

    def __attrs_post_init__(self) -> None:
        if self.tile_memory is not None and self.token_tile is not None and self.vocab_tile is not None:
            raise ValueError(
                "tile_memory has nothing to choose: token_tile and vocab_tile are both set; drop one of them"
            )

    def ready(self) -> None:
        """Check the kernel, where there is one to run: inside a trace would be too late."""
        if self.backend != "numpy":
            for grad in (False, True):
                epilogue(self.kernel, grad=grad)

    @property
    def outside_traces(self) -> bool:
        """Which rows are left out depends on probabilities, which a trace does not know yet."""
        return self.eps > 0

    def score(
        self, hidden: mx.array, targets: mx.array, output: Output, *, grad: bool = False,
        entropy: bool = False, traced: bool = False,
    ) -> TokenLogprobs:  # fmt: skip
        """Log-probability of each target; `dhidden` is `slope_y · W_y − Σ_v p_v · slope_v · W_v`.

        Raises ConfigError where `eps` is set and a gradient is wanted inside a trace, whose shapes cannot depend on
        probabilities, or where no tile fits `tile_memory`.
        """
        if not hidden.shape[0]:
            return mlx_tiles.nothing(hidden.shape[1], grad=grad, entropy=entropy)
        if traced and grad and self.eps:
            raise ConfigError(
                f"[head] eps = {self.eps:g}: rows cannot be left out of the unit gradient inside a trace; "
                'take a backward that runs the head outside ([backward] name = "segmented"), or eps = 0'
            )
        tiles = self._tiles(traced)
        tile = self._tile(tiles, hidden, output, grad=grad, entropy=entropy, traced=traced)
        if tiles is numpy_tiles:
            return numpy_tiles.score(hidden, targets, output, tile, grad=grad, entropy=entropy, eps=self.eps)
        return mlx_tiles.score(
            hidden, targets, output, tile,
            grad=grad, entropy=entropy, eps=self.eps, traced=traced, epilogue=epilogue(self.kernel, grad=grad),
        )  # fmt: skip

    def output_gradients(
        self, hidden: mx.array, targets: mx.array, output: Output, dlogprobs: mx.array, lse: mx.array, *,
        traced: bool = False,
    ) -> Gradients:  # fmt: skip
        """Gradients of the output's parameters, in a second pass over the tiles; exact at any `eps`."""
        gradients = {name: mx.zeros(value.shape) for name, value in output.parameters().items()}
        if not gradients or not hidden.shape[0]:
            return gradients
        tiles = self._tiles(traced)
        tile = self._tile(tiles, hidden, output, grad=True, entropy=False, traced=traced)
        if tiles is numpy_tiles:
            numpy_tiles.output_gradients(hidden, targets, output, dlogprobs, lse, tile, gradients)
        else:
            mlx_tiles.output_gradients(hidden, targets, output, dlogprobs, lse, tile, gradients, traced=traced)
        return gradients

    def _tiles(self, traced: bool) -> Any:
        """The tile loop. numpy cannot run inside a trace; there MLX's CPU `exp` and `tanh` have to do."""
        eager = not traced and (self.backend == "numpy" or (self.backend == "auto" and on_cpu()))
        return numpy_tiles if eager else mlx_tiles

    def _tile(
        self, tiles: Any, hidden: mx.array, output: Output, *, grad: bool, entropy: bool, traced: bool
    ) -> tuple[int, int]:  # fmt: skip
        """(tokens, vocabulary entries) of a tile."""
        if self.token_tile is not None and self.vocab_tile is not None:
            return self.token_tile, self.vocab_tile
        budget = self.tile_memory or TILE_MEMORY
        cost = tiles.cost(
            hidden, output, grad=grad, entropy=entropy, filtered=grad and self.eps > 0, traced=traced
        )  # fmt: skip
        try:
            return choose_tile(
                parse_size(budget), hidden.shape[0], output.vocab, cost,
                token_tile=self.token_tile, vocab_tile=self.vocab_tile,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(f'[head] tile_memory = "{budget}": {error}') from error

"""Log-probabilities and their gradient in one pass over the vocabulary, without ever holding `[M, V]`.

For each tile of tokens × vocabulary the running maximum, the running sum and the running expectation of the output
rows are rescaled as FlashAttention does, so that log-probability, `∂logprob/∂hidden` and entropy come out of one pass.
The loss later scales each row of that unit gradient; no second pass is needed. The memory is that of one tile, one
block of float rows where the matrix is not float32, and the unit gradient itself.

Cut your losses in large-vocabulary language models: Wijmans et al., 2024 (arXiv:2411.09009); the rescaling: Dao et al.,
FlashAttention, 2022 (arXiv:2205.14135). On a GPU one kernel does what lies between the two products of a tile, see
`kernels`. What it leaves out: skipping tiles of negligible probability,
which would not be exact.
"""

from __future__ import annotations

from typing import ClassVar

import attrs
import mlx.core as mx
from attrs import frozen

from mortice.batch import Gradients, TokenLogprobs
from mortice.linear import on_cpu
from mortice.model import Output
from mortice.options import and_, ge, in_, option
from mortice_plugins.heads import mlx_tiles, numpy_tiles
from mortice_plugins.heads.kernels.tile import MODES, epilogue


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
    """Log-probabilities and their gradient in one pass over vocabulary tiles; never holds full logits."""

    provides: ClassVar = frozenset({"entropy"})

    token_tile: int = option(256, help="tokens in a tile", validator=ge(1))
    vocab_tile: int = option(8192, help="vocabulary entries in a tile", validator=ge(1))
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

    def score(
        self, hidden: mx.array, targets: mx.array, output: Output, *, grad: bool = False,
        entropy: bool = False, traced: bool = False,
    ) -> TokenLogprobs:  # fmt: skip
        """Log-probability of each target; `dhidden` is `slope_y · W_y − Σ_v p_v · slope_v · W_v`."""
        tile = (self.token_tile, self.vocab_tile)
        if self._numpy(traced):
            return numpy_tiles.score(hidden, targets, output, tile, grad=grad, entropy=entropy)
        return mlx_tiles.score(
            hidden, targets, output, tile,
            grad=grad, entropy=entropy, traced=traced, epilogue=epilogue(self.kernel, grad=grad),
        )  # fmt: skip

    def output_gradients(
        self, hidden: mx.array, targets: mx.array, output: Output, dlogprobs: mx.array, lse: mx.array, *,
        traced: bool = False,
    ) -> Gradients:  # fmt: skip
        """Gradients of the output's parameters, in a second pass over the tiles."""
        if not output.parameters():
            return {}
        tile = (self.token_tile, self.vocab_tile)
        if self._numpy(traced):
            return numpy_tiles.output_gradients(hidden, targets, output, dlogprobs, lse, tile)
        return mlx_tiles.output_gradients(hidden, targets, output, dlogprobs, lse, tile, traced=traced)

    def _numpy(self, traced: bool) -> bool:
        """numpy cannot run inside a trace; there MLX's CPU `exp` and `tanh`, 26 times slower, have to do."""
        on_cpu = mx.default_device() == mx.cpu
        return not traced and (self.backend == "numpy" or (self.backend == "auto" and on_cpu))

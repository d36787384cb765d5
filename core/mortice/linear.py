"""Linear layers, stacks of them, embeddings, over weights as they are stored: float32, bfloat16, float16 or quantized.

On a GPU the products run on the stored weights. MLX's CPU products are fast in float32 alone, so there a weight of
another type is brought to float32 on the fly, forward and backward, and never kept for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from attrs import frozen

from mortice import staging

FLOATS = (mx.float32, mx.bfloat16, mx.float16)
"""Types of weights that are not packed, and of the scales of affine ones."""
FEW = 2
"""Rows up to which the CPU multiplies packed weights as they are (decoding); unpacking pays from the third on."""
FEW_EACH = 8
"""The same for a stack: rows are tokens times experts."""


@frozen
class Quantization:
    """How a matrix is packed, in MLX's terms."""

    bits: int
    group_size: int
    mode: str = "affine"

    def dequantize(self, weight: mx.array, scales: mx.array, biases: mx.array | None = None) -> mx.array:
        """Packed rows to float rows `[out, in]`.

        On the CPU in float32 whatever the scales are stored in: half precision would round the rows once more, and is
        seven times slower there.
        """
        if on_cpu() and self.mode == "affine":
            scales, biases = scales.astype(mx.float32), None if biases is None else biases.astype(mx.float32)
        return unpack(weight, scales, biases, self.group_size, self.bits, self.mode)


def unpack(
    weight: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int, mode: str
) -> mx.array:  # fmt: skip
    """`mx.dequantize`, also for any number of short rows of nvfp4, which MLX's CPU unpacks only in pairs of groups."""
    odd = mode == "nvfp4" and scales.size % 2 == 1
    if odd:
        lead, weight, scales = weight.shape[:-1], *(a.reshape(-1, a.shape[-1]) for a in (weight, scales))
        weight, scales = (mx.concatenate([a, a[:1]]) for a in (weight, scales))
    rows = mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits, mode=mode)
    return rows[:-1].reshape(*lead, rows.shape[-1]) if odd else rows


def unpacked_dtype(scales: mx.array) -> mx.Dtype:
    """The type of packed numbers: that of their scales, or bfloat16, which holds all of them, where those are bytes."""
    return scales.dtype if scales.dtype in FLOATS else mx.bfloat16


def packed_zeros(shape: Sequence[int], q: Quantization) -> dict[str, mx.array]:
    """Places for packed matrices of this shape, in MLX's shapes; never computed."""
    *rows, columns = shape
    groups = (*rows, columns // q.group_size)
    packed = {"weight": mx.zeros((*rows, columns * q.bits // 32), mx.uint32), "scales": mx.zeros(groups)}
    return packed | ({"biases": mx.zeros(groups)} if q.mode == "affine" else {})


def on_cpu() -> bool:
    """Whether arrays are computed on the CPU backend."""
    return mx.default_device() == mx.cpu


def float32_product(x: mx.array, stored: list[mx.array], unpack: Callable[..., mx.array]) -> mx.array:
    """`x @ W.T` in float32, W unpacked from `stored` for the forward and again for the backward.

    `x [T, in]` → `[T, out]` in the type of `x`. No gradient to the stored weight.
    """

    def floats(after: mx.array) -> mx.array:
        """W, not before `after` is there: nothing else keeps MLX from unpacking the weights of many layers at once."""
        return unpack(*mx.depends(stored, [after])).astype(mx.float32)

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return x @ floats(x).T

    @product.vjp
    def product_vjp(primals: Any, cotangent: mx.array, _: Any) -> mx.array:
        return cotangent @ floats(cotangent)

    y: mx.array = product(x.astype(mx.float32))  # type: ignore[assignment]
    return y.astype(x.dtype)


class Linear(nn.Module):
    """`x @ weight.T + bias`, `weight [out, in]`. The weight is put in place when a checkpoint is loaded."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = mx.zeros((outputs, inputs))
        if bias:
            self.bias = mx.zeros((outputs,))

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: mx.array) -> mx.array:
        if on_cpu() and self.weight.dtype != mx.float32:
            y = float32_product(x, [self.weight], lambda weight: weight)
        else:
            y = x @ self.weight.T
        return y + self.bias if "bias" in self else y


class Packed(nn.Module):
    """Packed rows, with the scales and offsets of their groups."""

    def __init__(self, shape: Sequence[int], quantization: Quantization) -> None:
        super().__init__()
        self._quantization = quantization
        self._shape = tuple(shape)
        dict.update(self, packed_zeros(shape, quantization))

    @property
    def quantization(self) -> Quantization:
        return self._quantization

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix, or of the stack of them, unpacked."""
        return self._shape

    @property
    def dtype(self) -> mx.Dtype:
        """The type that the numbers are stored for: see `unpacked_dtype`."""
        return unpacked_dtype(self.scales)

    def _stored(self) -> list[mx.array]:
        biases = self.get("biases")
        return [self.weight, self.scales, *([] if biases is None else [biases])]

    def _unpack(self, weight: mx.array, scales: mx.array, biases: mx.array | None = None) -> mx.array:
        return self._quantization.dequantize(weight, scales, biases)


class QuantizedLinear(Packed):
    """`Linear` over packed rows."""

    def __init__(self, inputs: int, outputs: int, quantization: Quantization, bias: bool = False) -> None:
        super().__init__((outputs, inputs), quantization)
        if bias:
            self.bias = mx.zeros((outputs,))

    @property
    def inputs(self) -> int:
        return self._shape[1]

    @property
    def outputs(self) -> int:
        return self._shape[0]

    def __call__(self, x: mx.array) -> mx.array:
        q = self._quantization
        biases = self.get("biases")
        if on_cpu() and x.size // x.shape[-1] > FEW:
            y = float32_product(x, self._stored(), self._unpack)
        else:
            y = mx.quantized_matmul(
                x, self.weight, self.scales, biases, transpose=True, group_size=q.group_size, bits=q.bits, mode=q.mode
            )
        return y + self.bias if "bias" in self else y


class Stacked(nn.Module):
    """Linear layers of one shape, stacked: `weight [E, out, in]`, `bias [E, out]`, each row of the input through one of
    them."""

    def __init__(self, count: int, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = mx.zeros((count, outputs, inputs))
        if bias:
            self.bias = mx.zeros((count, outputs))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def __call__(self, x: mx.array, which: mx.array) -> mx.array:
        """`x [N, in]`, rising `which [N]` → `[N, out]`.

        On the CPU weights that are not float32 are cast on the fly, forward and backward; those get no gradient.
        """
        if on_cpu() and self.weight.dtype != mx.float32:
            y = float32_products(x, [self.weight], lambda weight: weight, which)
        else:
            y = gathered(x, self.weight, which)
        return y + self.bias[which] if "bias" in self else y


class QuantizedStacked(Packed):
    """`Stacked` over packed rows. On the CPU matrices are unpacked for a product: inside a trace all of the stack, else
    one after the other and only those that a row goes to."""

    def __init__(self, shape: Sequence[int], quantization: Quantization, bias: bool = False) -> None:
        super().__init__(shape, quantization)
        if bias:
            self.bias = mx.zeros(tuple(shape[:2]))

    def __call__(self, x: mx.array, which: mx.array) -> mx.array:
        q = self._quantization
        if on_cpu() and x.shape[0] > FEW * FEW_EACH:
            y = float32_products(x, self._stored(), self._unpack, which)
        else:
            y = mx.gather_qmm(
                x[:, None], self.weight, self.scales, self.get("biases"), rhs_indices=which, transpose=True,
                group_size=q.group_size, bits=q.bits, mode=q.mode, sorted_indices=True,
            )[:, 0]  # fmt: skip
        return y + self.bias[which] if "bias" in self else y


def gathered(x: mx.array, matrices: mx.array, which: mx.array) -> mx.array:
    """Each row times the transpose of its matrix: `x [N, in]`, `matrices [E, out, in]`, rising `which` → `[N, out]`."""
    return _gathered(x, matrices.swapaxes(1, 2), which)


def _gathered(x: mx.array, matrices: mx.array, which: mx.array) -> mx.array:
    return mx.gather_mm(x[:, None], matrices, rhs_indices=which, sorted_indices=True)[:, 0]


def float32_products(
    x: mx.array, stored: list[mx.array], unpack: Callable[..., mx.array], which: mx.array
) -> mx.array:  # fmt: skip
    """`gathered` in float32, the matrices unpacked from `stored` for the forward and again for the backward, as in
    `float32_product`. No gradient to them. Like `Context.attend` it may run at once."""
    tape = staging.current()
    if tape is not None:
        return tape.perform(_EachInTurn(stored, unpack, which), x)

    def floats(after: mx.array) -> mx.array:
        return unpack(*mx.depends(stored, [after])).astype(mx.float32)

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return gathered(x, floats(x), which)

    @product.vjp
    def product_vjp(primals: Any, cotangent: mx.array, _: Any) -> mx.array:
        return _gathered(cotangent, floats(cotangent), which)

    y: mx.array = product(x.astype(mx.float32))  # type: ignore[assignment]
    return y.astype(x.dtype)


@frozen(eq=False)
class _EachInTurn:
    """The same outside every trace, where it is known which matrices are needed: one at a time, for all its rows."""

    stored: Sequence[mx.array]
    unpack: Callable[..., mx.array]
    which: mx.array
    """Rising, `[N]`. A constant of the operation: which matrix a row goes to has no gradient."""

    def forward(self, *inputs: mx.array) -> tuple[mx.array, None]:
        return self._products(inputs[0], lambda matrix: matrix.T), None

    def backward(
        self, inputs: Sequence[mx.array], output: mx.array, saved: None, cotangent: mx.array
    ) -> list[mx.array]:
        return [self._products(cotangent, lambda matrix: matrix)]

    def _products(self, x: mx.array, turned: Callable[[mx.array], mx.array]) -> mx.array:
        """Rows of `x` times `turned` of their matrices, in the type of `x`."""
        used, starts = np.unique(np.asarray(self.which), return_index=True)
        stops = [*starts[1:], len(x)]
        out = None
        for number, start, stop in zip(used.tolist(), starts.tolist(), stops):
            matrix = turned(self.unpack(*(part[number] for part in self.stored)).astype(mx.float32))
            y = x[start : int(stop)].astype(mx.float32) @ matrix
            if out is None:
                out = mx.zeros((len(x), y.shape[1]))
            mx.eval(y, out)
            np.array(out, copy=False)[start : int(stop)] = np.asarray(y)
        assert out is not None
        return out.astype(x.dtype)


class Embedding(nn.Module):
    """Rows of a table `[V, D]`."""

    def __init__(self, vocab: int, dims: int) -> None:
        super().__init__()
        self.weight = mx.zeros((vocab, dims))

    def __call__(self, ids: mx.array) -> mx.array:
        return self.weight[ids]


class QuantizedEmbedding(Packed):
    """Rows of a packed table; only the rows that are asked for are unpacked."""

    def __call__(self, ids: mx.array) -> mx.array:
        biases = self.get("biases")
        rows = None if biases is None else biases[ids]
        return self._quantization.dequantize(self.weight[ids], self.scales[ids], rows)


def quantized(module: nn.Module, quantization: Quantization) -> nn.Module:
    """The packed twin of a linear layer, a stack of them or an embedding, without weights."""
    shape = module.weight.shape
    if isinstance(module, Embedding):
        return QuantizedEmbedding(shape, quantization)
    if isinstance(module, Stacked):
        return QuantizedStacked(shape, quantization, bias="bias" in module)
    return QuantizedLinear(shape[1], shape[0], quantization, bias="bias" in module)


PACKABLE = (Linear, Embedding, Stacked)
"""Modules whose weight may be stored packed."""

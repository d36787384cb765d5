"""Linear layers and embeddings over weights as they are stored: float32, bfloat16, float16 or quantized.

On a GPU the products run on the stored weights. MLX's CPU products are fast in float32 alone, so there a weight of
another type is brought to float32 on the fly, forward and backward, and never kept for the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from attrs import frozen

FEW = 2
"""Rows up to which the CPU multiplies packed weights as they are (decoding); unpacking pays from the third on."""


@frozen
class Quantization:
    """How a matrix is packed, in MLX's terms."""

    bits: int
    group_size: int
    mode: str = "affine"

    def dequantize(self, weight: mx.array, scales: mx.array, biases: mx.array | None) -> mx.array:
        """Packed rows to float rows `[out, in]`.

        On the CPU in float32 whatever the scales are stored in: half precision would round the rows once more, and is
        seven times slower there.
        """
        if on_cpu() and self.mode == "affine":
            scales, biases = scales.astype(mx.float32), None if biases is None else biases.astype(mx.float32)
        return mx.dequantize(weight, scales, biases, group_size=self.group_size, bits=self.bits, mode=self.mode)


def packed_zeros(rows: int, columns: int, q: Quantization) -> dict[str, mx.array]:
    """Places for a packed matrix, in MLX's shapes; never computed."""
    groups = (rows, columns // q.group_size)
    packed = {"weight": mx.zeros((rows, columns * q.bits // 32), mx.uint32), "scales": mx.zeros(groups)}
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

    def __init__(self, rows: int, columns: int, quantization: Quantization) -> None:
        super().__init__()
        self._quantization = quantization
        self._shape = (rows, columns)
        dict.update(self, packed_zeros(rows, columns, quantization))

    @property
    def quantization(self) -> Quantization:
        return self._quantization

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, unpacked."""
        return self._shape


class QuantizedLinear(Packed):
    """`Linear` over packed rows."""

    def __init__(self, inputs: int, outputs: int, quantization: Quantization, bias: bool = False) -> None:
        super().__init__(outputs, inputs, quantization)
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
        if on_cpu() and x.shape[0] > FEW:
            stored = [self.weight, self.scales, *([] if biases is None else [biases])]

            def unpack(weight: mx.array, scales: mx.array, biases: mx.array | None = None) -> mx.array:
                return q.dequantize(weight, scales, biases)

            y = float32_product(x, stored, unpack)
        else:
            y = mx.quantized_matmul(
                x, self.weight, self.scales, biases, transpose=True, group_size=q.group_size, bits=q.bits, mode=q.mode
            )
        return y + self.bias if "bias" in self else y


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
    """The packed twin of a linear layer or an embedding, without weights."""
    rows, columns = module.weight.shape
    if isinstance(module, Embedding):
        return QuantizedEmbedding(rows, columns, quantization)
    return QuantizedLinear(columns, rows, quantization, bias="bias" in module)

"""Kernels written once for Metal and CUDA: one body, two dialects, and a check on the device before it is trusted.

A body is C++ in the common subset of both languages. One group of threads works on one row; it may use

    group, lane             index of the group, index of the thread in it
    THREADS                 threads in a group, known at compile time
    SHARED(type, name, n)   an array that the group shares
    BARRIER()               every thread of the group has come here, and shared memory is seen by all
    EXP(x), TANH(x)         float32, precise
    NAME[i], NAME_shape[i]  elements and shape of an input; NAME[i] of an output

and no pointers to any of them: Metal gives inputs of fewer than 8 elements another address space. A kernel is an
option of a strategy, never the only path: `verified` compares it with its plain twin. `mortice.testing.kernels` runs
the same body on the CPU. It leaves out atomics, warps, and outputs other than float32.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import mlx.core as mx
from attrs import frozen

from mortice.errors import TrainingError

Shape = tuple[int, ...]
F = TypeVar("F", bound=Callable[..., Any])


@frozen
class Dialect:
    """What makes a body one language's."""

    header: str
    """Goes before the function: the macros."""
    prologue: str
    """Goes before the body: `group` and `lane`. MLX looks for the names of Metal's attributes here, not in a header."""


METAL = Dialect(
    header="""
#define SHARED(type, name, size) threadgroup type name[size]
#define BARRIER() metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup)
#define EXP(x) metal::precise::exp(x)
#define TANH(x) metal::precise::tanh(x)
""",
    prologue="""
const int group = threadgroup_position_in_grid.x;
const int lane = thread_position_in_threadgroup.x;
""",
)
CUDA = Dialect(
    header="""
#define SHARED(type, name, size) __shared__ type name[size]
#define BARRIER() __syncthreads()
#define EXP(x) expf(x)
#define TANH(x) tanhf(x)
""",
    prologue="""
const int group = blockIdx.x;
const int lane = threadIdx.x;
""",
)


@frozen
class Kernel:
    """A body with the names of what goes in and out. Calling it needs a GPU."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    """All float32."""
    body: str

    def __call__(
        self, inputs: Sequence[mx.array], shapes: Sequence[Shape], *, groups: int, threads: int, **constants: int | bool
    ) -> list[mx.array]:
        """One output for each of `shapes`, from `groups` groups of `threads` threads.

        `constants` are known at compile time. Raises RuntimeError without a GPU, and where the body does not compile
        when the outputs are evaluated.
        """
        out: list[mx.array] = _built(self, METAL if mx.metal.is_available() else CUDA)(
            inputs=list(inputs),
            template=list(template(threads, constants).items()),
            grid=(groups * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=list(shapes),
            output_dtypes=[mx.float32] * len(shapes),
        )
        return out

    @property
    def unique_name(self) -> str:
        """The name and a digest of the text: MLX keeps compiled CUDA kernels on disk and finds them by name alone."""
        return f"{self.name}_{hashlib.sha256(repr((self, CUDA)).encode()).hexdigest()[:8]}"

    def source(self, dialect: Dialect) -> str:
        """The body as one language's."""
        return dialect.prologue + self.body


def template(threads: int, constants: dict[str, int | bool]) -> dict[str, int | bool]:
    """What is known at compile time."""
    return {"THREADS": threads, **constants}


@cache
def _built(kernel: Kernel, dialect: Dialect) -> Callable[..., list[mx.array]]:
    make: Callable[..., Any] = mx.fast.metal_kernel if dialect is METAL else mx.fast.cuda_kernel
    built: Callable[..., list[mx.array]] = make(
        name=kernel.unique_name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source(dialect),
        header=dialect.header,
    )
    return built


def verified(
    name: str, fast: F, plain: F, trial: Callable[[F], Sequence[mx.array]], *,
    tolerance: float = 1e-4, required: bool = False,
) -> F:  # fmt: skip
    """`fast` where it agrees with `plain` on a trial, else `plain`, after a warning that says why.

    `trial` calls a function on small inputs and returns what came out. Arrays may differ by `tolerance` times the
    larger of 1 and the expected value. With `required` a TrainingError takes the place of the warning.
    """
    fault, cause = _fault(fast, plain, trial, tolerance)
    if fault is None:
        return fast
    found = f"the kernel {name!r} cannot be used on {mx.default_device()}: {fault}"
    if required:
        raise TrainingError(found) from cause
    message = f"{found}. Its plain twin takes its place: right, but slower. Please report this with the version of mlx"
    warnings.warn(message, RuntimeWarning, stacklevel=2)
    return plain


def _fault(
    fast: F, plain: F, trial: Callable[[F], Sequence[mx.array]], tolerance: float
) -> tuple[str | None, Exception | None]:
    """What is wrong with `fast`, in a few words, and what it raised. Whatever it raises is a fault of it."""
    expected = trial(plain)
    try:
        found = trial(fast)
        mx.eval(found)
    except Exception as error:
        return f"it raised {type(error).__name__}: {str(error).rstrip('.')}", error
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a.shape != b.shape:
            return f"array {i} of its trial has shape {list(a.shape)}, its plain twin gives {list(b.shape)}", None
        far = mx.abs(a - b) / mx.maximum(1.0, mx.abs(b))
        if not mx.all(far <= tolerance).item():  # NaN is no agreement either
            return f"array {i} of its trial is off by {far.max().item():.2g}, allowed is {tolerance:g}", None
    return None, None

"""For authors of kernels: run a body on the CPU, and see the text that MLX would make of it.

`emulate` builds the body of a `mortice.kernels.Kernel` with g++ and runs every thread of a group as a fiber (see
`emulator.h`): a missing barrier, an index out of bounds and an element that nothing writes show at once. It runs on
Linux, and says nothing about speed, nor about what a GPU's compiler makes of the text; `cuda_text` and `metal_text` are
for that.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mortice.kernels import CUDA, METAL, Kernel, Shape, template

_HERE = Path(__file__).parent
_TYPES = {np.dtype(np.float32): "float", np.dtype(np.int32): "int", np.dtype(np.uint32): "unsigned"}
_SMALL = 8
"""Metal gets inputs of fewer elements in its `constant` address space."""


_ATTRIBUTES = ("thread_position_in_threadgroup", "threadgroup_position_in_grid")


class KernelFault(Exception):
    """What a kernel did wrong in the emulator: which thread, and what it touched."""


def emulate(
    kernel: Kernel, inputs: Sequence[np.ndarray], shapes: Sequence[Shape], *, groups: int, threads: int,
    order: Sequence[int] | None = None, **constants: int | bool,
) -> list[np.ndarray]:  # fmt: skip
    """What the kernel gives: one float32 array for each of `shapes`, NaN where nothing was written.

    `order` is that in which the threads of a group run between two barriers; a right kernel gives the same in any.
    Raises KernelFault for a race, an index out of bounds and a barrier that only some threads reach;
    ValueError for a body that does not compile, with what g++ says; FileNotFoundError without g++.
    """
    inputs = [np.ascontiguousarray(x) for x in inputs]
    outputs = [np.full(shape, np.nan, np.float32) for shape in shapes]
    launch = _launcher(_emulated(kernel, inputs, template(threads, constants)))
    found = launch(
        _array(ctypes.c_void_p, [x.ctypes.data for x in (*inputs, *outputs)]),
        _array(ctypes.c_long, [x.size for x in (*inputs, *outputs)]),
        _array(ctypes.c_int, [n for x in inputs for n in x.shape]),
        groups,
        threads,
        _array(ctypes.c_int, list(range(threads) if order is None else order)),
    )
    if found:
        raise KernelFault(f"{kernel.name}: {found.decode()}")
    return outputs


def cuda_text(kernel: Kernel, inputs: Sequence[np.ndarray], *, threads: int, **constants: int | bool) -> str:
    """The function that `mx.fast.cuda_kernel` makes of the kernel for these inputs, for `nvcc`.

    As MLX 0.32 builds it (mlx/backend/cuda/custom_kernel.cpp), less its own device headers.
    """
    parameters = []
    for name, x in zip(kernel.inputs, inputs, strict=True):
        parameters.append(f"const {_type(x)}* {name}")
        if _needs_shape(kernel, name):
            parameters.append(f"const __grid_constant__ Shape {name}_shape")
    parameters += [f"float* {name}" for name in kernel.outputs]
    return "\n".join(
        [
            "#include <cooperative_groups.h>",
            "#include <cuda/std/array>",
            "#include <cuda/std/limits>",
            "#define inf cuda::std::numeric_limits<float>::infinity()",
            CUDA.header,
            "namespace mlx::core::cu {",
            "namespace cg = cooperative_groups;",
            "using Shape = cuda::std::array<int, 10>;",
            f"__global__ void {kernel.unique_name}({', '.join(parameters)}) {{",
            *_constants(template(threads, constants)),
            kernel.source(CUDA),
            "}",
            "}",
        ]
    )


def metal_text(kernel: Kernel, inputs: Sequence[np.ndarray], *, threads: int, **constants: int | bool) -> str:
    """The function that `mx.fast.metal_kernel` makes of the kernel for these inputs.

    As MLX 0.32 builds it (mlx/backend/common/metal_kernel.cpp), less its own headers and the explicit instantiation.
    """
    source = kernel.source(METAL)
    parameters = []
    for name, x in zip(kernel.inputs, inputs, strict=True):
        space = "constant" if x.size < _SMALL else "device"
        parameters.append(f"const {space} {_type(x)}* {name}")
        if _needs_shape(kernel, name):
            parameters.append(f"const constant int* {name}_shape")
    parameters += [f"device float* {name}" for name in kernel.outputs]
    parameters = [f"{parameter} [[buffer({i})]]" for i, parameter in enumerate(parameters)]
    parameters += [f"uint3 {name} [[{name}]]" for name in _ATTRIBUTES if name in source]
    known = template(threads, constants)
    kinds = ", ".join(f"{_constant_type(value)} {name}" for name, value in known.items())
    return "\n".join(
        [
            METAL.header,
            f"template <{kinds}>",
            f"[[kernel]] void {kernel.unique_name}({', '.join(parameters)}) {{",
            source,
            "}",
        ]
    )


def _emulated(kernel: Kernel, inputs: Sequence[np.ndarray], constants: Mapping[str, int | bool]) -> str:
    """The body as a function, and `launch`, which runs it for every thread of every group."""
    parameters, arguments = [], []
    places = 0  # of the shapes before
    for i, (name, x) in enumerate(zip(kernel.inputs, inputs, strict=True)):
        parameters += [f"emulator::Buffer<const {_type(x)}> {name}", f"const int* {name}_shape"]
        arguments += [f'{{"{name}", (const {_type(x)}*)data[{i}], sizes[{i}]}}', f"shapes + {places}"]
        places += x.ndim
    for i, name in enumerate(kernel.outputs, len(inputs)):
        parameters.append(f"emulator::Buffer<float> {name}")
        arguments.append(f'{{"{name}", (float*)data[{i}], sizes[{i}]}}')
    return "\n".join(
        [
            f'#include "{_HERE / "emulator.h"}"',
            *_constants(constants),
            f"static void body(int group, int lane, {', '.join(parameters)}) {{",
            f'#line 1 "{kernel.name}"',
            kernel.body,
            "}",
            'extern "C" __attribute__((visibility("default"))) const char* launch(',
            "    void* const* data, const long* sizes, const int* shapes, int groups, int threads, const int* order) {",
            "  emulator::fault.clear();",
            "  for (int group = 0; group < groups && emulator::fault.empty(); ++group) {",
            f"    auto thread = [&](int lane) {{ body(group, lane, {', '.join(arguments)}); }};",
            "    emulator::run_group(thread, threads, order);",
            "  }",
            "  return emulator::fault.empty() ? nullptr : emulator::fault.c_str();",
            "}",
        ]
    )


@cache
def _launcher(text: str) -> Callable[..., bytes | None]:
    """`launch` of this text, compiled. Libraries stay loaded until the process ends."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("the emulator needs g++, which is not on the path")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        source.write_text(text)
        # hidden symbols: each library has a scheduler of its own
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
        done = subprocess.run([compiler, *flags, source, "-o", library], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"the kernel does not compile:\n{done.stderr}")
        launch = ctypes.CDLL(str(library)).launch
    launch.restype = ctypes.c_char_p
    found: Callable[..., bytes | None] = launch
    return found


def _array(kind: Any, values: Sequence[int]) -> Any:
    return (kind * len(values))(*values)


def _type(x: np.ndarray) -> str:
    if x.dtype not in _TYPES:
        raise ValueError(f"a kernel's inputs are {', '.join(map(str, _TYPES))}; found {x.dtype}")
    return _TYPES[x.dtype]


def _constant_type(value: int | bool) -> str:
    return "bool" if isinstance(value, bool) else "int"


def _constants(constants: Mapping[str, int | bool]) -> list[str]:
    return [f"constexpr {_constant_type(value)} {name} = {int(value)};" for name, value in constants.items()]


def _needs_shape(kernel: Kernel, name: str) -> bool:
    """MLX hands over the shape of an input where the body names it."""
    return f"{name}_shape" in kernel.body

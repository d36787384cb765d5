"""A fast BLAS for MLX's CPU backend on Linux.

The Linux wheel of MLX links the reference BLAS (about 8 GFLOP/s on two cores). A library that exports `cblas_sgemm`
and is loaded with RTLD_GLOBAL *before* `mlx` is imported takes its place (150 to 230 GFLOP/s on the same cores).
macOS uses Accelerate and GPUs have no use for it: there nothing is done.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
import time
import warnings
from array import array
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from attrs import frozen

REMEDY = (
    "pip install 'mortice[cpu]' (brings MKL on x86-64), or your system's OpenBLAS (Debian: apt install libopenblas0)"
)
VARIABLE = "MORTICE_BLAS"
"""Environment variable: the path of a library to load, or `none`."""

_WHEELS = (("mkl", "libmkl_rt.so"), ("cmeel-openblas", "libopenblas.so"))
_SYSTEM = ("libopenblas.so.0", "libblis.so.4")


@frozen
class Blas:
    """What was loaded, or why nothing was."""

    name: str
    path: str | None = None
    note: str = ""


_loaded: Blas | None = None


def load() -> Blas:
    """Load a fast BLAS, once a process, before `mlx` is imported; warns with the remedy where it is too late."""
    global _loaded
    if _loaded is None:
        _loaded = _load()
    return _loaded


def _load() -> Blas:
    if sys.platform == "darwin":
        return Blas("Accelerate", note="part of macOS")
    if sys.platform != "linux":
        return Blas("none", note="only Linux and macOS are looked after")
    wish = os.environ.get(VARIABLE, "")
    if wish == "none":
        return Blas("none", note=f"{VARIABLE}=none")
    if "mlx.core" in sys.modules:
        if already := _resident():
            return Blas(Path(already).name, already, "loaded before mortice")
        warnings.warn(
            "mlx was imported before a fast BLAS could be loaded; write `from mortice import score` (or load, or run) "
            "or call mortice.blas.load() before `import mlx`",
            stacklevel=3,
        )
        return Blas("reference", note="mlx was imported first")
    failures = []
    for name, path in _candidates(wish):
        _choose_threads(path)
        try:
            library = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)  # out of mlx's sight until it has proved right
        except OSError as error:
            failures.append(f"{name}: {error}")
            continue
        if not _multiplies(library):
            failures.append(f"{name}: no cblas_sgemm, or wrong products on this processor")
            continue
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        return Blas(name, path)
    if wish:
        warnings.warn(f"{VARIABLE}={wish} could not be loaded: {'; '.join(failures)}", stacklevel=3)
    return Blas("reference", note="; ".join(failures) or "none is installed")


def _candidates(wish: str) -> Iterator[tuple[str, str]]:
    """(name, path) in order of preference: the user's wish, wheels, the system's."""
    if wish:
        yield "from the environment", wish
        return
    for wheel, stem in _WHEELS:
        try:
            files = metadata.files(wheel) or []
        except metadata.PackageNotFoundError:
            continue
        found = [Path(str(f.locate())).resolve() for f in files if f.name.startswith(stem)]
        for path in sorted({str(p) for p in found if p.exists()}):
            yield wheel, path
    for name in _SYSTEM:
        yield name, name


def _choose_threads(path: str) -> None:
    """MKL needs to be told which of the OpenMP libraries is there."""
    if "libmkl_rt" not in path or "MKL_THREADING_LAYER" in os.environ:
        return
    folder = Path(path).parent
    if (folder / "libiomp5.so").exists():
        layer = "INTEL"
    elif ctypes.util.find_library("gomp"):
        layer = "GNU"
    else:
        layer = "SEQUENTIAL"
    os.environ["MKL_THREADING_LAYER"] = layer


def _resident() -> str | None:
    """Path of a fast BLAS that this process holds already (preloaded, or loaded by hand)."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for line in maps.splitlines():
        name = line.rpartition(" ")[2]
        if Path(name).name.startswith(("libopenblas.so", "libmkl_rt.so", "libblis.so")):
            return name
    return None


def _multiplies(library: ctypes.CDLL, n: int = 64) -> bool:
    """Whether a product of small whole numbers comes out exactly: some builds pick a wrong kernel for a processor."""
    try:
        gemm = library.cblas_sgemm
    except AttributeError:
        return False
    a = array("f", [(3 * i + 1) % 7 - 3 for i in range(n * n)])
    b = array("f", [(5 * i + 2) % 11 - 5 for i in range(n * n)])
    c = array("f", bytes(4 * n * n))
    row_major, plain, transposed = 101, 111, 112
    pointers = [ctypes.c_void_p(x.buffer_info()[0]) for x in (a, b, c)]
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    gemm.restype = None
    gemm(row_major, plain, transposed, n, n, n, one, pointers[0], n, pointers[1], n, zero, pointers[2], n)
    return all(
        c[i * n + j] == sum(a[i * n + k] * b[j * n + k] for k in range(n)) for i in (0, 1, 31, 63) for j in range(n)
    )


def measure(size: int = 1024, repeats: int = 3) -> float:
    """GFLOP/s of MLX's float32 product of two `size × size` matrices on the default device; the best of a few."""
    import mlx.core as mx

    a, b = (mx.random.normal((size, size), key=mx.random.key(k)) for k in (0, 1))
    mx.eval(a, b)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        mx.eval(a @ b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9

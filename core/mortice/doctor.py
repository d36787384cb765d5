"""What `mortice doctor` looks at: what a run would use on this machine, and what is in its way."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any

from attrs import frozen

from mortice import blas
from mortice.plugins import Plugins, load_plugins

SLOW = 20.0
"""GFLOP/s of float32 products; the reference BLAS makes 6 to 10 on any processor, a fast one more than 40 a core."""
ROOM = 2e9
"""Bytes of free disk below which a run may not get its checkpoints down."""
LIBRARIES = (
    "mortice", "mlx", "numpy", "tokenizers", "safetensors", "pluggy", "attrs", "cattrs", "jinja2", "rich", "tomlkit",
    "cyclopts",
)  # fmt: skip
EXTRAS = (("hub", "huggingface_hub", "models by hub id"),)
"""(extra, its distribution, what it is for)."""


@frozen
class Finding:
    """One line of the report. `remedy` is set where something is in the way of a run."""

    what: str
    found: str
    remedy: str | None = None


def examine(plugins: Plugins | None = None, folder: Path | None = None) -> list[Finding]:
    """Everything, in the order in which it matters. `folder` is where runs would be kept (the working directory)."""
    return [
        *_backend(),
        _memory(),
        *_libraries(),
        *_extras(),
        *_plugins(load_plugins() if plugins is None else plugins),
        _disk(Path.cwd() if folder is None else folder),
    ]


def _backend() -> Iterator[Finding]:
    loaded = blas.load()
    try:
        import mlx.core as mx

        device = mx.default_device()
        mx.eval(mx.ones(2) + 1)
    except (ImportError, RuntimeError) as error:
        remedy = "pip install 'mortice[cpu]', or mortice[cuda12], mortice[cuda13]" if sys.platform == "linux" else None
        yield Finding("backend", f"mlx does not run here: {error}", remedy or "pip install --force-reinstall mlx")
        return
    gpu = "Metal" if mx.metal.is_available() else "CUDA"
    name = mx.device_info().get("device_name", "unknown device")
    yield Finding("backend", f"{'CPU' if device == mx.cpu else gpu}: {name}")
    if device == mx.cpu:
        yield judge(loaded, blas.measure())
        if sys.platform == "linux" and shutil.which("g++") is None:
            yield Finding("g++", "not found: what is compiled with mx.compile runs uncompiled")
    else:
        yield Finding("float32 product", f"{blas.measure(2048):.0f} GFLOP/s")


def judge(loaded: blas.Blas, speed: float) -> Finding:
    """The BLAS with its measured speed in GFLOP/s."""
    detail = loaded.path or loaded.note
    found = f"{loaded.name}{f' ({detail})' if detail else ''}: {speed:.0f} GFLOP/s"
    if speed >= SLOW or sys.platform != "linux":
        return Finding("BLAS", found)
    switched_off = os.environ.get(blas.VARIABLE)
    remedy = f"unset {blas.VARIABLE}, which is {switched_off!r}" if switched_off else blas.REMEDY
    return Finding("BLAS", f"{found}, slow: training takes many times longer than it could", remedy)


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    parts = [f"{total:.1f} GB, {os.cpu_count()} processors"]
    device = _device_memory()
    if device is not None:
        parts.append(f"{device / 1e9:.1f} GB for the GPU")
    return Finding("memory", "; ".join(parts))


def _device_memory() -> float | None:
    """Bytes that a GPU may use, where there is one that says so."""
    if "mlx.core" not in sys.modules:
        return None
    import mlx.core as mx

    info: dict[str, Any] = mx.device_info()
    return info.get("max_recommended_working_set_size") or info.get("total_memory")


def _libraries() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} on {platform.platform(terse=True)} {platform.machine()}")
    found, missing = [], []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    yield Finding("libraries", ", ".join(found))
    if missing:
        yield Finding("missing", ", ".join(missing), f"pip install {' '.join(missing)}")


def _extras() -> Iterator[Finding]:
    for extra, module, purpose in EXTRAS:
        missing = util.find_spec(module) is None
        yield Finding(f"extra {extra}", f"{purpose}: " + (f"pip install 'mortice[{extra}]'" if missing else "present"))


def _plugins(plugins: Plugins) -> Iterator[Finding]:
    on = [p.entry.qualified for p in plugins.plugins if p.status == "on"]
    yield Finding("plugins", f"{len(on)} on: {', '.join(on)}")
    for plugin in plugins.failed:
        remedy = f'repair or uninstall {plugin.entry.dist}, or [plugins] disable = ["{plugin.entry.name}"]'
        yield Finding("plugin failed", plugin.failure(), remedy)


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    remedy = "make room: a run keeps checkpoints" if free < ROOM else None
    return Finding("free disk", f"{free / 1e9:.1f} GB in {folder}", remedy)

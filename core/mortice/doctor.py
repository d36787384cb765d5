"""What `mortice doctor` looks at."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from attrs import frozen

from mortice import __version__, blas
from mortice.plugins import load_plugins

SLOW = 20.0
"""GFLOP/s of a CPU below which training on it is no pleasure."""
LIBRARIES = ("mlx", "numpy", "tokenizers", "safetensors", "pluggy", "attrs", "cattrs", "jinja2", "rich", "cyclopts")
EXTRAS = {
    "huggingface_hub": ("models by hub id", "pip install 'mortice[hub]'"),
}


@frozen
class Finding:
    """One line of the report."""

    what: str
    found: str
    remedy: str | None = None


def examine() -> list[Finding]:
    """Everything, in the order in which it matters."""
    return [*_backend(), *_versions(), *_plugins(), *_extras(), *_machine()]


def _backend() -> Iterator[Finding]:
    loaded = blas.load()
    if util.find_spec("mlx") is None:
        yield Finding("backend", "mlx is not installed", "pip install mortice")
        return
    try:
        import mlx.core as mx

        device = mx.default_device()
        mx.eval(mx.ones(2) + 1)
    except (ImportError, RuntimeError) as error:
        yield Finding("backend", f"mlx has no backend here: {error}", "pip install 'mortice[cpu]' (or cuda12, cuda13)")
        return
    if device == mx.cpu:
        speed = blas.measure()
        slow = speed < SLOW
        yield Finding("backend", "CPU")
        where = f" ({loaded.path})" if loaded.path else f" ({loaded.note})" if loaded.note else ""
        yield Finding("BLAS", f"{loaded.name}{where}")
        remedy = blas.REMEDY if slow and sys.platform == "linux" else None
        yield Finding("float32 product", f"{speed:.0f} GFLOP/s{': slow' if slow else ''}", remedy)
        if sys.platform == "linux" and shutil.which("g++") is None:
            yield Finding("g++", "not found; mx.compile runs without it, uncompiled (mortice does not use it)")
    else:
        name = "Metal" if mx.metal.is_available() else "CUDA"
        yield Finding("backend", f"{name}; its kernels have not been measured by mortice's makers")
        yield Finding("float32 product", f"{blas.measure(2048):.0f} GFLOP/s")


def _versions() -> Iterator[Finding]:
    yield Finding("mortice", __version__)
    yield Finding("python", f"{platform.python_version()} on {platform.platform(terse=True)} {platform.machine()}")
    found = [f"{name} {metadata.version(name)}" for name in LIBRARIES if util.find_spec(name.replace("-", "_"))]
    yield Finding("libraries", ", ".join(found))


def _plugins() -> Iterator[Finding]:
    plugins = load_plugins()
    on = [p.entry.qualified for p in plugins.plugins if p.status == "on"]
    yield Finding("plugins", f"{len(on)} on: {', '.join(on)}")
    for plugin in plugins.failed:
        remedy = f"repair or uninstall {plugin.entry.dist}, or disable it in [plugins]"
        yield Finding("plugin failed", plugin.failure(), remedy)


def _extras() -> Iterator[Finding]:
    for module, (purpose, line) in EXTRAS.items():
        found = util.find_spec(module) is not None
        yield Finding(module, f"{'found' if found else 'not installed'}: {purpose}{'' if found else f' ({line})'}")


def _machine() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    yield Finding("free disk here", f"{free:.1f} GB", "make room: checkpoints need it" if free < 1 else None)

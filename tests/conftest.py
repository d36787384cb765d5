"""Fixtures that several test files share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mortice import blas

blas.load()  # before any test imports mlx

import mlx.core as mx  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference values (losses, models, data), beside the repository; tests skip without it."""
    path = Path(os.environ.get("MORTICE_SHARED", ROOT.parent / "shared"))
    if not (path / "losses").is_dir():
        pytest.skip("reference data not found: set MORTICE_SHARED")
    return path


@pytest.fixture
def in_step() -> Iterator[None]:
    """MLX runs no operation ahead of the one that computes: else peaks are higher on a busy machine."""
    before = mx.set_memory_limit(0)
    yield
    mx.set_memory_limit(before)


ALONE = "MORTICE_TEST_ALONE"


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test marked `alone` runs in a process of its own: what others left in memory would be measured with it."""
    if pyfuncitem.get_closest_marker("alone") is None or os.environ.get(ALONE):
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, ALONE: "1"}, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
    return True

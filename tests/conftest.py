"""Fixtures that several test files share."""

from __future__ import annotations

import os
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

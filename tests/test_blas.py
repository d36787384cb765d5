"""BLAS loading, in fresh processes: it depends on what was imported when."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys

import pytest

from mortice import blas

linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS uses Accelerate")


def fresh(code: str, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | env, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def installed() -> bool:
    return any(True for _ in blas._candidates("")) and "reference" not in fresh(
        "from mortice import blas; print(blas.load().name)"
    )


@linux
def test_loading_twice_gives_the_same_and_keeps_mlx_out():
    out = fresh(
        "from mortice import blas; import sys; a = blas.load(); print(a is blas.load(), 'mlx.core' in sys.modules)"
    )
    assert out.split() == ["True", "False"]


@linux
def test_the_environment_can_turn_it_off_or_name_a_library():
    assert "MORTICE_BLAS=none" in fresh("from mortice import blas; print(blas.load())", MORTICE_BLAS="none")
    out = fresh("from mortice import blas; print(blas.load())", MORTICE_BLAS="/no/such/lib.so")
    assert "UserWarning: MORTICE_BLAS=/no/such/lib.so could not be loaded" in out
    assert "reference" in out


@linux
def test_after_mlx_there_is_one_warning_with_the_remedy():
    code = "import mlx.core; from mortice import blas; blas.load(); print(blas.load().note)"
    out = fresh(code)
    assert out.count("mlx was imported before a fast BLAS could be loaded") == 1
    assert "mlx was imported first" in out


@linux
def test_a_fast_blas_is_faster_than_the_reference():
    if not installed():
        pytest.skip("no fast BLAS installed")
    code = "from mortice import blas; blas.load(); print(blas.measure(512))"
    fast, plain = (float(fresh(code, **env).split()[-1]) for env in ({}, {"MORTICE_BLAS": "none"}))
    assert fast > 3 * plain


@linux
def test_a_library_without_sgemm_is_refused():
    libm = ctypes.util.find_library("m")
    out = fresh("from mortice import blas; print(blas.load())", MORTICE_BLAS=libm)
    assert "no cblas_sgemm" in out


@linux
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_library_that_multiplies_wrongly_is_refused_and_stays_out_of_mlx(tmp_path):
    (tmp_path / "wrong.c").write_text("void cblas_sgemm() {}")
    library = tmp_path / "libwrong.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "wrong.c"], check=True)
    code = (
        "from mortice import blas; blas.load(); import mlx.core as mx; print((mx.ones((8, 8)) @ mx.ones((8, 8))).sum())"
    )
    out = fresh(code, MORTICE_BLAS=str(library))
    assert "wrong products on this processor" in out
    assert "array(512, dtype=float32)" in out


def test_the_api_loads_it_before_mlx():
    code = "import mortice; mortice.load; import mlx.core; from mortice import blas; print(blas._loaded)"
    assert "mlx was imported first" not in fresh(code)

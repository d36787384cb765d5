"""What `mortice doctor` finds, and when it asks for a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mortice import blas, doctor
from mortice.plugins import load_plugins


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "mortice", "doctor", *arguments], capture_output=True, text=True, env=os.environ | env
    )


def found(findings: list[doctor.Finding], what: str) -> doctor.Finding:
    return next(f for f in findings if f.what == what)


class Broken:
    """An entry point whose module cannot be imported."""

    name, value = "broken", "broken_module"

    class dist:
        name, version = "mortice-broken", "1.0"

    def load(self):
        raise ImportError("no module named 'gone'")


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(blas, "measure", lambda *_: 150.0)


def test_a_sound_machine_needs_no_remedy(measured, tmp_path):
    findings = doctor.examine(load_plugins(entry_points=[]), tmp_path)
    assert [f.what for f in findings if f.remedy and f.what != "free disk"] == []
    assert found(findings, "backend").found.startswith(("CPU: ", "Metal: ", "CUDA: "))
    assert "mlx " in found(findings, "libraries").found
    assert " GB, " in found(findings, "memory").found
    assert str(tmp_path) in found(findings, "free disk").found


def test_a_broken_plugin_is_named_with_its_distribution(measured):
    findings = doctor.examine(load_plugins(entry_points=[Broken()]))
    failed = found(findings, "plugin failed")
    assert "'broken' of mortice-broken 1.0" in failed.found
    assert "no module named 'gone'" in failed.found
    assert failed.remedy == 'repair or uninstall mortice-broken, or [plugins] disable = ["broken"]'


@pytest.mark.skipif(sys.platform != "linux", reason="macOS uses Accelerate")
def test_a_slow_blas_has_a_remedy_and_a_fast_one_none(monkeypatch):
    monkeypatch.delenv(blas.VARIABLE, raising=False)
    slow = doctor.judge(blas.Blas("reference", note="none is installed"), 8.2)
    assert slow.found.startswith("reference (none is installed): 8 GFLOP/s, slow")
    assert slow.remedy == blas.REMEDY
    fast = doctor.judge(blas.Blas("mkl", "/lib/libmkl_rt.so"), 150.4)
    assert fast == doctor.Finding("BLAS", "mkl (/lib/libmkl_rt.so): 150 GFLOP/s")


def test_little_room_on_the_disk_has_a_remedy(measured, monkeypatch, tmp_path):
    usage = type("usage", (), {"free": 1e9})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    assert found(doctor.examine(load_plugins(entry_points=[]), tmp_path), "free disk").remedy


@pytest.mark.skipif(sys.platform != "linux", reason="macOS uses Accelerate")
def test_the_command_ends_with_1_where_a_remedy_is_shown():
    done = command("--json", MORTICE_BLAS="none")
    findings = {f["what"]: f for f in json.loads(done.stdout)}
    assert done.returncode == 1, done.stderr
    assert findings["BLAS"]["remedy"] == "unset MORTICE_BLAS, which is 'none'"
    shown = command(MORTICE_BLAS="none").stdout
    assert "remedy: unset MORTICE_BLAS" in shown

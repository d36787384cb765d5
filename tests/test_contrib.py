"""A distribution of its own: found, named with its provider, trained with, and gone without a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT

SIMPO = ROOT / "contrib" / "mortice-simpo"


@pytest.fixture
def installed(tmp_path):
    """What pip leaves of mortice-simpo: its metadata on the path, beside its module."""
    project = tomllib.loads((SIMPO / "pyproject.toml").read_text())["project"]
    info = tmp_path / "mortice_simpo-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["mortice"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[mortice]", *lines, ""]))
    return os.pathsep.join([str(tmp_path), str(SIMPO)])


def run(command: list[str], path: str = "") -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


LISTED = """
import json
from mortice.plugins import load_plugins
plugins = load_plugins()
print(json.dumps([[(s.name, s.provider) for s in plugins.registry.all("loss")], [p.failure() for p in plugins.failed]]))
"""


def test_found_with_its_provider_and_gone_again(installed):
    strategies, failed = json.loads(run(["-c", LISTED], installed))
    assert ["plain-simpo", "mortice-simpo"] in strategies
    assert ["orpo", "mortice"] in strategies
    assert failed == []
    without, failed = json.loads(run(["-c", LISTED]))
    assert without == [s for s in strategies if s[0] != "plain-simpo"]
    assert failed == []


def test_trains_like_a_built_in(monkeypatch):
    """A small step along its gradient takes off what the gradient says: head and backward need not know it."""
    from toy_model import toy

    from mortice.batch import Completion, Group
    from mortice.objective import WeightedLoss
    from mortice.step import Engine, global_norm
    from mortice_plugins.backwards.segmented import Segmented
    from mortice_plugins.heads.flash_cce import FlashCCE
    from mortice_plugins.layouts.prefix_shared import PrefixShared

    monkeypatch.syspath_prepend(str(SIMPO))
    from mortice_simpo import SimPO

    model = toy()
    groups = [Group("a", [1, 2, 3], [Completion([5, 6]), Completion([8])], ((0, 1),))]
    engine = Engine(model, FlashCCE(), Segmented(), PrefixShared(), (WeightedLoss("plain-simpo", SimPO()),))
    params = {name: value for name, value in model.named_parameters().items() if "embed" not in name}
    model.mark_trainable(params)
    before, gradients = engine.gradients(params, groups)
    step = 1e-4
    after = engine.evaluate({name: value - step * gradients[name] for name, value in params.items()}, groups)
    assert before.loss - after.loss == pytest.approx(step * global_norm(gradients).item() ** 2, rel=0.05)


def test_the_guide_shows_the_module_as_it_is():
    guide = (ROOT / "docs" / "writing-a-loss.md").read_text()
    shown = guide.partition("```python\n")[2].partition("```")[0]
    assert shown.strip() in (SIMPO / "mortice_simpo.py").read_text()


def test_its_own_tests_pass():
    run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(SIMPO / "pyproject.toml"), str(SIMPO)], str(SIMPO))

"""A distribution of its own: found, named with its provider, trained with, and gone without a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT
from tiny_run import RUN_FILE, tiny_run

CONTRIB = ROOT / "contrib"
SIMPO, MLX_LM = CONTRIB / "mortice-simpo", CONTRIB / "mortice-mlx-lm"


def install(folder, tmp_path) -> str:
    """What pip leaves of a distribution: its metadata on the path, beside its module."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["mortice"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[mortice]", *lines, ""]))
    return os.pathsep.join([str(tmp_path), str(folder)])


@pytest.fixture
def installed(tmp_path):
    return install(SIMPO, tmp_path)


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


@pytest.mark.parametrize("folder", [SIMPO, MLX_LM], ids=lambda folder: folder.name)
def test_its_own_tests_pass(folder):
    if folder == MLX_LM:
        pytest.importorskip("mlx_lm")
    path = os.pathsep.join([str(folder), str(folder / "tests")])
    run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(folder / "pyproject.toml"), str(folder)], path)


def test_every_folder_is_tested_and_listed():
    folders = {entry for entry in CONTRIB.iterdir() if (entry / "pyproject.toml").exists()}
    assert folders == {SIMPO, MLX_LM}
    listed = (CONTRIB / "README.md").read_text()
    assert all(f"[{folder.name}]({folder.name})" in listed for folder in folders)


def test_a_family_of_mlx_lm_from_the_command_line(tmp_path):
    """Trained, generated with, planned for; without the distribution nobody knows it."""
    pytest.importorskip("mlx_lm")
    path = install(MLX_LM, tmp_path / "site")
    file = tiny_run(tmp_path / "run", RUN_FILE)
    model = tmp_path / "run" / "model"
    config = json.loads((model / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"]
    ernie = {"model_type": "ernie4_5", "use_bias": False, "head_dim": width}  # of a Llama's weights, turned otherwise
    (model / "config.json").write_text(json.dumps(config | ernie))
    for layout in ("separate", "prefix-shared"):
        run(["-m", "mortice", "train", str(file), "--layout", layout], path)
    adapter = sorted((tmp_path / "run" / "runs").iterdir())[-1] / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["fine_tune_type"] == "lora"
    assert "peak" in run(["-m", "mortice", "plan", str(file)], path)
    answer = ["-m", "mortice", "generate", str(model), "say red: ", "--raw", "--max-tokens", "4", "--temperature", "2"]
    assert run(answer, path) != run([*answer, "--adapter", str(adapter)], path)
    done = subprocess.run([sys.executable, "-m", "mortice", "check", str(file)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no model adapter handles model_type 'ernie4_5'" in done.stderr

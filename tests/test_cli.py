"""The command line: what is shown, exit codes, and messages without tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import mortice
from mortice.cli import COMMANDS, main
from mortice.errors import MorticeError

RUN = '[model]\npath = "org/name"\n[data]\nformat = "preference"\n[loss]\nname = "orpo"\n'


@pytest.fixture
def call(capsys):
    """Run a command in this process: exit code, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return call


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "mortice", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)


def test_help_lists_every_command_with_its_line(call):
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    for name, (_, line) in COMMANDS.items():
        assert name in out and line.split(",")[0] in " ".join(out.replace("│", " ").split()), name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_own_help(call, name):
    code, out, err = call(name, "--help")
    assert (code, err) == (0, "")
    assert f"mortice {name}" in out


def test_version(call):
    assert call("--version") == (0, f"{mortice.__version__}\n", "")


def test_unknown_command_gives_the_nearest(call):
    code, out, err = call("trian")
    assert (code, out) == (2, "")
    assert "unknown command 'trian'; did you mean 'train'?" in err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train"], ["file"]),
        (["train", "run.toml", "--los", "sft"], ["--los"]),
        (["list", "los"], ["unknown kind 'los'; did you mean 'loss'?"]),
        (["describe", "loss", "orpp"], ["unknown loss 'orpp'; did you mean 'orpo'?"]),
        (["describe", "losses", "orpo"], ["unknown kind 'losses'; did you mean 'loss'?"]),
        (["check", "no-such.toml"], ["no-such.toml", "cannot read the run file"]),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(call, arguments, parts):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    for part in parts:
        assert part.lower() in err.lower()


def test_case_b60_a_mistake_in_a_process_is_one_message_with_exit_code_2(run_file):
    run_file.write_text(RUN + "bta = 1\n")
    done = shell("train", str(run_file))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "mortice: run.toml:7: loss.bta: unknown key; did you mean 'beta'? "
        "(allowed here: beta, label_smoothing, lambda_schedule, max_loss, sft_scope, variant, weight)\n"
    )


def test_debug_adds_the_traceback(run_file):
    run_file.write_text(RUN + "bta = 1\n")
    for done in (shell("check", str(run_file), "--debug"), shell("check", str(run_file), MORTICE_DEBUG="1")):
        assert done.returncode == 2
        assert "Traceback" in done.stderr and "loss.bta" in done.stderr


def test_list_shows_strategies_with_their_provider(call):
    code, out, _ = call("list")
    assert code == 0
    for line in ("loss orpo mortice", "head flash-cce mortice", "layout separate * mortice"):
        assert any(" ".join(row.split()).startswith(line) for row in out.splitlines()), line


def test_list_as_json_of_one_kind(call):
    code, out, _ = call("list", "layout", "--json")
    rows = {r["name"]: r for r in json.loads(out) if r["provider"] == "mortice"}
    assert code == 0 and {"separate", "prefix-shared"} <= set(rows)
    assert rows["separate"]["default"] is True and rows["prefix-shared"]["plugin"] == "prefix-shared"


def test_describe_shows_docstring_options_defaults_and_profile(call):
    code, out, _ = call("describe", "loss", "orpo")
    assert code == 0
    for part in ("from mortice", "log_odds", "beta", "0.1", "weight of the odds-ratio term", "adapter.rank = 16"):
        assert part in out


def test_describe_as_json(call):
    code, out, _ = call("describe", "loss", "orpo", "--json")
    found = json.loads(out)
    assert code == 0 and found["profile"]["optimizer.learning_rate"] == 1e-5
    assert {"name": "beta", "type": "a finite number", "default": "0.1"}.items() <= found["options"][0].items()


def test_plugins_show_distribution_version_and_status(call):
    code, out, _ = call("plugins", "--json")
    rows = {r["name"]: r for r in json.loads(out)}
    assert code == 0
    assert (rows["orpo"]["dist"], rows["orpo"]["version"], rows["orpo"]["status"]) == ("mortice", "0.1.0", "on")
    assert rows["orpo"]["hooks"] == ["register_losses"] and rows["orpo"]["strategies"] == ["loss orpo"]


@pytest.fixture
def broken_plugin(monkeypatch):
    """One more installed plugin, which cannot be imported."""
    from mortice import plugins

    def load():
        raise ImportError("No module named 'gizmo'")

    dist = SimpleNamespace(name="elsewhere", version="2.1")
    extra = SimpleNamespace(name="gizmo", value="gizmo", dist=dist, load=load)
    points = [*(e.point for e in plugins.installed()), extra]
    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: points)


def test_case_b58_a_broken_plugin_is_shown_and_only_strict_fails(call, broken_plugin):
    code, out, err = call("plugins")
    assert code == 0 and "failed" in out
    assert "plugin 'gizmo' of elsewhere 2.1 failed to load: ImportError: No module named 'gizmo'" in err
    assert call("plugins", "--strict")[0] == 2
    failed = next(r for r in json.loads(call("plugins", "--json")[1]) if r["name"] == "gizmo")
    assert failed["status"] == "failed" and "gizmo" in failed["error"]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["list"], ["describe", "loss", "orpo"]])
def test_case_b58_a_broken_plugin_stops_no_command_that_does_not_need_it(call, broken_plugin, arguments):
    code, out, err = call(*arguments)
    assert code == 0 and out and "Traceback" not in err


@pytest.fixture
def launched(monkeypatch):
    """What `mortice.launch.train` was called with; it trains nothing and ends as `outcome` says."""
    from mortice import launch

    seen = SimpleNamespace(config=None, signal=None)

    def train(config, notices=None):
        seen.config = config
        return SimpleNamespace(
            path=config.run_path, steps=3, tokens=120, seconds=1.5, signal=seen.signal, before={}, after={},
            checkpoint=None, metrics={},
        )  # fmt: skip

    monkeypatch.setattr(launch, "train", train)
    return seen


def test_train_hands_flags_over(call, run_file, launched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [
        "--set",
        "train.seed=4",
        "--set",
        "loss.scope=full",
        "--loss",
        "sft",
        "--head",
        "flash-cce",
        "--run",
        "here",
    ]
    code, out, _ = call("train", str(run_file), *flags)
    assert code == 0
    config = launched.config
    assert (config.train.seed, config.losses[0][1].scope) == (4, "full")
    assert (config.loss_names, type(config.head).__name__) == (["sft"], "FlashCCE")
    assert config.run_path == tmp_path / "here"
    assert str(tmp_path / "here" / "adapter") in out
    assert any("--loss sft takes the place of loss 'orpo'" in notice for notice in config.notices)


@pytest.mark.parametrize("kind", ["loss", "head", "backward", "layout", "adapter", "source", "optimizer", "schedule"])
def test_every_kind_has_a_flag(call, run_file, launched, kind):
    code, _, err = call("train", str(run_file), f"--{kind}", "no-such-strategy")
    assert code == 2 and f"unknown {kind} 'no-such-strategy'" in err


@pytest.mark.parametrize(("signal", "code"), [(2, 130), (15, 143)])
def test_exit_codes_of_signals(call, run_file, launched, signal, code):
    launched.signal = signal
    assert call("train", str(run_file))[0] == code


def test_a_mistake_found_while_training_is_shown_like_others(call, run_file, monkeypatch):
    from mortice import launch

    def train(config, notices=None):
        raise MorticeError("nothing would train")

    monkeypatch.setattr(launch, "train", train)
    assert call("train", str(run_file)) == (2, "", "mortice: nothing would train\n")


def test_check_refuses_a_run_whose_loss_lacks_something(call, run_file):
    run_file.write_text(RUN.replace('"preference"', '"chat"'))
    code, out, err = call("check", str(run_file))
    assert (code, out) == (2, "")
    assert "loss 'orpo' needs pairs" in err


@pytest.fixture
def real_run(shared, tmp_path):
    """A run file for the tiny Llama of the reference data, with four pairs."""
    pairs = [{"prompt": "2 + 2?", "chosen": "It is 4.", "rejected": f"It is {n}."} for n in (5, 6, 7, 8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    path = tmp_path / "run.toml"
    path.write_text(
        f'[model]\npath = "{shared / "losses" / "base"}"\n[data]\nformat = "preference"\ntrain = "pairs.jsonl"\n'
        '[loss]\nname = "orpo"\n[adapter]\nrank = 2\n[train]\nbatch_size = 2\n'
    )
    return path


def test_check_says_what_a_run_would_do(call, real_run):
    code, out, _ = call("check", str(real_run), "--json")
    found = json.loads(out)
    assert (code, found["steps"], found["run"]) == (0, 2, str(real_run.parent / "runs" / "run"))
    assert 0 < found["trainable"] < found["parameters"]
    assert found["strategies"]["loss"] == ["mortice:orpo"]
    assert not (real_run.parent / "runs").exists()
    code, out, _ = call("check", str(real_run))
    assert code == 0 and "mortice:orpo" in out


def test_train_from_end_to_end(call, real_run):
    code, _, err = call("train", str(real_run), "--set", "train.steps=1")
    run = real_run.parent / "runs" / "run"
    assert code == 0, err
    assert (run / "adapter" / "adapters.safetensors").is_file()
    assert "steps = 1 # --set" in (run / "run.toml").read_text()
    assert call("train", str(run / "run.toml"), "--run", str(run.parent / "again"))[0] == 0
    first, again = ((r / "metrics.jsonl").read_text().splitlines()[-1] for r in (run, run.parent / "again"))
    assert json.loads(first)["loss"] == json.loads(again)["loss"]


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m mortice list | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("kind") and "Traceback" not in done.stderr

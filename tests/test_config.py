"""The run file: precedence, strictness, messages, and the effective configuration."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Literal

import pytest
from attrs import field, frozen

from mortice.config import check_requirements, config_from_dict, load_config
from mortice.errors import ConfigError, PluginError, PluginImportFailed
from mortice.hookspecs import hookimpl
from mortice.options import ge, option
from mortice.plugins import installed
from mortice.runfile import key_lines


@frozen
class Inner:
    low: float = 0.0


@frozen
class Other:
    """A loss with options of every type that a run file can hold."""

    mode: Literal["fast", "slow"] = "fast"
    inner: Inner = Inner()
    weights: dict[str, float] = field(factory=dict)
    sizes: tuple[int, ...] = ()
    words: Path | None = None

    def __call__(self, scores, batch):
        raise AssertionError("never called here")


MODEL = '[model]\npath = "org/name"\n'
DATA = '[data]\nformat = "preference"\n'
LOSS = '[loss]\nname = "orpo"\n'
BASE = MODEL + DATA + LOSS


@pytest.fixture
def load(tmp_path):
    """Write a run file and load it."""

    def load(text: str | bytes, name: str = "run.toml", **kwargs):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_config(path, **kwargs)

    return load


@pytest.fixture
def refused(load):
    """The message with which a run file is refused, without the folder in it."""

    def refused(text: str | bytes, kind: type[Exception] = ConfigError, **kwargs) -> str:
        with pytest.raises(kind) as caught:
            load(text, **kwargs)
        return str(caught.value)

    return refused


def line_of(text: str, key: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), start=1) if line.startswith(key))


def point(module: types.ModuleType, dist: str = "elsewhere", name: str = "extra"):
    """A fake entry point that gives `module`."""
    return types.SimpleNamespace(
        name=name, value=f"{dist}.{name}", dist=types.SimpleNamespace(name=dist, version="1.0"), load=lambda: module
    )


def plugin(**hooks) -> types.ModuleType:
    module = types.ModuleType("extra")
    for name, function in hooks.items():
        setattr(module, name, hookimpl(function))
    return module


def with_builtins(*points):
    return [*(entry.point for entry in installed()), *points]


# Defaults and profile


def test_defaults_of_a_small_file(load):
    config = load(BASE)
    assert config.loss_names == ["orpo"] and [weight for weight, _ in config.losses] == [1.0]
    assert (config.train.batch_size, config.train.clip_norm, config.train.keep) == (8, 1.0, 2)
    assert type(config.head).__name__ == "Dense" and type(config.adapter).__name__ == "LoRA"
    assert config.rollout is None and config.rewards == [] and config.controllers == []
    assert {type(t).__name__ for t in config.trackers} == {"Progress", "JSONLines"}


def test_profile_of_the_loss_is_below_the_file_and_above_defaults(load):
    config = load(BASE + "[optimizer]\nlearning_rate = 3e-4\n")
    assert config.optimizer.learning_rate == 3e-4  # file
    assert (config.adapter.rank, config.adapter.scale) == (16, 2.0)  # profile
    assert config.schedule.warmup == 0.03
    assert config.origins["adapter", "rank"] == "profile of orpo"
    assert config.origins["optimizer", "learning_rate"] == "run.toml:8"


def test_profile_leaves_out_what_the_chosen_strategy_lacks(load):
    config = load(BASE + '[adapter]\nname = "full"\n')
    assert not hasattr(config.adapter, "rank")


def test_profile_yields_to_a_key_that_says_the_same_otherwise(load):
    config = load(BASE + "[adapter]\nalpha = 64\n")
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.scale) == (16, 64.0, None)
    assert config.adapter.factor == 4.0
    assert load(config.effective_toml(), name="again.toml").adapter == config.adapter


def test_a_loss_is_required_and_the_available_ones_are_listed(refused):
    message = refused(MODEL + DATA)
    assert "loss: required" in message and "orpo" in message and "sft" in message


def test_several_losses_have_weights(load):
    text = MODEL + DATA + '[[loss]]\nname = "orpo"\nweight = 0.5\n[[loss]]\nname = "sft"\n'
    config = load(text)
    assert config.loss_names == ["orpo", "sft"]
    assert [weight for weight, _ in config.losses] == [0.5, 1.0]


def test_steps_and_epochs_exclude_each_other(refused):
    assert "steps and epochs" in refused(BASE + "[train]\nsteps = 3\nepochs = 1\n")


# B54: strict values


@pytest.mark.parametrize(("written", "value"), [("1e-5", 1e-5), ("1E-5", 1e-5), ("1", 1.0)])
def test_case_b54_numbers_as_toml_has_them(load, written, value):
    rate = load(BASE + f"[optimizer]\nlearning_rate = {written}\n").optimizer.learning_rate
    assert rate == value and isinstance(rate, float)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('learning_rate = "1e-5"', ["optimizer.learning_rate", "a finite number", "'1e-5'", "drop the quotes"]),
        ("learning_rate = true", ["optimizer.learning_rate", "a finite number", "found true"]),
        ("learning_rate = nan", ["optimizer.learning_rate", "a finite number", "nan"]),
        ("learning_rate = inf", ["optimizer.learning_rate", "a finite number", "inf"]),
        ("learning_rate = -1", ["optimizer.learning_rate", "-1"]),
        ("learning_rate = [1e-5]", ["optimizer.learning_rate", "a finite number", "list"]),
    ],
)
def test_case_b54_wrong_numbers_are_refused_with_key_value_and_wanted_type(refused, line, parts):
    text = BASE + f"[optimizer]\n{line}\n"
    message = refused(text)
    assert message.startswith(f"run.toml:{line_of(text, 'learning_rate')}: ")
    for part in parts:
        assert part in message


def test_case_b54_a_float_is_no_whole_number(refused):
    message = refused(BASE + "[train]\nbatch_size = 2.0\n")
    assert "run.toml:8: train.batch_size: expected a whole number, found 2.0" in message


def test_case_b54_a_number_is_no_boolean_and_a_boolean_no_number(refused):
    assert "expected true or false, found 1" in refused(BASE + "[plugins]\nstrict = 1\n")
    assert "expected a whole number, found true" in refused(BASE + "[train]\nseed = true\n")


@pytest.mark.parametrize("line", ["learning_rate = .5", "learning_rate = 1e-5\nlearning_rate = 1e-4"])
def test_case_b54_parse_errors_name_file_and_line(refused, tmp_path, line):
    message = refused(BASE + f"[optimizer]\n{line}\n")
    number = 8 + line.count("\n")
    assert f"{tmp_path / 'run.toml'}:{number}" in message


def test_case_b54_bom_is_stripped_with_a_notice_and_crlf_is_fine(load):
    text = (BASE + "[train]\nseed = 3\n").replace("\n", "\r\n").encode()
    config = load(b"\xef\xbb\xbf" + text)
    assert config.train.seed == 3
    assert any("byte order mark" in notice for notice in config.notices)


def test_not_utf8_is_named_with_its_line(refused):
    assert "run.toml:8: not UTF-8" in refused((BASE + "# ").encode() + b"\n" + b"# \xff\n")


def test_a_validator_says_what_is_allowed(refused):
    assert "data.max_length: must be >= 2: 1" in refused(MODEL + DATA + "max_length = 1\n" + LOSS)
    message = refused(BASE + '[train]\nbest_mode = "low"\n')
    assert "train.best_mode: must be in ('min', 'max')" in message and "'low'" in message


# B55: precedence


def test_case_b55_file_wins_over_defaults_also_with_falsy_values(load):
    text = BASE + "beta = 0.0\n[train]\nclip_norm = 0.0\nkeep = 0\nseed = 0\n[plugins]\nstrict = false\ndisable = []\n"
    config = load(text)
    ((_, loss),) = config.losses
    assert (loss.beta, config.train.clip_norm, config.train.keep, config.train.seed) == (0.0, 0.0, 0, 0)
    for key in (
        ("loss", "beta"),
        ("train", "clip_norm"),
        ("train", "seed"),
        ("plugins", "strict"),
        ("plugins", "disable"),
    ):
        assert config.origins[key].startswith("run.toml:")


def test_case_b55_zero_in_the_file_wins_over_the_profile(load):
    config = load(BASE + "[schedule]\nwarmup = 0.0\n")
    assert config.schedule.warmup == 0.0


@pytest.mark.parametrize(
    ("setting", "read", "value"),
    [
        ("train.seed=7", lambda c: c.train.seed, 7),
        ("train.seed=0", lambda c: c.train.seed, 0),
        ("loss.beta=0.0", lambda c: c.losses[0][1].beta, 0.0),
        ("data.truncation=keep-start", lambda c: c.data.truncation, "keep-start"),
        ("plugins.disable=[]", lambda c: c.file.tables["plugins"]["disable"], []),
        ("plugins.strict=false", lambda c: c.file.tables["plugins"]["strict"], False),
    ],
)
def test_case_b55_a_flag_wins_over_the_file(load, setting, read, value):
    config = load(
        BASE + "beta = 0.5\n[train]\nseed = 5\n[plugins]\nstrict = true\ndisable = ['text']\n", settings=[setting]
    )
    assert read(config) == value
    assert config.origins[tuple(setting.split("=")[0].split("."))] == "--set"


def test_case_b55_effective_configuration_reproduces_the_run(load, tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    text = (
        MODEL
        + DATA
        + 'train = "rows.jsonl"\n'
        + LOSS
        + "beta = 0.0\n[train]\nkeep = 0\n[context]\nattention_chunk = 64\n"
    )
    first = load(text, settings=["train.seed=9"])
    written = first.effective_toml()
    other = tmp_path / "elsewhere" / "again.toml"
    other.parent.mkdir()
    other.write_text(written)
    again = load_config(other)
    for name in ("model", "data", "train", "context", "reference", "chosen"):
        assert getattr(again, name) == getattr(first, name)
    assert without_comments(again.effective_toml()) == without_comments(written)
    assert "seed = 9 # --set" in written
    assert "beta = 0.0 # run.toml:8" in written
    assert "rank = 16 # profile of orpo" in written
    assert "batch_size = 8 # default" in written
    assert f'train = "{tmp_path / "rows.jsonl"}"' in written


def without_comments(text: str) -> list[str]:
    return [line.split(" # ")[0] for line in text.splitlines() if not line.startswith("#")]


def test_effective_configuration_of_several_losses_and_trackers(load):
    text = MODEL + DATA + '[[loss]]\nname = "orpo"\nweight = 0.5\n[[loss]]\nname = "sft"\n[[tracker]]\nname = "jsonl"\n'
    first = load(text)
    again = load(first.effective_toml(), name="again/run.toml")
    assert again.chosen == first.chosen and len(again.trackers) == 1


def test_loss_flag_drops_the_other_loss_options_and_says_so(load):
    config = load(BASE + "beta = 0.5\n", strategies={"loss": "sft"})
    assert config.loss_names == ["sft"]
    (notice,) = config.notices
    assert "--loss sft" in notice and "'orpo'" in notice and "beta" in notice
    assert ("adapter", "rank") not in config.origins  # the profile went with the loss


def test_loss_flag_with_the_loss_of_the_file_keeps_its_options(load):
    config = load(BASE + "beta = 0.5\n", strategies={"loss": "orpo"})
    assert config.losses[0][1].beta == 0.5 and config.notices == []


def test_loss_flag_enables_its_plugin(load):
    text = BASE + '[plugins]\nenable = ["orpo", "preference"]\n'
    config = load(text, strategies={"loss": "sft"})
    assert config.loss_names == ["sft"]
    again = load(config.effective_toml(), name="again.toml")
    assert again.loss_names == ["sft"]


def test_head_flag_swaps_one_strategy(load):
    assert type(load(BASE, strategies={"head": "flash-cce"}).head).__name__ == "FlashCCE"


# B56: keys that mean nothing


def test_case_b56_all_wrong_keys_at_once_with_line_path_and_nearest_name(refused):
    text = (
        "learning_rte = 1e-5\n" + BASE + "bta = 0.1\n[adapter]\nalpah = 8\n"
        "[optimizer]\nbatch_size = 4\n[lora]\nrank = 4\n[train]\ngamma = 1\n"
    )
    lines = refused(text).splitlines()
    by_key = {line.split(": ")[1]: line for line in lines}
    assert set(by_key) == {"learning_rte", "loss.bta", "adapter.alpah", "optimizer.batch_size", "lora", "train.gamma"}
    assert (
        by_key["learning_rte"].startswith("run.toml:1: ")
        and "did you mean learning_rate, in the table [optimizer]?" in by_key["learning_rte"]
    )
    assert by_key["loss.bta"].startswith(f"run.toml:{line_of(text, 'bta')}: ") and "'beta'" in by_key["loss.bta"]
    assert "'alpha'" in by_key["adapter.alpah"]
    assert "[train] has it" in by_key["optimizer.batch_size"]
    assert "unknown table" in by_key["lora"] and "tables: " in by_key["lora"]


def test_case_b56_a_key_of_another_loss_says_which_has_it(refused):
    message = refused(MODEL + DATA + '[loss]\nname = "sft"\nsft_scope = "full"\n')
    assert "run.toml:7: loss.sft_scope: unknown key; loss 'orpo' has it" in message


def test_case_b56_a_key_in_the_wrong_table_of_a_strategy_that_is_not_chosen(refused):
    message = refused(BASE + "[train]\nsegment_size = 2\n")
    assert "train.segment_size: unknown key; backward 'checkpoint' and backward 'segmented' have it" in message


def test_a_list_outside_any_table_is_a_key(refused):
    assert "run.toml:1: betas: unknown key outside any table; did you mean betas, in the table [optimizer]?" in refused(
        "betas = [0.9, 0.99]\n" + BASE
    )


def test_case_b56_a_table_of_a_plugin_that_is_not_installed(refused):
    message = refused(MODEL + DATA + '[loss]\nname = "orppo"\nlambda = 2\n')
    assert "run.toml:6: loss.name: unknown loss 'orppo'; did you mean 'orpo'?" in message


def test_case_b56_options_of_a_plugin_are_checked_by_its_class(refused):
    @frozen
    class Hinge:
        gamma: float = option(1.0, help="margin", validator=ge(0.0))

        def __call__(self, scores, batch):
            raise AssertionError

    points = with_builtins(point(plugin(register_losses=lambda register: register("hinge", Hinge))))
    message = refused(MODEL + DATA + '[loss]\nname = "hinge"\ngama = 2\n', entry_points=points)
    assert "loss.gama: unknown key; did you mean 'gamma'?" in message
    message = refused(MODEL + DATA + '[loss]\nname = "hinge"\ngamma = -2\n', entry_points=points)
    assert "loss.gamma: must be >= 0.0" in message


def test_case_b56_settings_are_checked_like_the_file(refused):
    message = refused(BASE, settings=["train.sed=1"])
    assert "--set: train.sed: unknown key; did you mean 'seed'?" in message
    assert "expected table.key=value" in refused(BASE, settings=["seed=1"])
    assert "expected table.key=value" in refused(BASE, settings=["train.seed"])


def test_keys_in_lists_of_tables_carry_their_line_and_place(refused):
    text = MODEL + DATA + '[[loss]]\nname = "orpo"\n[[loss]]\nname = "sft"\nscop = "full"\n'
    assert f"run.toml:{line_of(text, 'scop')}: loss.1.scop: unknown key; did you mean 'scope'?" in refused(text)


def test_lines_of_everything_that_toml_allows():
    text = (
        'a.b."c d" = 1 # [x]\n[ t . u ] # c\nk = """\n[no]\nz = 1\n\\""" still\n"""\n'
        "l = [ # c ]\n [1, 2], \"]\", ']',\n]\ni = { x = 1 }\n[[w]]\na = 1\n[[w]]\n[w.sub]\nb = 3\n[[w.n]]\nc = 1\n"
    )
    assert key_lines(text) == {
        ("a", "b", "c d"): 1, ("t", "u"): 2, ("t", "u", "k"): 3, ("t", "u", "l"): 8, ("t", "u", "i"): 11,
        ("t", "u", "i", "x"): 11, ("w", "0"): 12, ("w", "0", "a"): 13, ("w", "1"): 14, ("w", "1", "sub"): 15,
        ("w", "1", "sub", "b"): 16, ("w", "1", "n", "0"): 17, ("w", "1", "n", "0", "c"): 18,
    }  # fmt: skip


def test_a_setting_reaches_into_a_list_of_tables(load):
    text = MODEL + DATA + '[[loss]]\nname = "orpo"\n[[loss]]\nname = "sft"\n'
    assert load(text, settings=["loss.0.beta=0.25"]).losses[0][1].beta == 0.25


def test_a_table_where_a_value_should_be_and_a_value_where_a_table_should_be(refused):
    assert "found a table" in refused(BASE + "[train.seed]\nx = 1\n")
    assert "train: expected a table [train], found 3" in refused("train = 3\n" + BASE)
    assert "head: expected a table [head]" in refused(BASE + '[[head]]\nname = "dense"\n')


def test_lines_behind_multi_line_strings_arrays_and_inline_tables(refused):
    text = (
        'plugins = { enable = [\n  "orpo", # not a ] here\n  "preference",\n] }\n'
        '[model]\npath = """\norg/[name] = x\n"""\n' + DATA + LOSS + "[train]\nsed = 1\n"
    )
    assert f"run.toml:{line_of(text, 'sed')}: train.sed" in refused(text)


def test_dotted_keys_have_lines(refused):
    text = "train.sed = 1\n" + BASE
    assert "run.toml:1: train.sed: unknown key" in refused(text)


def test_an_escaped_quote_does_not_end_a_string(refused):
    text = '[data]\nformat = "preference"\n[model]\npath = "a\\"["\n' + LOSS + "[train]\nsed = 1\n"
    assert f"run.toml:{line_of(text, 'sed')}: train.sed" in refused(text)


def test_an_empty_list_of_trackers_means_none_also_when_it_is_read_back(load):
    config = load("tracker = []\n" + BASE)
    assert config.trackers == []
    assert load(config.effective_toml(), name="again.toml").trackers == []


def test_keys_of_an_unknown_format_are_not_judged(refused):
    message = refused(MODEL + '[data]\nformat = "preferense"\ntemplate = "none"\n' + LOSS)
    assert "did you mean 'preference'" in message and "template" not in message
    message = refused(MODEL + '[data]\nformt = "preference"\n' + LOSS)
    assert "data.formt: unknown key; did you mean 'format'?" in message and "data.format: is required" in message


def test_options_of_a_format_stand_among_those_of_the_data(load, refused):
    config = load(MODEL + DATA + 'system = "drop"\n' + LOSS)
    assert config.format.system == "drop" and "system" in config.effective_toml()
    assert "data.sistem: unknown key; did you mean 'system'?" in refused(MODEL + DATA + 'sistem = "drop"\n' + LOSS)


def test_types_that_a_strategy_of_others_may_use(load, refused):
    points = with_builtins(point(plugin(register_losses=lambda register: register("other", Other))))
    text = MODEL + DATA + '[loss]\nname = "other"\n'
    good = 'mode = "slow"\ninner = { low = 1 }\nweights = { a = 2 }\nsizes = [1, 2]\n'
    ((_, loss),) = load(text + good, entry_points=points).losses
    assert (loss.mode, loss.inner, loss.weights, loss.sizes) == ("slow", Inner(1.0), {"a": 2.0}, (1, 2))
    message = refused(
        text + 'mode = "sloe"\ninner = { lo = 1 }\nweights = { a = "2" }\nsizes = [1.5]\n', entry_points=points
    )
    assert 'run.toml:7: loss.mode: expected "fast" or "slow", found the string \'sloe\'' in message
    assert "run.toml:8: loss.inner: lo: unknown key; did you mean 'low'?" in message
    assert "run.toml:9: loss.weights: expected a finite number" in message
    assert "run.toml:10: loss.sizes: expected a whole number, found 1.5" in message


def test_weights_of_losses_are_numbers(refused):
    assert "loss.weight" in refused(BASE + 'weight = "2"\n')
    assert "loss.weight" in refused(BASE + "weight = nan\n")
    assert "loss.weight" in refused(BASE + "weight = true\n")


def test_broken_plugin_that_a_run_needs_shows_its_cause(refused, load):
    def fail():
        raise ImportError("no module named gizmo")

    broken = point(plugin())
    broken.load, broken.name = fail, "gizmo"
    points = with_builtins(broken)
    assert load(BASE, entry_points=points).plugins.failed  # another run is not stopped by it
    text = MODEL + DATA + '[loss]\nname = "gizmo"\n'
    with pytest.raises(PluginImportFailed, match="no module named gizmo") as caught:
        load(text, entry_points=points)
    assert isinstance(caught.value.__cause__, ImportError)
    assert "gizmo" in refused(BASE + "[plugins]\nstrict = true\n", PluginImportFailed, entry_points=points)


def test_a_lazy_class_that_cannot_be_imported_is_a_users_error(refused):
    points = with_builtins(point(plugin(register_losses=lambda register: register("lost", "no_such_module:Lost"))))
    message = refused(MODEL + DATA + '[loss]\nname = "lost"\n', PluginImportFailed, entry_points=points)
    assert "no_such_module" in message and "elsewhere" in message


def test_a_name_claimed_twice_is_chosen_by_its_distribution(load, refused):
    points = with_builtins(point(plugin(register_losses=lambda register: register("sft", Other))))
    message = refused(MODEL + DATA + '[loss]\nname = "sft"\n', entry_points=points)
    assert "elsewhere:sft" in message and "mortice:sft" in message
    config = load(MODEL + DATA + '[loss]\nname = "elsewhere:sft"\n', entry_points=points)
    assert isinstance(config.losses[0][1], Other)
    again = load(config.effective_toml(), name="again.toml", entry_points=points)
    assert isinstance(again.losses[0][1], Other)


# B60: paths

RECORD = "{}\n"


def test_case_b60_file_paths_are_relative_to_the_file_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.jsonl").write_text(RECORD)
    (tmp_path / "cfg").mkdir()
    run = tmp_path / "cfg" / "run.toml"
    run.write_text(MODEL + DATA + 'train = "../d/train.jsonl"\n' + LOSS)
    for folder in (tmp_path, tmp_path / "cfg", tmp_path / "d"):
        monkeypatch.chdir(folder)
        config = load_config(os.path.relpath(run))
        assert config.data.train == tmp_path / "d" / "train.jsonl"
        assert config.run_path == tmp_path / "cfg" / "runs" / "run"


def test_case_b60_paths_in_flags_are_relative_to_the_working_directory(load, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "my däta.jsonl").write_text(RECORD)
    monkeypatch.chdir(tmp_path / "here")
    config = load(BASE, name="cfg/run.toml", settings=["data.train=my däta.jsonl"], run_path=Path("out"))
    assert config.data.train == tmp_path / "here" / "my däta.jsonl"
    assert config.run_path == tmp_path / "here" / "out"


def test_case_b60_home_is_expanded(load, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.jsonl").write_text(RECORD)
    assert load(MODEL + DATA + 'train = "~/t.jsonl"\n' + LOSS, name="x/run.toml").data.train == tmp_path / "t.jsonl"


def test_case_b60_missing_data_names_key_file_line_and_absolute_path(refused, tmp_path):
    (tmp_path / "train.jsonl").write_text(RECORD)
    message = refused(MODEL + DATA + 'train = "trian.jsonl"\nvalid = "no/valid.jsonl"\n' + LOSS)
    first, second = message.splitlines()
    assert first.startswith(f"run.toml:5: data.train: file not found: {tmp_path / 'trian.jsonl'}")
    assert "did you mean train.jsonl?" in first
    assert f"run.toml:6: data.valid: file not found: {tmp_path / 'no' / 'valid.jsonl'}" in second


def test_case_b60_a_hub_id_stays_and_a_folder_of_that_shape_is_a_folder(load, tmp_path):
    assert load(BASE).model.path == "org/name"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert load(BASE).model.path == str(tmp_path / "org" / "name")


def test_case_b60_a_missing_run_file_gives_the_path_tried_and_the_nearest_name(load, tmp_path):
    (tmp_path / "run.toml").write_text(BASE)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "rum.toml")
    assert str(tmp_path / "rum.toml") in str(caught.value)
    assert str(tmp_path / "run.toml") in str(caught.value)


def test_run_folders_are_numbered_and_an_explicit_one_must_be_empty(load, refused, tmp_path):
    (tmp_path / "runs" / "run").mkdir(parents=True)
    assert load(BASE).run_path == tmp_path / "runs" / "run"
    (tmp_path / "runs" / "run" / "x").touch()
    assert load(BASE).run_path == tmp_path / "runs" / "run-2"
    message = refused(BASE + '[run]\npath = "runs/run"\n')
    assert message.startswith("run.toml:8: run.path: ") and "not an empty folder" in message


def test_a_path_among_the_options_of_a_strategy_is_relative_to_the_file_too(load, tmp_path, monkeypatch):
    points = with_builtins(point(plugin(register_losses=lambda register: register("other", Other))))
    text = MODEL + DATA + '[loss]\nname = "other"\nwords = "lists/words.txt"\n'
    ((_, loss),) = load(text, entry_points=points).losses
    assert loss.words == tmp_path / "lists" / "words.txt"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ((_, loss),) = load(text, entry_points=points, settings=["loss.words=mine.txt"]).losses
    assert loss.words == tmp_path / "here" / "mine.txt"


# Python, overrides, requirements


def test_config_from_a_mapping_is_checked_the_same():
    tables = {"model": {"path": "org/name"}, "data": {"format": "preference"}, "loss": {"name": "orpo", "beta": 0.3}}
    assert config_from_dict(tables).losses[0][1].beta == 0.3
    with pytest.raises(ConfigError, match=r"loss\.beta: expected a finite number, found the string '0.3'"):
        config_from_dict({**tables, "loss": {"name": "orpo", "beta": "0.3"}})


def test_a_mapping_is_left_as_it_was():
    tables = {"model": {"path": "org/name"}, "data": {"format": "preference"}, "loss": {"name": "orpo"}}
    config = config_from_dict(tables, settings=["train.seed=4", "loss.beta=0.3"])
    assert config.train.seed == 4
    assert tables == {"model": {"path": "org/name"}, "data": {"format": "preference"}, "loss": {"name": "orpo"}}


def test_overrides_make_another_checked_configuration(load):
    config = load(BASE)
    changed = config.with_overrides({"loss.beta": 0.2})
    assert (config.losses[0][1].beta, changed.losses[0][1].beta) == (0.1, 0.2)
    assert changed.run_path == config.run_path
    with pytest.raises(ConfigError, match=r"loss\.beta"):
        config.with_overrides({"loss.beta": -1.0})
    with pytest.raises(ConfigError, match="did you mean 'beta'"):
        config.with_overrides({"loss.bta": 0.2})


def test_requirements_name_the_loss_what_it_lacks_and_who_provides_it(load):
    check_requirements(load(BASE))
    config = load(MODEL + '[data]\nformat = "chat"\n' + LOSS)
    with pytest.raises(ConfigError) as caught:
        check_requirements(config)
    assert "loss 'orpo' needs pairs" in str(caught.value) and "data 'preference'" in str(caught.value)


def test_strategies_that_do_not_go_together_are_refused_before_the_model_is_opened(load):
    thin = BASE + '[head]\nname = "flash-cce"\neps = 1e-5\n'
    with pytest.raises(ConfigError, match=r"head 'flash-cce' .* outside traces only, and backward 'full' .*segmented"):
        check_requirements(load(thin))
    check_requirements(load(thin + '[backward]\nname = "segmented"\n'))
    packed = BASE + '[layout]\nname = "packed"\n'
    check_requirements(load(packed))
    with pytest.raises(ConfigError, match=r"run\.toml:\d+: train\.micro_batch_size: layout 'packed' fills rows"):
        check_requirements(load(packed + "[train]\nmicro_batch_size = 4\n"))


def test_requirements_name_plugins_that_would_have_to_be_enabled(load):
    config = load(MODEL + '[data]\nformat = "chat"\n' + LOSS + '[plugins]\nenable = ["orpo", "chat"]\n')
    with pytest.raises(ConfigError, match=r"data 'preference' \(plugin 'preference', not enabled\)"):
        check_requirements(config)


def test_requirements_that_nothing_installed_provides(load):
    @frozen
    class Critic:
        requires = frozenset({"critique"})

        def __call__(self, scores, batch):
            raise AssertionError("never called here")

    points = with_builtins(point(plugin(register_losses=lambda register: register("critic", Critic))))
    config = load(MODEL + DATA + '[loss]\nname = "critic"\n', entry_points=points)
    with pytest.raises(ConfigError, match=r"loss 'critic' needs critique.*no installed plugin provides it"):
        check_requirements(config)


def test_unknown_strategies_of_flags(refused):
    message = refused(BASE, strategies={"head": "flash-ce"})
    assert "did you mean 'flash-cce'" in message


def test_unknown_plugin_to_enable(refused):
    assert "did you mean 'orpo'" in refused(BASE + '[plugins]\nenable = ["orpoo"]\n', PluginError)


def test_a_reference_is_a_word_or_a_folder(load, refused, tmp_path):
    message = refused(BASE + '[reference]\npolicy = "initail"\n')
    assert (
        'run.toml:8: reference.policy: must be "initial", "base" or a folder (an adapter, or a model), found no folder'
        in message
    )
    (tmp_path / "adapter").mkdir()
    found = load(BASE + '[reference]\npolicy = "adapter"\n')
    assert found.reference.policy == str(tmp_path / "adapter")


def test_plugins_are_enabled_by_their_full_names(load):
    text = '[plugins]\nenable = ["mortice:orpo", "llama", "preference"]\n' + BASE
    assert load(text).loss_names == ["orpo"]
    swapped = load(text, strategies={"loss": "sft"})
    assert swapped.loss_names == ["sft"]
    assert swapped.file.tables["plugins"]["enable"] == ["mortice:orpo", "llama", "preference", "sft"]


def test_a_config_beside_a_pretrained_model_is_refused(refused):
    message = refused(BASE.replace(MODEL, MODEL + 'config = "config.json"\n'))
    assert 'config is for init = "random"' in message


def test_an_engine_is_there_where_a_source_samples_and_nowhere_else(load):
    assert load(BASE).all("rollout") == []
    text = BASE + '[source]\nname = "rollout"\n[[reward]]\nname = "length"\nmin = 1\n'
    assert type(load(text).rollout).__name__ == "KVCache"
    assert type(load(text + '[rollout]\nname = "sequential"\n').rollout).__name__ == "Sequential"
    assert load(text + "[rollout]\nrows = 3\ntemperature = 0.5\n").rollout.rows == 3

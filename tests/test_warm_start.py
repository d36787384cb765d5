"""Runs that start from an adapter: `[adapter] init`."""

from __future__ import annotations

import json
import shutil

import mlx.core as mx
import pytest
from tiny_llama import tiny
from tiny_run import RUN_FILE, adapter, configure, plugin, run, same, tiny_run, validations

from mortice.errors import CheckpointError, ConfigError
from mortice.launch import Notices, prepare
from mortice_plugins.adapters.lora import LoRA

PLAIN = RUN_FILE.replace("[adapter]\nrank = 4\n", "").replace("[train]", "[train]\nvalidate_every = 99")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run file that says nothing of the adapter; its loss has a profile with rank 16 and scale 2."""
    return tiny_run(tmp_path_factory.mktemp("tiny"), PLAIN)


@pytest.fixture(scope="module")
def first(home):
    """A run with an adapter of rank 3 and scale 1.5 on two kinds of layers."""
    options = ("adapter.rank=3", "adapter.scale=1.5", 'adapter.targets=["q_proj", "mlp.up_proj"]')
    return run(home, "train.steps=3", *options)


def peft(folder, saved, scale, **options):
    """The same adapter as PEFT keeps it."""
    folder.mkdir()
    names = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight"}
    tensors = {}
    for name, value in saved.items():
        stem, part = name[: -len(".lora_a")], name[-len(".lora_a") :]
        tensors[f"base_model.model.{stem}{names[part]}"] = mx.contiguous(value.T)
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 3 * scale, **options}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_a_run_goes_on_where_the_other_ended(home, first):
    """Rank, scale and layers come from the folder, not from the profile, and the function is the same."""
    outcome = run(home, "train.steps=1", f"adapter.init={first.path / 'adapter'}")
    assert outcome.before["loss"] == pytest.approx(first.after["loss"], rel=1e-6)
    saved, before = adapter(outcome.path / "adapter"), adapter(first.path / "adapter")
    assert {name: value.shape for name, value in saved.items()} == {n: v.shape for n, v in before.items()}
    assert not same(saved, before)
    config = json.loads((outcome.path / "adapter" / "adapter_config.json").read_text())
    assert config["lora_parameters"]["rank"] == 3
    assert config["lora_parameters"]["scale"] == 1.5


def test_the_effective_file_makes_the_same_run_again(home, first, tmp_path):
    outcome = run(home, "train.steps=2", f"adapter.init={first.path / 'adapter'}")
    text = (outcome.path / "run.toml").read_text()
    for line in ("rank = 3 # adapter.init", "scale = 1.5 # adapter.init", f'init = "{first.path / "adapter"}"'):
        assert line in text
    assert 'targets = ["mlp.up_proj", "self_attn.q_proj"] # adapter.init' in text
    again = run(outcome.path / "run.toml", f"run.path={tmp_path / 'again'}")
    assert same(adapter(outcome.path / "adapter"), adapter(again.path / "adapter"))


def test_a_peft_folder(home, first, tmp_path):
    folder = peft(tmp_path / "peft", adapter(first.path / "adapter"), 1.5)
    outcome = run(home, "train.steps=1", f"adapter.init={folder}")
    assert outcome.before["loss"] == pytest.approx(first.after["loss"], rel=1e-6)


def test_ranks_of_their_own(home, first, tmp_path):
    """Layers of unequal rank and scale keep the function, also once they are saved."""
    saved = adapter(first.path / "adapter")
    name = "model.layers.0.self_attn.q_proj"
    saved[f"{name}.lora_a"], saved[f"{name}.lora_b"] = saved[f"{name}.lora_a"][:, :1], saved[f"{name}.lora_b"][:1]
    folder = peft(tmp_path / "peft", saved, 1.5, rank_pattern={"layers.0.self_attn.q_proj": 1})
    one = run(home, "train.steps=1", f"adapter.init={folder}")
    two = run(one.path / "run.toml", f"run.path={tmp_path / 'again'}")
    assert same(adapter(one.path / "adapter"), adapter(two.path / "adapter"))
    three = run(home, "train.steps=1", f"adapter.init={one.path / 'adapter'}")
    assert three.before["loss"] == pytest.approx(one.after["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("adapter.rank=8",), r"adapter\.rank is 3 there, the run has 8"),
        (("adapter.scale=2.0",), r"its scale \(alpha / rank\) is 1\.5, the run has 2"),
        (("adapter.alpha=9.0",), r"its scale \(alpha / rank\) is 1\.5, the run has 3"),
        (('adapter.targets=["q_proj"]',), r"it also adapts model\.layers\.0\.mlp\.up_proj"),
        (('adapter.targets=["q_proj", "up_proj", "k_proj"]',), r"it lacks model\.layers\.0\.self_attn\.k_proj"),
        (("adapter.layers=1", 'adapter.targets=["q_proj", "up_proj"]'), r"it also adapts model\.layers\.0"),
        (("adapter.rank=8", "adapter.scale=2.0"), r"rank is 3.*; its scale"),
    ],
    ids=str,
)
def test_what_the_file_says_otherwise_is_an_error(home, first, settings, message):
    with pytest.raises(ConfigError, match=message):
        prepare(configure(home, f"adapter.init={first.path / 'adapter'}", *settings))


def test_what_the_file_says_alike_is_none(home, first):
    folder = first.path / "adapter"
    for settings in (
        ("adapter.rank=3", "adapter.alpha=4.5"), ("adapter.scale=1.5", "adapter.name=lora"), ("adapter.alpha=4.5",),
        ('adapter.targets=["self_attn.q_proj", "up_proj"]',),
    ):  # fmt: skip
        prepared = prepare(configure(home, f"adapter.init={folder}", *settings))
        assert same(prepared.policy.params, adapter(folder))
        assert prepared.adapter.factor == 1.5


def test_everything_that_does_not_fit_is_listed_and_nothing_replaced(home, first, tmp_path):
    folder = tmp_path / "wrong"
    shutil.copytree(first.path / "adapter", folder)
    tensors = adapter(folder)
    q, up = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
    tensors[f"{q}.lora_a"] = mx.zeros((32, 3))
    tensors[f"{up}.lora_b"] = mx.zeros((3, 7))
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    message = (
        rf"{up}.lora_b is \[3, 7\], the model needs \[3, 96\].*|{q}.lora_a is \[32, 3\], the model needs \[64, 3\]"
    )
    with pytest.raises(CheckpointError, match=message) as caught:
        prepare(configure(home, f"adapter.init={folder}"))
    assert f"{q}.lora_a" in str(caught.value) and f"{up}.lora_b" in str(caught.value)
    model = tiny(vocab_size=272).model
    names = set(model.named_parameters())
    with pytest.raises(CheckpointError):
        LoRA.from_folder(folder, model)
    assert set(model.named_parameters()) == names


def test_full_weights(home, tmp_path):
    file = home.parent / "full.toml"
    file.write_text(PLAIN + '\n[adapter]\nname = "full"\n')
    one = run(file, "train.steps=2")
    folder = one.path / "adapter"
    two = run(file, "train.steps=1", f"adapter.init={folder}", "optimizer.learning_rate=1e-3")
    assert two.before["loss"] == pytest.approx(one.after["loss"], rel=1e-6)
    unsaid = run(home, "train.steps=1", f"adapter.init={folder}", "optimizer.learning_rate=1e-3")
    assert same(adapter(two.path / "adapter"), adapter(unsaid.path / "adapter"))
    with pytest.raises(ConfigError, match=r"holds an adapter of the kind 'full', but adapter\.name is 'lora'"):
        prepare(configure(home, f"adapter.init={folder}", "adapter.name=lora"))
    with pytest.raises(ConfigError, match=r"of the kind 'full', but rank belongs to another kind"):
        prepare(configure(home, f"adapter.init={folder}", "adapter.rank=2"))


def test_the_base_of_full_weights_that_are_not_it(home):
    """With `init` the base is another model than the one that trains: the checkpoint itself."""
    file = home.parent / "full-base.toml"
    file.write_text(PLAIN.replace('"orpo"', '"dpo"') + '\n[adapter]\nname = "full"\n')
    one = run(file, "train.steps=2", "reference.cache=false")
    two = run(
        file, "train.steps=1", f"adapter.init={one.path / 'adapter'}", "reference.policy=base", "reference.cache=false"
    )
    assert validations(two)[0]["valid/loss"] == pytest.approx(one.after["loss"], rel=1e-5)


def test_a_folder_that_is_none(home, first):
    for path, message in (
        (
            first.path,
            rf"is no adapter folder \(it has no adapter_config\.json\); did you mean {first.path / 'adapter'}",
        ),
        (first.path / "nothing", "is no adapter folder"),
    ):
        with pytest.raises(ConfigError, match=f"adapter.init: .*{message}"):
            configure(home, f"adapter.init={path}")
    with pytest.raises(ConfigError, match=r"adapter\.init: expected a string, found 3"):
        configure(home, "adapter.init=3")
    with pytest.raises(ConfigError, match=r"adapter\.int: unknown key; did you mean 'init'\?"):
        configure(home, "adapter.int=x")


def test_an_adapter_of_others_is_compared_by_its_options(home, first):
    class Mine(LoRA):
        """LoRA as others make it."""

        attach_saved = property()

        @classmethod
        def claims(cls, path):
            return (path / "mine").exists()

    folder = home.parent / "mine"
    shutil.copytree(first.path / "adapter", folder, dirs_exist_ok=True)
    (folder / "mine").touch()
    plugins = [plugin("adapter", "mine", Mine)]
    settings = (f"adapter.init={folder}", "adapter.name=mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoRA, "claims", classmethod(lambda cls, path: False))
        ready = prepare(configure(home, *settings, "adapter.rank=3", plugins=plugins), Notices())
        assert same(ready.policy.params, adapter(folder))
        with pytest.raises(ConfigError, match="rank is 3 there, the run has 5"):
            prepare(configure(home, *settings, "adapter.rank=5", plugins=plugins), Notices())

"""Gemma 4 checkpoints as a user has them: the reference ones in every piece and layout, and whole runs of the command
line whose adapters mlx-lm loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from test_gemma4 import (
    EXPERTS,
    IDS,
    K_IS_V,
    NAMES,
    SHARING,
    engine,
    folder_of,
    logits,
    reference_of,
    relative,
    renamed,
    tiny,
    transformers_experts,
)  # fmt: skip
from tiny_llama import PLUGINS, distance, write
from tiny_run import RUN_FILE, tiny_run

from mortice.batch import Completion, Group
from mortice.cli import main
from mortice.conversion import convert_checkpoint
from mortice.objective import WeightedLoss
from mortice.pretrained import load
from mortice.step import Engine
from mortice_plugins.backwards.checkpoint import Checkpoint
from mortice_plugins.backwards.full import Full
from mortice_plugins.backwards.segmented import KEEP, Segmented
from mortice_plugins.heads.dense import Dense
from mortice_plugins.heads.flash_cce import FlashCCE
from mortice_plugins.layouts.packed import Packed
from mortice_plugins.layouts.prefix_shared import PrefixShared
from mortice_plugins.layouts.separate import Separate
from mortice_plugins.losses.sft import SFT

BLOCKS = 12
"""Of each reference checkpoint: six layers, attention and MLP. In E2B and E4B layers 3 and 4 share the keys and values
of 1, layer 5 those of 2."""


def gradients_of(reference) -> dict[str, mx.array]:
    """The reference's, under mortice's names and in its orientation."""
    ours = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b"}
    return {
        name.removeprefix("grad.").removesuffix(theirs) + ours[theirs]: value.T
        for name, value in reference.items()
        for theirs in ours
        if name.startswith("grad.") and name.endswith(theirs)
    }


BACKWARDS = {
    "full": Full(),
    **{f"cut {cut}, keep {KEEP[cut % 3]}": Segmented(cuts=(cut,), keep=KEEP[cut % 3]) for cut in range(1, BLOCKS)},
    **{f"cut {cut}, traced": Segmented(cuts=(cut,), eager=False) for cut in range(1, BLOCKS)},
    **{f"cut everywhere, keep {keep}": Segmented(segment_size=1, keep=keep) for keep in KEEP},
    **{f"checkpoint {size}": Checkpoint(segment_size=size) for size in (1, 2, 5)},
}


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_and_backward_gives_the_reference_gradient(shared, name):
    folder = folder_of(shared, name)
    reference = reference_of(folder)
    ids, expected = reference["input_ids"].tolist(), gradients_of(reference)
    found = load(folder, plugins=PLUGINS, adapter=folder / "adapter")
    assert len(found.model.blocks) == BLOCKS
    groups = [Group("a", ids[:16], [Completion(ids[16:])])]
    losses = (WeightedLoss("sft", SFT()),)
    for label, backward in BACKWARDS.items():
        run = Engine(found.model, FlashCCE(token_tile=7, vocab_tile=100), backward, PrefixShared(), losses)
        tally, gradients = run.gradients(found.params, groups)
        assert tally.loss == pytest.approx(reference["loss_tokens_16_on"].item(), abs=1e-5), label
        assert relative(gradients, expected) < 1e-4, label


@pytest.mark.parametrize("name", NAMES)
def test_shared_and_packed_rows_equal_separate_ones(shared, name):
    """Prompts longer and shorter than the window of 8; a completion of one token, which has no span."""
    folder = folder_of(shared, name)
    ids = reference_of(folder)["input_ids"].tolist()
    found = load(folder, plugins=PLUGINS, adapter=folder / "adapter")
    groups = [
        Group("a", ids[:13], [Completion(ids[i:j]) for i, j in ((13, 24), (30, 36), (24, 25))], ((0, 1), (0, 2))),
        Group("b", ids[24:28], [Completion(ids[28:40]), Completion(ids[3:7])], ((0, 1),)),
    ]
    plain, expected = engine(found.model, Full(), Separate(), Dense()).gradients(found.params, groups)
    for backward in (Full(), Checkpoint(segment_size=2), Segmented(segment_size=3), Segmented(segment_size=1)):
        # Each way of attention is 1e-5 to 2e-5 from the float64 reference, whose log-probabilities go down to −22.
        tolerance = 1e-5 if isinstance(backward, Full) else 3e-5
        for layout in (Separate(), PrefixShared(), Packed()):
            tally, gradients = engine(found.model, backward, layout, FlashCCE()).gradients(found.params, groups)
            assert tally.loss == pytest.approx(plain.loss, abs=1e-5)
            assert flat(tally, groups) == pytest.approx(flat(plain, groups), abs=tolerance)
            assert relative(gradients, expected) < 1e-4


def flat(tally, groups) -> list[float]:
    """Every log-probability."""
    return [float(value) for group in tally.scores(groups) for tokens in group for value in tokens]


# Adapters and configs that others wrote


def test_a_peft_adapter_of_a_multimodal_checkpoint(shared, tmp_path):
    """The reference one under the names that PEFT gives it there."""
    folder = folder_of(shared, "e2b")
    reference = reference_of(folder)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    config = {"model_type": "gemma4", "text_config": json.loads((folder / "config.json").read_text())}
    write(tmp_path / "model", renamed(weights, "model.language_model."), config)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    shutil.copyfile(folder / "adapter" / "adapter_config.json", adapter / "adapter_config.json")
    tensors = dict(mx.load(str(folder / "adapter" / "adapter_model.safetensors")))
    theirs = {name.replace(".model.layers.", ".model.language_model.layers."): t for name, t in tensors.items()}
    assert set(theirs).isdisjoint(tensors)
    mx.save_safetensors(str(adapter / "adapter_model.safetensors"), theirs)
    found = load(tmp_path / "model", plugins=PLUGINS, adapter=adapter)
    assert distance(logits(found.model, reference["input_ids"].tolist()), reference["adapter_logits"]) < 1e-4


DEFAULTS = {
    "final_logit_softcapping": None, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip
"""Of transformers, for keys that are absent. mlx-lm has others for the first three."""


@pytest.mark.parametrize("multimodal", [False, True], ids=["text", "multimodal"])
@pytest.mark.parametrize("config", [SHARING, K_IS_V, EXPERTS], ids=["sharing", "k-is-v", "experts"])
def test_a_converted_checkpoint_loads_in_mlx_lm(tmp_path, config, multimodal):
    """From a config as transformers 5.24 saves it (widths and key heads layer by layer), which mlx-lm does not read,
    without what transformers has defaults for."""
    utils = pytest.importorskip("mlx_lm.utils")
    text = tiny(config | {"final_logit_softcapping": None})
    full = {"head_dim": config["global_head_dim"]}
    if "num_global_key_value_heads" in config:
        full["num_key_value_heads"] = config["num_global_key_value_heads"]
    own = {f"{i}": full for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"}
    spelled = {
        key: value
        for key, value in config.items()
        if "global" not in key and key != "final_logit_softcapping" and DEFAULTS.get(key, key) != value
    } | {"per_layer_config": own}
    weights = transformers_experts(text)
    if multimodal:
        weights, spelled = renamed(weights, "model.language_model."), {"model_type": "gemma4", "text_config": spelled}
    source = write(tmp_path / "source", weights, spelled)
    made = convert_checkpoint(source, tmp_path / "made", plugins=PLUGINS)
    theirs, _ = utils.load_model(made.path)
    assert distance(theirs(mx.array([IDS]))[0], logits(text)) < 1e-4
    assert distance(logits(load(made.path, plugins=PLUGINS).model), logits(text)) == 0


# The command line


def call(*arguments: object) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return end.value.code or 0


def run_folder(folder: Path, config: dict, *, multimodal: bool) -> Path:
    """A run file whose model is a tiny Gemma 4; with towers where it is multimodal."""
    file = tiny_run(folder, RUN_FILE)
    config = config | {"vocab_size": 272, "vocab_size_per_layer_input": 272}
    weights = transformers_experts(tiny(config))
    if multimodal:
        towers = {f"model.vision_tower.{i}.weight": mx.ones((2, 2)) for i in range(3)}
        weights = renamed(weights, "model.language_model.") | towers
        config = {"model_type": "gemma4", "text_config": config, "vocab_size": 272}
    write(folder / "model", weights, config)
    return file


SPELLED = EXPERTS | {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}


@pytest.mark.parametrize(
    ("config", "targets", "multimodal"),
    [(SHARING, "['*_proj']", False), (SHARING, "['*_proj']", True), (SPELLED, "['experts.*', 'q_proj']", True)],
    ids=["text", "multimodal", "experts"],
)
def test_train_and_generate(tmp_path, capsys, config, targets, multimodal):
    """The adapter that `mortice train` saves gives the same answer in `mortice generate` and in mlx-lm."""
    file = run_folder(tmp_path, config, multimodal=multimodal)
    sets = f"adapter.targets={targets}", "optimizer.learning_rate=0.1", "train.steps=8", "schedule.name=constant"
    assert call("train", file, "--run", tmp_path / "run", *(f"--set={value}" for value in sets)) == 0
    err = capsys.readouterr().err
    assert ("weights that the model does not use are left out: vision_tower (3)" in err) == multimodal
    folder, adapter = tmp_path / "model", tmp_path / "run" / "adapter"
    answers = []
    for flags in ([], ["--adapter", adapter]):
        assert call("generate", folder, "say red: ", "-n", 12, *flags) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] != answers[1]

    mlx_lm = pytest.importorskip("mlx_lm")
    theirs, tokenizer = mlx_lm.load(str(folder), adapter_path=str(adapter))
    ours = load(folder, plugins=PLUGINS, adapter=adapter)
    assert distance(theirs(mx.array([IDS]))[0], logits(ours.model)) < 1e-4
    answer = mlx_lm.generate(theirs, tokenizer, ours.tokenizer.encode("say red: ", add_special=True), max_tokens=12)
    assert answers[1].rstrip("\n") == answer.rstrip("\n")

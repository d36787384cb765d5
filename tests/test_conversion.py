"""`mortice convert` of model folders: packings, rules, shards, what goes with the weights, who reads the result."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from test_gemma4 import EXPERTS, transformers_experts
from test_qwen3_5 import in_transformers_form
from test_qwen3_5 import tiny as tiny_qwen
from tiny_llama import PLUGINS, checkpoint, distance, logits, tiny, write
from tiny_run import write_tokenizer

from mortice.batch import Completion, Group
from mortice.cli import main
from mortice.conversion import Packing, convert_checkpoint
from mortice.errors import CheckpointError, ConfigError
from mortice.linear import Packed
from mortice.objective import WeightedLoss
from mortice.pretrained import load, random_model
from mortice.step import Engine
from mortice_plugins.adapters.lora import LoRA
from mortice_plugins.backwards.full import Full
from mortice_plugins.backwards.segmented import Segmented
from mortice_plugins.heads.dense import Dense
from mortice_plugins.heads.flash_cce import FlashCCE
from mortice_plugins.layouts.prefix_shared import PrefixShared
from mortice_plugins.layouts.separate import Separate
from mortice_plugins.losses.orpo import ORPO
from mortice_plugins.models.qwen3_5 import Qwen35Adapter


def opened(folder):
    return load(folder, plugins=PLUGINS).model


def packings(model) -> dict[str, tuple[int, int, str]]:
    return {
        name: (m.quantization.bits, m.quantization.group_size, m.quantization.mode)
        for name, m, _ in model.named_modules()
        if isinstance(m, Packed)
    }


IDS = [5, 17, 3, 40, 31, 31, 2, 20]


def convert(source, target, packing):
    return convert_checkpoint(source, target, packing=packing, plugins=PLUGINS)


@pytest.mark.parametrize(
    ("packing", "error"),
    [
        (Packing.of(8, 32), 0.01),
        (Packing.of(4, 32), 0.1),
        (Packing.of(6, 32), 0.03),
        (Packing.of(mode="mxfp8"), 0.1),
        (Packing.of(mode="mxfp4"), 0.4),
        (Packing.of(mode="nvfp4"), 0.4),
    ],
    ids=["8", "4", "6", "mxfp8", "mxfp4", "nvfp4"],
)
def test_packed_near_the_floats_and_back(tmp_path, packing, error):
    """What is unpacked again computes what the packed one does; `error`: of a weight, as a share of the largest."""
    source = checkpoint(tmp_path / "source", num_hidden_layers=1)
    made = convert(source, tmp_path / "packed", packing)
    packed = opened(tmp_path / "packed")
    assert made.quantized == len(packings(packed)) == 9
    assert set(packings(packed).values()) == {(packing.common.bits, packing.common.group_size, packing.common.mode)}
    back = convert_checkpoint(tmp_path / "packed", tmp_path / "back", dequantize=True, plugins=PLUGINS)
    assert back.quantized == 0
    assert distance(logits(opened(tmp_path / "back")), logits(packed)) < 1e-4
    weights = opened(source).named_parameters()
    for name, value in opened(tmp_path / "back").named_parameters().items():
        assert distance(value, weights[name]) <= error * mx.abs(weights[name]).max().item(), name
    assert "quantization" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert made.bytes < 0.6 * back.bytes


def strategies(kind) -> list:
    return [strategy.load()() for strategy in PLUGINS.registry.all(kind)]


HEADS = [head for head in strategies("head") if not hasattr(head, "attach")]
BACKWARDS = strategies("backward")
GROUPS = [Group("a", [1, 2, 3, 4], [Completion([5, 6, 7, 8]), Completion([8])], ((0, 1),))]


def step(folder, head, backward, layout):
    model = opened(folder)
    params = LoRA(rank=2).attach(model, 0)
    params = {n: p + 0.05 * mx.random.normal(p.shape, key=mx.random.key(i)) for i, (n, p) in enumerate(params.items())}
    model.mark_trainable(params)
    return Engine(model, head, backward, layout, (WeightedLoss("orpo", ORPO()),)).gradients(params, GROUPS)


@pytest.mark.parametrize(
    ("packing", "ways"),
    [(Packing.of(8, 32), "every"), (Packing.of(4, 64), "every"),
     (Packing.of(4, 32, rules=("v_proj=8", "embed_tokens=6", "layers.1.*=none", "up_proj=mxfp4")), "every"),
     (Packing.of(mode="mxfp8"), "every"), (Packing.of(mode="mxfp4"), "every"), (Packing.of(mode="nvfp4"), "every"),
     (Packing.of(2, 32), "one"), (Packing.of(3, 128), "one"), (Packing.of(5, 64), "one"), (Packing.of(6, 32), "one")],
    ids=["8", "4", "mixed", "mxfp8", "mxfp4", "nvfp4", "2", "3", "5", "6"],
)  # fmt: skip
def test_adapters_train_on_every_packing(tmp_path, packing, ways):
    """Gradients through packed layers, a packed tied table among them, are those through the same weights unpacked, by
    every head and every backward."""
    source = checkpoint(tmp_path / "source", tie_word_embeddings=True, hidden_size=128, intermediate_size=128)
    assert convert(source, tmp_path / "packed", packing).left == ()
    convert_checkpoint(tmp_path / "packed", tmp_path / "floats", dequantize=True, dtype="float32", plugins=PLUGINS)
    expected, gradients = step(tmp_path / "floats", Dense(), Full(), Separate())
    norms = {name: mx.linalg.norm(value.flatten()).item() for name, value in gradients.items()}
    assert min(norms.values()) > 0
    every = [(head, backward) for head in HEADS for backward in BACKWARDS]
    assert len(every) >= 9
    for head, backward in every if ways == "every" else [(FlashCCE(), Segmented(segment_size=1))]:
        tally, found = step(tmp_path / "packed", head, backward, PrefixShared())
        assert tally.loss == pytest.approx(expected.loss, abs=1e-5)
        for name, value in gradients.items():
            assert mx.linalg.norm((found[name] - value).flatten()).item() < 1e-4 * norms[name], (head, backward, name)


@pytest.mark.parametrize("packing", [Packing.of(4, 32), Packing.of(mode="nvfp4")], ids=["4", "nvfp4"])
def test_blocks_of_rows_change_nothing(tmp_path, monkeypatch, packing):
    """Matrices and stacks of them, whose rows no block divides, one row at a time too."""
    source = write(tmp_path / "source", random_model(EXPERTS, 0, plugins=PLUGINS).model.named_parameters(), EXPERTS)
    expected = mx.load(str(convert(source, tmp_path / "whole", packing).path / "model.safetensors"))
    for numbers in (1, 7 * 32):
        monkeypatch.setattr("mortice.conversion.BLOCK", numbers)
        made = convert(source, tmp_path / f"{numbers}", packing)
        found = mx.load(str(made.path / "model.safetensors"))
        assert found.keys() == expected.keys()
        assert all(mx.array_equal(found[name], value) for name, value in expected.items())
        back = convert_checkpoint(made.path, tmp_path / f"{numbers}-back", dequantize=True, plugins=PLUGINS).path
        assert distance(logits(opened(back), IDS), logits(opened(made.path), IDS)) < 1e-4


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_a_scaled_table_of_bytes(tmp_path, mode):
    """Gemma multiplies its rows by a root, rounded to the type of the table: bfloat16 here, not that of the bytes."""
    source = write(tmp_path / "source", random_model(EXPERTS, 0, plugins=PLUGINS).model.named_parameters(), EXPERTS)
    convert(source, tmp_path / "packed", Packing.of(mode=mode))
    assert "model.embed_tokens" in packings(opened(tmp_path / "packed"))
    convert_checkpoint(tmp_path / "packed", tmp_path / "floats", dequantize=True, plugins=PLUGINS)
    floats = opened(tmp_path / "floats")
    assert floats.named_parameters()["model.embed_tokens.weight"].dtype == mx.bfloat16
    assert distance(logits(opened(tmp_path / "packed"), IDS), logits(floats, IDS)) < 1e-4


def test_rules_by_pattern(tmp_path):
    source = checkpoint(tmp_path / "source")
    rules = ("lm_head=none", "layers.1.mlp.*=8", "down_proj=8:64", "q_proj=mxfp4")
    made = convert(source, tmp_path / "packed", Packing.of(4, 32, rules=rules))
    found = packings(opened(tmp_path / "packed"))
    assert "lm_head" not in found
    assert found["model.layers.0.mlp.up_proj"] == (4, 32, "affine")
    assert found["model.layers.1.mlp.up_proj"] == (8, 32, "affine")
    assert found["model.layers.1.mlp.down_proj"] == (8, 32, "affine")  # the first rule that matches
    assert found["model.layers.0.self_attn.q_proj"] == (4, 32, "mxfp4")
    # 96 columns: no group of 64 divides them
    assert made.left == ("model.layers.0.mlp.down_proj",)
    assert "model.layers.0.mlp.down_proj" not in found


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("q_porj=8", "rule for 'q_porj' matches no matrix of the model; did you mean 'q_proj'"),
        ("q_proj", "is not of the form PATTERN=BITS"),
        ("q_proj=7", "bits must be one of 2, 3, 4, 5, 6, 8, found 7"),
        ("q_proj=8:48", "group size must be one of 32, 64, 128, found 48"),
        ("q_proj=nome", "'nome' is neither bits, a mode nor none; did you mean 'none'"),
    ],
)
def test_rules_that_are_refused(tmp_path, rule, message):
    source = checkpoint(tmp_path / "source")
    with pytest.raises(ConfigError, match=message):
        convert(source, tmp_path / "packed", Packing.of(4, 32, rules=(rule,)))
    assert not (tmp_path / "packed").exists()


def test_a_packed_model_is_packed_anew(tmp_path):
    source = checkpoint(tmp_path / "source")
    convert(source, tmp_path / "8", Packing.of(8, 32))
    convert(tmp_path / "8", tmp_path / "4", Packing.of(4, 32))
    assert set(packings(opened(tmp_path / "4")).values()) == {(4, 32, "affine")}
    name = "model.layers.0.self_attn.q_proj"
    packed, weight = opened(tmp_path / "4"), opened(source).named_parameters()[f"{name}.weight"]
    (module,) = (m for n, m, _ in packed.named_modules() if n == name)
    unpacked = module.quantization.dequantize(module.weight, module.scales, module.biases)
    assert 1e-4 < distance(unpacked, weight) < 0.15 * mx.abs(weight).max().item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_types_stay_as_they_are_stored(tmp_path, dtype):
    source = checkpoint(tmp_path / "source", dtype=dtype)
    convert(source, tmp_path / "8", Packing.of(8, 32))
    convert(tmp_path / "8", tmp_path / "4", Packing.of(4, 64))
    convert_checkpoint(tmp_path / "8", tmp_path / "floats", dequantize=True, plugins=PLUGINS)
    for name in ("8", "4"):
        assert {p.dtype for p in opened(tmp_path / name).named_parameters().values()} == {mx.uint32, dtype}
    assert {p.dtype for p in opened(tmp_path / "floats").named_parameters().values()} == {dtype}


def test_the_config_says_what_is_stored(tmp_path):
    """transformers 5 writes `dtype`; multimodal models have it once more inside."""
    text = EXPERTS | {"dtype": "float32"}
    config = {"model_type": "gemma4", "text_config": text, "vocab_size": 41, "dtype": "float32"}
    weights = random_model(EXPERTS, 0, plugins=PLUGINS).model.named_parameters()
    named = {f"model.language_model.{n.removeprefix('model.')}": v for n, v in weights.items()}
    source = write(tmp_path / "source", named, config)
    convert_checkpoint(source, tmp_path / "m", packing=Packing.of(8, 32), dtype="bfloat16", plugins=PLUGINS)
    made = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (made["dtype"], made["text_config"]["dtype"], "torch_dtype" in made) == ("bfloat16", "bfloat16", False)
    assert made["quantization"] == made["quantization_config"]
    assert "language_model.model.layers.0.router.proj" not in made["quantization"]  # 8 bits like all
    convert_checkpoint(tmp_path / "m", tmp_path / "back", dequantize=True, plugins=PLUGINS)
    made = json.loads((tmp_path / "back" / "config.json").read_text())
    assert not {"quantization", "quantization_config"} & {*made, *made["text_config"]}
    assert opened(tmp_path / "back").named_parameters().keys() == opened(source).named_parameters().keys()


def test_rows_of_nvfp4_that_cannot_be_unpacked_alone(tmp_path):
    """MLX's CPU unpacks pairs of 16 numbers: an odd count in a row would keep mlx-lm from looking that row up."""
    source = checkpoint(tmp_path / "source", intermediate_size=48)
    made = convert(source, tmp_path / "m", Packing.of(mode="nvfp4"))
    assert made.left == tuple(f"model.layers.{i}.mlp.down_proj" for i in range(2))


def test_a_packed_model_is_only_cast(tmp_path):
    source = checkpoint(tmp_path / "source", dtype=mx.float32)
    convert(source, tmp_path / "packed", Packing.of(4, 32))
    convert_checkpoint(tmp_path / "packed", tmp_path / "cast", dtype="bfloat16", plugins=PLUGINS)
    model = opened(tmp_path / "cast")
    assert len(packings(model)) == 16
    assert {p.dtype for p in model.named_parameters().values()} == {mx.uint32, mx.bfloat16}
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_shards_and_their_index(tmp_path):
    source = checkpoint(tmp_path / "source")
    made = convert_checkpoint(source, tmp_path / "m", packing=Packing.of(8, 32), plugins=PLUGINS, shard=10_000)
    files = sorted(f.name for f in (tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert (set(index["weight_map"].values()), len(index["weight_map"])) == (set(files), made.tensors)
    whole = convert(source, tmp_path / "whole", Packing.of(8, 32))
    assert distance(logits(opened(tmp_path / "m")), logits(opened(whole.path))) == 0


def test_progress_ends(tmp_path):
    source = checkpoint(tmp_path / "source")
    seen = []
    for target, options in {"4": {"packing": Packing.of(4, 32)}, "back": {"dequantize": True}}.items():
        seen.clear()
        source = convert_checkpoint(
            source, tmp_path / target, **options, plugins=PLUGINS, progress=lambda *now: seen.append(now)
        ).path
        assert [done for done, _, _ in seen] == list(range(21))
        assert {whole for _, whole, _ in seen} == {21}
        assert {name for _, _, name in seen} == set(tiny().model.named_parameters())


def test_what_lies_beside_the_weights_comes_along(tmp_path):
    source = checkpoint(tmp_path / "source")
    write_tokenizer(source)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "LICENSE").write_text("free")
    (source / "pytorch_model.bin").write_text("pickled")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    convert(source, tmp_path / "m", Packing.of(4, 32))
    names = {str(f.relative_to(tmp_path / "m")) for f in (tmp_path / "m").rglob("*") if f.is_file()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "LICENSE",
                     "additional_chat_templates/tools.jinja", "tokenizer_config.json"}  # fmt: skip


def test_bits_a_weight(tmp_path):
    """4 bits and two float32 numbers for each 32 weights are 6 bits; norms weigh little."""
    made = convert(checkpoint(tmp_path / "source"), tmp_path / "m", Packing.of(4, 32))
    assert 6 <= made.bits_per_weight < 6.2
    stored = (tmp_path / "m" / "model.safetensors").stat().st_size
    assert 8 * stored / load(tmp_path / "m", plugins=PLUGINS).size == pytest.approx(made.bits_per_weight, rel=0.1)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("before", "options"),
    [
        (None, {"dtype": "bfloat16"}),
        (None, {"packing": Packing.of(4, 32)}),
        (Packing.of(8, 32), {"packing": Packing.of(4, 32)}),
        (Packing.of(8, 32), {"dequantize": True}),
    ],
    ids=["cast", "pack", "pack anew", "unpack"],
)
def test_memory_is_that_of_a_shard_and_a_tensor(tmp_path, in_step, before, options):
    source = floats = checkpoint(tmp_path / "floats", num_hidden_layers=24)
    size = (floats / "model.safetensors").stat().st_size
    if before is not None:
        source = convert(floats, tmp_path / "source", before).path
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    convert_checkpoint(source, tmp_path / "m", **options, plugins=PLUGINS, shard=50_000)
    assert mx.get_peak_memory() - held < 0.15 * size


@pytest.mark.alone
def test_memory_of_a_large_matrix(tmp_path, in_step):
    """The table is 8 MB of 8.2; packing it whole as bytes takes 170 MB."""
    source = checkpoint(tmp_path / "m", vocab_size=2**15, num_hidden_layers=1, tie_word_embeddings=True)
    size = (source / "model.safetensors").stat().st_size
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mortice.conversion.BLOCK", 2**15)
        convert(source, tmp_path / "packed", Packing.of(mode="mxfp4"))
    assert mx.get_peak_memory() - held < 2 * size


@pytest.mark.parametrize("kind", ["llama", "gemma4-experts", "qwen3_5"])
def test_the_result_loads_in_mlx_lm(tmp_path, kind):
    utils = pytest.importorskip("mlx_lm.utils")
    if kind == "llama":
        source = checkpoint(tmp_path / "source", tie_word_embeddings=True)
    elif kind == "qwen3_5":
        config = Qwen35Adapter.examples[0] | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
        source = write(tmp_path / "source", in_transformers_form(tiny_qwen(config)), config)
    else:
        text = random_model(EXPERTS, 0, plugins=PLUGINS).model
        source = write(tmp_path / "source", transformers_experts(text), EXPERTS)
    made = convert(source, tmp_path / "m", Packing.of(4, 32))
    ours = opened(made.path)
    if kind == "gemma4-experts":
        assert packings(ours)["model.layers.0.router.proj"][0] == 8
        assert packings(ours)["model.layers.0.experts.switch_glu.up_proj"][0] == 4
    theirs, _ = utils.load_model(made.path)
    mine = ours.output.finish(logits(ours, IDS))
    assert distance(theirs(mx.array([IDS]))[0].astype(mx.float32), mine) < 2e-4


FAMILIES = ["gemma4_26b_moe", "gemma4_31b", "gemma4_e2b", "gemma4_e4b", "llama3_rope", "minicpm5", "qwen3", "smollm2"]


@pytest.mark.parametrize(
    ("family", "how"),
    [(family, "affine") for family in FAMILIES]
    + [(family, how) for family in ("gemma4_26b_moe", "gemma4_e4b") for how in ("mxfp4", "mxfp8", "nvfp4")],
)
def test_checkpoints_of_transformers_go_to_mlx_lm(tmp_path, shared, family, how):
    """Tables stay in floats where they are bytes: mlx-lm scales their rows in half precision."""
    utils = pytest.importorskip("mlx_lm.utils")
    rules = ("layers.0.*=8", "embed_tokens=6", "q_proj=none") if how == "affine" else ("embed_tokens*=none",)
    packing = Packing.of(mode=how, group_size=32 if how == "affine" else None, rules=rules)
    made = convert(shared / "models" / family, tmp_path / "m", packing)
    assert made.quantized >= 20
    ours, (theirs, _) = opened(made.path), utils.load_model(made.path)
    assert distance(theirs(mx.array([IDS]))[0], ours.output.finish(logits(ours, IDS))) < 1e-4


# The command


def run(*arguments) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as end:
        main(["convert", *map(str, arguments)])
    return end.value.code or 0


def test_the_command(tmp_path, capsys):
    source = checkpoint(tmp_path / "source")
    rules = ("--rule", "down_proj=8:64", "--rule", "lm_head=none")
    assert run(source, tmp_path / "m", "--bits", "4", "--group-size", "32", *rules) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path / 'm'}: " in out
    assert "13 packed matrices" in out
    assert "not packed, since no group divides their rows: model.layers.0.mlp.down_proj" in out
    assert run(source, tmp_path / "few", "--bits", "4", "--group-size", "128") == 0
    kinds = "embed_tokens (1), q_proj (2), k_proj (2), v_proj (2), o_proj (2), gate_proj (2)"
    assert f"not packed, since no group divides their rows: {kinds}" in capsys.readouterr().out
    assert run(tmp_path / "m", tmp_path / "f", "--dequantize", "--dtype", "float16", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["quantized"], found["path"]) == (0, str(tmp_path / "f"))
    assert opened(tmp_path / "f").named_parameters()["model.norm.weight"].dtype == mx.float16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to change: give --bits, --mode, --rule, --dequantize or --dtype"),
        (("--bits", "4", "--dequantize"), "--dequantize writes float weights"),
        (("--bits", "9"), "bits must be one of"),
        (("--mode", "mxfp4", "--bits", "8"), "mxfp4 has 4 bits in groups of 32"),
    ],
)
def test_mistakes_are_one_message(tmp_path, capsys, arguments, message):
    assert run(checkpoint(tmp_path / "source"), tmp_path / "m", *arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_nothing_is_written_over(tmp_path, capsys):
    source = checkpoint(tmp_path / "source")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "notes.txt").write_text("mine")
    assert run(source, tmp_path / "m", "--bits", "8") == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [f.name for f in (tmp_path / "m").iterdir()] == ["notes.txt"]


def test_a_failure_leaves_no_folder(tmp_path, monkeypatch):
    source = checkpoint(tmp_path / "source")
    monkeypatch.setattr("mortice.conversion.copy_others", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        convert(source, tmp_path / "m", Packing.of(8, 32))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["source"]


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="model folder not found"):
        convert(tmp_path / "nowhere", tmp_path / "m", Packing.of(8, 32))

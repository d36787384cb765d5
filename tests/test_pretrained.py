"""Loading of model folders: what is accepted, and what is said of the rest."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path
from typing import ClassVar

import mlx.core as mx
import pytest
from attrs import frozen
from tiny_llama import CONFIG, PLUGINS, checkpoint, distance, logits, tiny, write

from mortice import hub
from mortice.errors import CheckpointError, ConfigError
from mortice.linear import QuantizedEmbedding, QuantizedLinear
from mortice.plugins import load_plugins
from mortice.pretrained import find_adapter, load, random_model
from mortice.registry import Strategy
from mortice_plugins.models.gemma4 import Gemma4Adapter
from mortice_plugins.models.qwen3_5 import Qwen35Adapter

GEMMA, QWEN = Gemma4Adapter.examples, Qwen35Adapter.examples
Q_PROJ = "model.layers.0.self_attn.q_proj"


def weights_of(folder: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(folder / "model.safetensors")))


def rewrite(folder: Path, weights=None, **config) -> Path:
    """The folder with other weights and config keys."""
    old = json.loads((folder / "config.json").read_text())
    return write(folder, weights_of(folder) if weights is None else weights, old | config)


def fails(folder, message, **options) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(folder, plugins=PLUGINS, **options)


def test_one_file(tmp_path):
    found = load(checkpoint(tmp_path / "m"), plugins=PLUGINS)
    assert found.family == "llama"
    assert found.path == tmp_path / "m"
    assert found.ignored == ()
    assert found.tokenizer is None
    assert found.size == sum(w.size for w in weights_of(tmp_path / "m").values())
    assert distance(logits(found.model), logits(tiny().model)) == 0


def shards(folder: Path) -> Path:
    weights = weights_of(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, members in parts.items():
        mx.save_safetensors(str(folder / file), {n: weights[n] for n in members})
    index = {"weight_map": {n: file for file, members in parts.items() for n in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards(tmp_path):
    folder = shards(checkpoint(tmp_path))
    assert distance(logits(load(folder, plugins=PLUGINS).model), logits(tiny().model)) == 0
    (folder / "model-00002-of-00002.safetensors").unlink()
    fails(folder, "1 of 2 shards missing: model-00002-of-00002.safetensors")


def test_weights_stay_as_they_are_stored(tmp_path):
    folder = checkpoint(tmp_path, dtype=mx.bfloat16)
    model = load(folder, plugins=PLUGINS).model
    assert {w.dtype for w in model.named_parameters().values()} == {mx.bfloat16}
    assert model.dtype == mx.float32
    wide = load(folder, plugins=PLUGINS, dtype="float32").model
    assert {w.dtype for w in wide.named_parameters().values()} == {mx.float32}
    assert distance(logits(model), logits(wide)) < 1e-5
    narrow = load(folder, plugins=PLUGINS, dtype="bfloat16").model
    assert narrow.dtype == mx.bfloat16
    assert 1e-5 < distance(logits(narrow), logits(wide)) < 0.1 * mx.abs(logits(wide)).max().item()


def test_an_unknown_type_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"dtype 'float23' is none of auto, float32, .*; did you mean 'float32'\?"):
        load(checkpoint(tmp_path), plugins=PLUGINS, dtype="float23")


def pack(weights, rule) -> dict[str, mx.array]:
    """`rule(name) → (bits, group size, mode)` of each layer, or None."""
    out = {}
    for name, value in weights.items():
        stem = name.removesuffix(".weight")
        if value.ndim < 2 or rule(stem) is None:
            out[name] = value
            continue
        bits, group, mode = rule(stem)
        parts = mx.quantize(value, group_size=group, bits=bits, mode=mode)
        out |= {f"{stem}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts)}
    return out


def unpack(weights, rule) -> dict[str, mx.array]:
    out = {}
    for name, value in weights.items():
        stem, _, part = name.rpartition(".")
        if f"{stem}.scales" not in weights:
            out[name] = value
        elif part == "weight":
            bits, group, mode = rule(stem)
            scales, biases = weights[f"{stem}.scales"], weights.get(f"{stem}.biases")
            out[name] = mx.dequantize(value, scales, biases, group_size=group, bits=bits, mode=mode)
    return out


def mixed(stem: str):
    if stem.endswith("down_proj"):
        return 8, 32, "affine"
    if stem == Q_PROJ:
        return None
    return 4, 64, "affine"


OVERRIDES = {
    Q_PROJ: False,
    **{f"model.layers.{i}.mlp.down_proj": {"group_size": 32, "bits": 8} for i in range(2)},
}


@pytest.mark.parametrize(
    "config",
    [
        {"quantization": {"group_size": 64, "bits": 4, **OVERRIDES}},
        {"quantization_config": {"group_size": 64, "bits": 4, "mode": "affine", **OVERRIDES}},
        {"quantization": {"group_size": 64, "bits": 4}},
        {},
    ],
    ids=["overrides", "quantization_config", "inferred overrides", "inferred"],
)
def test_packed_weights_with_layers_of_their_own(tmp_path, config):
    packed = pack(weights_of(checkpoint(tmp_path / "float")), mixed)
    found = load(write(tmp_path / "packed", packed, CONFIG | config), plugins=PLUGINS)
    modules = {name: module for name, module, _ in found.model.named_modules()}
    assert isinstance(modules["model.embed_tokens"], QuantizedEmbedding)
    assert modules["model.layers.1.mlp.down_proj"].quantization.bits == 8
    assert modules["model.layers.1.mlp.up_proj"].quantization.bits == 4
    assert not isinstance(modules[Q_PROJ], QuantizedLinear)
    assert found.size == tiny().size
    plain = load(write(tmp_path / "plain", unpack(packed, mixed), CONFIG), plugins=PLUGINS)
    assert distance(logits(found.model), logits(plain.model)) < 1e-5


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)])
def test_floating_point_packings(tmp_path, mode, bits, group):
    def rule(stem):
        return bits, group, mode

    packed = pack(weights_of(checkpoint(tmp_path / "float")), rule)
    config = {"quantization": {"group_size": group, "bits": bits, "mode": mode}}
    found = load(write(tmp_path / "packed", packed, CONFIG | config), plugins=PLUGINS)
    plain = load(write(tmp_path / "plain", unpack(packed, rule), CONFIG), plugins=PLUGINS)
    assert distance(logits(found.model), logits(plain.model)) < 1e-5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization": {"group_size": 64, "bits": 4, "lm_head": {"group_size": 64, "bits": 8}}},
         "lm_head is stored with bits 4, config.json says 8 for it"),
        ({"quantization": {"group_size": 64, "bits": 4, "lm_head": {"group_size": 32, "bits": 4}}},
         "lm_head is stored with group_size 64, config.json says 32 for it"),
        ({"quantization": {"group_size": 64, "bits": 4, "lm_head": {"group_size": 64, "bits": 4, "mode": "mxfp4"}}},
         "lm_head is stored with mode affine, config.json says mxfp4 for it"),
        ({"quantization": {"group_size": 64, "bits": 4, "lm_head": False}},
         "lm_head is stored packed, config.json says false for it"),
        ({"quantization": {"group_size": 64, "bits": 4, Q_PROJ: {"group_size": 64, "bits": 4}}},
         f"{Q_PROJ} is stored in floats, config.json says bits 4, group_size 64 for it"),
        ({"quantization": {"group_size": 128, "bits": 3}},
         r"says that weights are packed with bits 3, group_size 128, but no matrix is: model.embed_tokens has 4 bits"),
        ({"quantization_config": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
         r"packed with .*mode mxfp4, but no matrix is: .* \(affine\)"),
        ({"quantization": {"mode": "mxpf4"}}, "quantization.mode 'mxpf4' is unknown; did you mean 'mxfp4'"),
        ({"quantization": "4bit"}, "config.json: quantization must be a table, found '4bit'"),
        ({"text_config": {"quantization_config": [4]}}, "text_config.quantization_config must be a table"),
        ({"hidden_size": 512}, "packed with 0.5 bits in groups of 512 by its shape"),
        ({"hidden_size": 512, "quantization": {"bits": 4}}, "packed with 0.5 bits in groups of 512 by its shape"),
    ],
)  # fmt: skip
def test_what_the_config_says_must_agree_with_the_shapes(tmp_path, config, message):
    packed = pack(weights_of(checkpoint(tmp_path / "float")), mixed)
    fails(write(tmp_path / "packed", packed, CONFIG | config), message)


def test_floats_that_the_config_calls_packed(tmp_path):
    folder = rewrite(checkpoint(tmp_path), quantization={"bits": 4, "group_size": 64})
    fails(folder, "packed .bits 4, group_size 64., but all are stored in floats; remove `quantization`")


def test_scales_without_their_matrix(tmp_path):
    weights = weights_of(checkpoint(tmp_path))
    fails(rewrite(tmp_path, weights | {"lm_head.scales": mx.ones((96, 0))}), "no packed matrix of .96, 64.")
    fails(rewrite(tmp_path, weights | {"lm_head.scales": mx.array(1.0)}), r"lm_head.scales is \[\]")
    fails(rewrite(tmp_path, weights | {"lm_head.scales": mx.ones((96, 2))}), "packed with 32 bits in groups of 32")
    del weights["lm_head.weight"]
    fails(rewrite(tmp_path, weights | {"lm_head.scales": mx.ones((96, 2))}), "lm_head.weight none: no packed matrix")


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        ("gptq", "take the float weights that they were made of, and pack those with mortice convert"),
        ("awq", "mlx_lm.convert writes MLX's packing"),
        ("bitsandbytes", "take the float weights"),
        ("fp8", "take the float weights"),
        ("compressed-tensors", "take the float weights"),
        ("of-tomorrow", "take the float weights"),
    ],
)
def test_packings_of_other_tools_are_named(tmp_path, method, advice):
    folder = rewrite(checkpoint(tmp_path), quantization_config={"quant_method": method, "bits": 4})
    fails(folder, f"quantization_config: weights packed by '{method}' are not read; {advice}")


@pytest.mark.parametrize(
    ("end", "tool"),
    [
        ("qweight", "GPTQ or AWQ"),
        ("weight.absmax", "bitsandbytes"),
        ("weight_scale_inv", "fp8"),
        ("weight_packed", "compressed-tensors"),
        ("global_scale", "nvfp4 with one more scale for all"),
    ],
)
def test_packings_of_other_tools_are_known_by_their_tensors(tmp_path, end, tool):
    """Where config.json says nothing."""
    weights = weights_of(checkpoint(tmp_path)) | {f"{Q_PROJ}.{end}": mx.zeros((8, 8), mx.uint8)}
    fails(rewrite(tmp_path, weights), rf"{Q_PROJ}.{end} is of a packing that is not read \({tool}")


def test_folders_that_are_not_there(tmp_path, monkeypatch):
    checkpoint(tmp_path / "MiniCPM5-1B")
    fails(tmp_path / "MiniCPM5-1b", rf"not found: {tmp_path}/MiniCPM5-1b; did you mean {tmp_path}/MiniCPM5-1B\?")
    monkeypatch.chdir(tmp_path)
    fails("elsewhere", f"model folder not found: {tmp_path}/elsewhere$")
    fails(tmp_path / "MiniCPM5-1B" / "config.json", "is a file; a model is a folder")


def test_files_that_are_missing_or_damaged(tmp_path):
    folder = checkpoint(tmp_path / "m")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    fails(folder, "model.safetensors is damaged or cut short")
    file.write_bytes(b"no header")
    fails(folder, "model.safetensors is damaged or cut short")
    file.unlink()
    fails(folder, r"has no \*.safetensors file")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    fails(folder, r"pickled weights only \(pytorch_model.bin\), which are never read.*convert them to safetensors")
    (folder / "config.json").write_text("[]")
    fails(folder, "config.json: expected a JSON object, found list")
    (folder / "config.json").unlink()
    fails(folder, "config.json not found")


def test_weights_that_do_not_fit(tmp_path):
    folder = checkpoint(tmp_path)
    weights = weights_of(folder)
    dead = {"model.vision.weight": mx.zeros((2, 2)), "model.layers.0.self_attn.rotary_emb.inv_freq": mx.ones(8)}
    extra = weights | dead
    assert load(rewrite(folder, extra), plugins=PLUGINS).ignored == ("model.vision.weight",)
    fails(
        rewrite(folder, weights | {f"{Q_PROJ}.weight": mx.zeros((64, 32))}),
        rf"1 weights of another shape: {Q_PROJ}.weight is \[64, 32\], config.json asks for \[64, 64\]",
    )
    few = {n: w for n, w in weights.items() if "k_proj" not in n}
    fails(
        rewrite(folder, few),
        "2 weights missing: model.layers.0.self_attn.k_proj.weight, model.layers.1.self_attn.k_proj.weight",
    )


def test_an_output_matrix_may_be_absent_only_where_it_is_tied(tmp_path):
    folder = checkpoint(tmp_path)
    weights = weights_of(folder)
    headless = {n: w for n, w in weights.items() if n != "lm_head.weight"}
    fails(rewrite(folder, headless), "1 weights missing: lm_head.weight")
    tied = load(rewrite(folder, headless, tie_word_embeddings=True), plugins=PLUGINS).model
    assert tied.output.name == "model.embed_tokens.weight"
    expected = logits(tied)
    mx.eval(expected)
    dead = load(rewrite(folder, weights, tie_word_embeddings=True), plugins=PLUGINS)
    assert dead.ignored == ()
    assert distance(logits(dead.model), expected) == 0


def test_exactly_one_adapter_claims_a_config():
    with pytest.raises(CheckpointError, match=r"no model adapter handles model_type 'abacus' \(available: .*llama \("):
        find_adapter(PLUGINS, {"model_type": "abacus"})

    @frozen
    class Other:
        """Another Llama."""

        def handles(self, config):
            return config["model_type"] == "llama"

    plugins = load_plugins()
    plugins.registry.add(Strategy("model", "other", Other, "other-dist", "other"))
    with pytest.raises(CheckpointError, match="claimed by mortice:llama and other-dist:other"):
        find_adapter(plugins, {"model_type": "llama"})


def test_a_fallback_is_asked_where_no_other_adapter_claims():
    @frozen
    class Anything:
        """All there is."""

        fallback: ClassVar = True

        def handles(self, config):
            assert config["model_type"] != "llama", "llama is another one's"
            return True

    plugins = load_plugins(enable=["llama"])
    for name in ("anything", "everything"):
        plugins.registry.add(Strategy("model", name, Anything, f"{name}-dist", name))
        assert find_adapter(plugins, {"model_type": "llama"})[0] == "llama"
        if name == "anything":
            assert find_adapter(plugins, {"model_type": "abacus"})[0] == "anything"
    with pytest.raises(CheckpointError, match="claimed by anything-dist:anything and everything-dist:everything"):
        find_adapter(plugins, {"model_type": "abacus"})


def test_loading_takes_the_memory_of_the_file(tmp_path):
    folder = checkpoint(tmp_path, vocab_size=4096, hidden_size=256)
    size = (folder / "model.safetensors").stat().st_size
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = load(folder, plugins=PLUGINS).model
    assert mx.get_peak_memory() - before < 0.1 * size
    mx.eval(model.named_parameters())
    assert mx.get_peak_memory() - before < 1.1 * size


def test_random_weights_are_keyed_by_seed_and_name():
    one, again, other = tiny(0), tiny(0), tiny(1)
    deeper = tiny(0, num_hidden_layers=3).model.named_parameters()
    for name, w in one.model.named_parameters().items():
        assert mx.array_equal(w, again.model.named_parameters()[name])
        assert mx.array_equal(w, deeper[name])
        if w.ndim == 2:
            assert not mx.array_equal(w, other.model.named_parameters()[name])
            assert abs(mx.std(w).item() - 0.2) < 0.02
        else:
            assert mx.array_equal(w, mx.ones_like(w))


def test_a_random_model_from_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "initializer_range"}))
    for path in (tmp_path, tmp_path / "config.json"):
        found = random_model(path, 0, plugins=PLUGINS)
        assert found.path == tmp_path
        assert abs(mx.std(found.model.named_parameters()["lm_head.weight"]).item() - 0.02) < 0.002


def test_a_hub_id_is_fetched(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "cached")
    asked = {}

    def snapshot_download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    monkeypatch.chdir(tmp_path)
    assert load("openbmb/MiniCPM5-1B", plugins=PLUGINS).path == folder
    patterns = asked["openbmb/MiniCPM5-1B"]
    assert "*.safetensors" in patterns and "*.jinja" in patterns
    assert not any(p.endswith((".bin", ".pt", "*")) and p.startswith("*") for p in patterns)
    shutil.copytree(folder, tmp_path / "openbmb" / "MiniCPM5-1B")
    assert load("openbmb/MiniCPM5-1B", plugins=PLUGINS).path == tmp_path / "openbmb" / "MiniCPM5-1B"


def test_a_hub_id_that_cannot_be_fetched(tmp_path, monkeypatch):
    def snapshot_download(name, allow_patterns):
        raise ConnectionError("no route to host\nmore")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    fails("org/name", r"cannot fetch 'org/name' from the hub: ConnectionError: no route to host\. A local folder works")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    fails("org/name", r"'org/name' is no folder here.*pip install 'mortice\[hub\]'")


@pytest.mark.parametrize(
    ("name", "is_id"),
    [("org/name", True), ("org/name-1.5B_x", True), ("name", False), ("./a/b", False), ("/a/b", False),
     ("a/b/c", False), ("~/a", False), ("../b", False)],
)  # fmt: skip
def test_what_looks_like_a_hub_id(name, is_id):
    assert hub.looks_like_hub_id(name) == is_id


# Folders that are not what they should be


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    fails(tmp_path, "is an adapter, not a model")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "lacks weight_map"),
        ({"weight_map": []}, "lacks weight_map"),
        ({"weight_map": {"a": "../elsewhere.safetensors"}}, "no .* beside it: ../elsewhere.safetensors"),
        ({"weight_map": {"a": "pytorch_model.bin"}}, "no .* beside it: pytorch_model.bin"),
        ({"weight_map": {"a": "model-2.safetensors", "b": "model.safetensors"}}, "1 of 2 shards missing: model-2"),
    ],
)
def test_an_index_that_leads_nowhere(tmp_path, index, message):
    folder = checkpoint(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(folder, message)


def test_a_tensor_in_two_files(tmp_path):
    folder = checkpoint(tmp_path)
    weights = weights_of(folder)
    mx.save_safetensors(str(folder / "more.safetensors"), {"model.norm.weight": weights["model.norm.weight"]})
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors") | {"model.norm.weight": "more.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(folder, "1 tensors are in another file of .* too: model.norm.weight")


def test_whole_numbers_where_floats_are_due(tmp_path):
    folder = checkpoint(tmp_path)
    weights = weights_of(folder)
    strange = weights | {f"{Q_PROJ}.weight": mx.zeros((64, 64), mx.uint8)}
    fails(rewrite(folder, strange), rf"1 weights are stored as whole numbers .*: {Q_PROJ}.weight \(uint8\)")


def headed(file, header: dict, size: int, length: int | None = None):
    text = json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(size))


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]}}, None),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
          "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, None),
        ({"a": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 8]}}, None),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 2**60),
    ],
    ids=["beyond", "overlapping", "huge", "header"],
)  # fmt: skip
def test_headers_that_lie_cost_no_memory(tmp_path, header, length):
    folder = checkpoint(tmp_path)
    headed(folder / "model.safetensors", header, 12, length)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    fails(folder, "model.safetensors is damaged or cut short")
    assert mx.get_peak_memory() - before < 10**6


@pytest.mark.parametrize("family", [CONFIG, *GEMMA, *QWEN], ids=["llama", "sharing", "k-is-v", "experts", "qwen3_5"])
def test_every_family_misses_keys_by_name_and_before_weights(tmp_path, family):
    """Sizes that every model has: absent, of another type, zero."""
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        for value, said in ((None, "lacks"), ("64", "must be a whole number"), (0, "must be a whole number"),
                            (True, "must be a whole number")):  # fmt: skip
            config = {k: v for k, v in family.items() if k != key} | ({} if value is None else {key: value})
            (tmp_path / "config.json").write_text(json.dumps(config))
            fails(tmp_path, f"config.json.*{said}" if value is not None else f"config.json lacks '{key}'")
    for key, value in (("rms_norm_eps", "1e-5"), ("rms_norm_eps", -1)):
        (tmp_path / "config.json").write_text(json.dumps(family | {key: value}))
        fails(tmp_path, f"{key} must be a number above 0")

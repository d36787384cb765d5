"""Adapters `lora` and `full`: what trains, how it starts, and folders of mortice, mlx-lm and PEFT."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import mlx.core as mx
import pytest
from tiny_llama import CONFIG, IDS, PLUGINS, checkpoint, distance, logits, tiny, write

from mortice.batch import Completion, Group, Row, Span
from mortice.config import build_strategy
from mortice.context import Randomness, SpanContext, activate
from mortice.errors import CheckpointError, ConfigError
from mortice.linear import Linear
from mortice.objective import WeightedLoss
from mortice.plugins import load_plugins
from mortice.pretrained import load, random_model
from mortice.step import Engine
from mortice_plugins.adapters.full import FullWeights
from mortice_plugins.adapters.lora import LoRA, LoRALinear, block_name, low_rank, recomputed_low_rank, scales_of
from mortice_plugins.backwards.checkpoint import Checkpoint
from mortice_plugins.backwards.full import Full
from mortice_plugins.backwards.segmented import Segmented
from mortice_plugins.heads.dense import Dense
from mortice_plugins.layouts.packed import Packed
from mortice_plugins.layouts.prefix_shared import PrefixShared
from mortice_plugins.layouts.separate import Separate
from mortice_plugins.losses.orpo import ORPO
from mortice_plugins.losses.sft import SFT

Q0 = "model.layers.0.self_attn.q_proj"
LINEAR = (
    "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj",
    "self_attn.v_proj",
)  # fmt: skip


def modules(params) -> list[str]:
    return sorted({name.rpartition(".")[0] for name in params})


def trained(params, seed=9) -> dict[str, mx.array]:
    """The parameters after some training: B is no longer zero."""
    keys = mx.random.split(mx.random.key(seed), len(params))
    return {n: v + 0.1 * mx.random.normal(v.shape, key=k) for (n, v), k in zip(sorted(params.items()), keys)}


def attached(adapter, seed=0, **changes):
    """A model with a trained adapter on it, and the parameters."""
    model = tiny(**changes).model
    params = trained(adapter.attach(model, seed))
    model.bind(params)
    return model, params


def test_every_linear_layer_of_the_blocks_by_default():
    model = tiny().model
    before, names = logits(model), set(model.named_parameters())
    params = LoRA(rank=3).attach(model, 0)
    assert modules(params) == [f"model.layers.{i}.{name}" for i in range(2) for name in LINEAR]
    assert params[f"{Q0}.lora_a"].shape == (64, 3)
    assert params["model.layers.0.self_attn.k_proj.lora_b"].shape == (3, 32)
    assert {p.dtype for p in params.values()} == {mx.float32}
    assert set(model.named_parameters()) == names | set(params)
    assert distance(logits(model), before) == 0


def test_the_product():
    """One layer by hand: x = (1, 2), W = 0, A = (1, 10)ᵀ, B = (3), scale 2: 2 · 21 · 3."""
    layer = LoRALinear(Linear(2, 1), rank=1, scale=2.0)
    layer.lora_a, layer.lora_b = mx.array([[1.0], [10.0]]), mx.array([[3.0]])
    assert layer(mx.array([[1.0, 2.0]])).item() == 126.0


def test_adapters_stay_float32_below_narrow_activations(tmp_path):
    model = load(checkpoint(tmp_path, dtype=mx.bfloat16), plugins=PLUGINS, dtype="bfloat16").model
    params = trained(LoRA().attach(model, 0))
    model.bind(params)
    layer = next(m for name, m, _ in model.named_modules() if name == Q0)
    x = mx.random.normal((3, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    wide = x.astype(mx.float32)
    delta = 2.0 * (wide @ params[f"{Q0}.lora_a"]) @ params[f"{Q0}.lora_b"]
    expected = wide @ layer["_base"].weight.astype(mx.float32).T + delta
    assert layer(x).dtype == mx.bfloat16
    assert distance(layer(x), expected) < 0.02 * mx.abs(expected).max().item()


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        (["q_proj"], [Q0, "model.layers.1.self_attn.q_proj"]),
        (["self_attn.?_proj"], [f"model.layers.{i}.self_attn.{x}_proj" for i in range(2) for x in "koqv"]),
        (["layers.1.mlp.*"], [f"model.layers.1.mlp.{x}_proj" for x in ("down", "gate", "up")]),
        ([Q0, "mlp.up_proj"], ["model.layers.0.mlp.up_proj", Q0, "model.layers.1.mlp.up_proj"]),
    ],
)
def test_targets(targets, chosen):
    assert modules(LoRA(targets=targets).attach(tiny().model, 0)) == sorted(chosen)


def test_the_last_layers():
    params = LoRA(layers=1, targets=["q_proj"]).attach(tiny().model, 0)
    assert modules(params) == ["model.layers.1.self_attn.q_proj"]


def test_case_b42_target_names_that_match_nothing():
    """None of the names, one of two, a name that LoRA cannot adapt: an error that lists what there is."""
    every = r"\(this model has " + ", ".join(LINEAR) + r"\)"
    for targets, message in [
        (["attn.qkv_proj"], f"'attn.qkv_proj' matches no linear layer.*{every}"),
        (["q_proj", "c_attn"], f"'c_attn' matches no linear layer.*{every}"),
        (["qproj"], r"'qproj' matches no linear layer; did you mean 'q_proj'\?"),
        (["o_proj", "lm_head"], "'lm_head' matches no linear layer, since LoRA on embeddings and output matrices"),
        (["embed_tokens"], "'embed_tokens' matches no linear layer, since LoRA on embeddings"),
    ]:  # fmt: skip
        model = tiny().model
        names = set(model.named_parameters())
        with pytest.raises(ConfigError, match=message) as caught:
            LoRA(targets=targets).attach(model, 0)
        assert "'q_proj' matches" not in str(caught.value)
        assert set(model.named_parameters()) == names
    with pytest.raises(ConfigError, match=r"adapter\.layers: 99 asked for, the model has 2"):
        LoRA(layers=99).attach(tiny().model, 0)
    with pytest.raises(ConfigError, match="0 trainable parameters; no target lies in the last 1 layers"):
        LoRA(layers=1, targets=["layers.0.*"]).attach(tiny().model, 0)
    for layers in (0, -1):
        with pytest.raises(ValueError, match="'layers' must be >= 1"):
            LoRA(layers=layers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 2.0, "alpha": 16.0}, "scale and alpha say the same thing"),
        ({"rank": 0}, "'rank' must be >= 1"),
        ({"scale": 0.0}, "'scale' must be > 0"),
        ({"targets": "q_proj"}, "targets must be a list of at least one name, found 'q_proj'"),
        ({"targets": []}, "targets must be a list of at least one name"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LoRA(**options)


def test_scale_or_alpha():
    assert LoRA().factor == 2.0
    assert LoRA(rank=8, scale=0.5).factor == 0.5
    assert LoRA(rank=64, alpha=16.0).factor == 0.25


def test_case_b34_initial_values_depend_on_seed_and_name_alone():
    def fresh(seed, draws=0, **options):
        for _ in range(draws):
            mx.random.normal((3,))
        return LoRA(**options).attach(tiny().model, seed)

    zero = fresh(0)
    for same in (fresh(0, draws=3), fresh(0, targets=["q_proj", "down_proj"]), fresh(0, layers=1)):
        assert all(mx.array_equal(v, zero[n]) for n, v in same.items())
    one = fresh(1)
    for name, value in zero.items():
        if name.endswith("lora_b"):
            assert not value.any().item()
        else:
            assert not mx.array_equal(value, one[name])
            bound = 1 / math.sqrt(value.shape[0])
            assert 0.9 * bound < mx.abs(value).max().item() <= bound
    hashes = {v.sum().item() for n, v in zero.items() if n.endswith("lora_a")}
    assert len(hashes) == 14  # no two layers start alike


def test_the_base_leaves_the_model_as_it_was():
    adapter = LoRA()
    model, params = attached(adapter)
    assert distance(logits(model), logits(tiny().model)) > 1e-2
    model.bind(adapter.base(params))
    assert distance(logits(model), logits(tiny().model)) == 0


def test_a_folder_written_and_read(tmp_path):
    folder, path = checkpoint(tmp_path / "m"), tmp_path / "adapter"
    adapter = LoRA(rank=4, alpha=6.0, layers=1, targets=["q_proj", "mlp.*"])
    model, params = attached(adapter)
    adapter.save(model, params, path)
    config = json.loads((path / "adapter_config.json").read_text())
    assert (config["fine_tune_type"], config["num_layers"]) == ("lora", 1)
    assert config["lora_parameters"] == {
        "rank": 4, "scale": 1.5, "dropout": 0.0,
        "keys": ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj"],
    }  # fmt: skip
    assert config["mortice"]["adapter"]["alpha"] == 6.0
    found = load(folder, plugins=PLUGINS, adapter=path)
    assert isinstance(found.adapter, LoRA)
    assert (found.adapter.rank, found.adapter.factor) == (4, 1.5)
    assert set(found.params) == set(params)
    assert distance(logits(found.model), logits(model)) == 0
    again = adapter.load(model, path, adapter.base(params))
    assert all(mx.array_equal(again[n], v) for n, v in params.items())


def test_a_folder_that_does_not_fit(tmp_path):
    path = tmp_path / "adapter"
    adapter = LoRA(rank=4, targets=["q_proj", "k_proj"])
    model, params = attached(adapter)
    adapter.save(model, params, path)
    for other, message in [
        (LoRA(rank=8, targets=["q_proj", "k_proj"]), rf"{Q0}.lora_a is \[64, 4\], the model needs \[64, 8\]"),
        (LoRA(rank=4, targets=["q_proj"]), "k_proj.lora_a has no place"),
        (LoRA(rank=4, targets=["q_proj", "k_proj", "v_proj"]), "v_proj.lora_a is missing"),
        (LoRA(rank=4, scale=1.0, targets=["q_proj", "k_proj"]), r"another scale: .*q_proj 2 \(here 1\)"),
    ]:
        model, params = attached(other)
        before = logits(model)
        with pytest.raises(CheckpointError, match=message):
            other.load(model, path, params)
        assert distance(logits(model), before) == 0
    small = checkpoint(tmp_path / "small", hidden_size=32)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load(small, plugins=PLUGINS, adapter=path)
    with pytest.raises(CheckpointError, match="adapter folder not found"):
        load(small, plugins=PLUGINS, adapter=tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"is no adapter that can be read \(adapter kinds: full, lora\)"):
        load(small, plugins=PLUGINS, adapter=small)
    (path / "adapters.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"adapters.safetensors is damaged or cut short"):
        load(small, plugins=PLUGINS, adapter=path)


def peft(path: Path, ranks: dict[str, int], seed=0, **config) -> tuple[Path, dict[str, mx.array]]:
    """A PEFT folder with random factors, and the product B A `[out, in]` of each module."""
    weights, tensors, products = tiny().model.named_parameters(), {}, {}
    for i, (module, r) in enumerate(ranks.items()):
        out, inputs = weights[f"{module}.weight"].shape
        a = mx.random.normal((r, inputs), key=mx.random.key(seed + 2 * i)) / 8
        b = mx.random.normal((out, r), key=mx.random.key(seed + 2 * i + 1)) / 8
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        products[module] = b @ a
    path.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(path / "adapter_model.safetensors"), tensors, metadata={"format": "pt"})
    options = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"} | config
    (path / "adapter_config.json").write_text(json.dumps(options))
    return path, products


DOWN1 = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("config", "rank_of_down", "scales"),
    [
        ({}, 8, (2.0, 2.0)),
        ({"use_rslora": True}, 8, (5.656854, 5.656854)),
        ({"rank_pattern": {"down_proj": 2}}, 2, (2.0, 8.0)),
        ({"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"down_proj": 4}}, 2, (2.0, 2.0)),
        ({"alpha_pattern": {r"layers\.1\.mlp\..*": 4}}, 8, (2.0, 0.5)),
        ({"rank_pattern": {"down_proj": 4}, "use_rslora": True}, 4, (5.656854, 8.0)),
    ],
    ids=["plain", "rslora", "rank", "rank and alpha", "alpha", "rank and rslora"],
)
def test_peft_folders(tmp_path, config, rank_of_down, scales):
    """q_proj is square (64 × 64), which hides a missing transpose; the weights themselves are compared."""
    path, products = peft(tmp_path / "peft", {Q0: 8, DOWN1: rank_of_down}, **config)
    found = load(checkpoint(tmp_path / "m"), plugins=PLUGINS, adapter=path)
    merged = tiny().model
    weights = merged.named_parameters()
    for module, scale in zip((Q0, DOWN1), scales):
        a, b = found.params[f"{module}.lora_a"], found.params[f"{module}.lora_b"]
        assert distance((a @ b).T, products[module]) < 1e-6
        merged.bind({f"{module}.weight": weights[f"{module}.weight"] + scale * products[module]})
    assert distance(logits(found.model), logits(merged)) < 1e-4
    found.adapter.save(found.model, found.params, tmp_path / "ours")
    ours = load(tmp_path / "m", plugins=PLUGINS, adapter=tmp_path / "ours")
    assert distance(logits(ours.model), logits(found.model)) < 1e-4
    padded = mx.load(str(tmp_path / "ours" / "adapters.safetensors"))  # as mlx-lm reads it
    assert {v.shape[1] for n, v in padded.items() if n.endswith("lora_a")} == {8}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights = pissa_niter_16"),
        ({"peft_type": "IA3"}, "peft_type = IA3"),
    ],
)
def test_peft_features_without_a_counterpart(tmp_path, config, message):
    path, _ = peft(tmp_path / "peft", {Q0: 8}, **config)
    with pytest.raises(CheckpointError, match=f"PEFT features without a counterpart here: {message}$"):
        load(checkpoint(tmp_path / "m"), plugins=PLUGINS, adapter=path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.embed_tokens.lora_embedding_A": mx.zeros((8, 96))}, "lora_embedding_A' has no counterpart"),
        ({f"{Q0}.lora_magnitude_vector": mx.zeros(64)}, "lora_magnitude_vector' has no counterpart"),
        ({f"{Q0}.lora_B.weight": mx.zeros((64, 4))}, rf"{Q0}.lora_b is \[4, 64\], the model needs \[8, 64\]"),
        ({f"{Q0}.lora_B.weight": None}, f"{Q0}.lora_b is missing"),
        ({f"{Q0}.lora_A.weight": None}, f"lacks the first factor of {Q0}"),
        ({"model.layers.9.mlp.up_proj.lora_A.weight": mx.zeros((8, 64))}, "no linear layer model.layers.9.mlp.up_proj"),
    ],
)
def test_peft_tensors_that_do_not_fit(tmp_path, change, message):
    path, _ = peft(tmp_path / "peft", {Q0: 8})
    tensors = dict(mx.load(str(path / "adapter_model.safetensors")))
    mx.eval(tensors)
    tensors |= {f"base_model.model.{name}": value for name, value in change.items()}
    kept = {n: v for n, v in tensors.items() if v is not None}
    mx.save_safetensors(str(path / "adapter_model.safetensors"), kept)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint(tmp_path / "m"), plugins=PLUGINS, adapter=path)


def test_mlx_folders_that_are_refused(tmp_path):
    adapter = LoRA(targets=["q_proj"])
    model, params = attached(adapter)
    folder, path = checkpoint(tmp_path / "m"), tmp_path / "adapter"
    adapter.save(model, params, path)
    config = json.loads((path / "adapter_config.json").read_text())
    for change, message in [
        ({"fine_tune_type": "dora"}, "only plain LoRA can be read here, found DoRA"),
        ({"lora_parameters": {"rank": 16}}, "adapter_config.json lacks lora_parameters.scale"),
    ]:
        (path / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=message):
            load(folder, plugins=PLUGINS, adapter=path)


def theirs(folder: Path, adapter: Path | None = None):
    """mlx-lm's model, with its own loading of adapters."""
    utils = pytest.importorskip("mlx_lm.utils")
    model, _ = utils.load_model(folder)
    return model if adapter is None else utils.load_adapters(model, str(adapter))


def packed(folder: Path) -> Path:
    """The tiny model in 4 bits."""
    weights = {}
    for name, value in tiny().model.named_parameters().items():
        if value.ndim == 2 and value.shape[1] % 32 == 0:
            parts = mx.quantize(value, group_size=32, bits=4)
            stem = name.removesuffix(".weight")
            weights |= {f"{stem}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts)}
        else:
            weights[name] = value
    return write(folder, weights, CONFIG | {"quantization": {"group_size": 32, "bits": 4}})


@pytest.mark.parametrize("options", [{}, {"layers": 1}, {"rank": 4, "alpha": 2.0, "targets": ["q_proj", "mlp.*"]}])
@pytest.mark.parametrize("make", [checkpoint, packed])
def test_mlx_lm_loads_what_is_saved(tmp_path, make, options):
    folder, path = make(tmp_path / "m"), tmp_path / "adapter"
    adapter = LoRA(**options)
    model = load(folder, plugins=PLUGINS).model
    before = logits(model)
    params = trained(adapter.attach(model, 0))
    model.bind(params)
    adapter.save(model, params, path)
    assert distance(logits(model), before) > 1e-2
    assert distance(theirs(folder, path)(mx.array([IDS]))[0], logits(model)) < 1e-3


def test_what_mlx_lm_saves_is_loaded(tmp_path):
    tuner = pytest.importorskip("mlx_lm.tuner.utils")
    folder, path = checkpoint(tmp_path / "m"), tmp_path / "adapter"
    model = theirs(folder)
    model.freeze()
    options = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    tuner.linear_to_lora_layers(model, 1, options)
    from mlx.utils import tree_flatten

    tensors = trained(dict(tree_flatten(model.trainable_parameters())))
    model.load_weights(list(tensors.items()), strict=False)
    path.mkdir()
    mx.save_safetensors(str(path / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": options}
    (path / "adapter_config.json").write_text(json.dumps(config))
    found = load(folder, plugins=PLUGINS, adapter=path)
    assert {block_name(name) for name in modules(found.params)} == set(LINEAR)
    assert distance(logits(found.model), model(mx.array([IDS]))[0]) < 1e-3


def test_full_weights(tmp_path):
    """Every float weight trains in float32, a tied one once."""
    folder = checkpoint(tmp_path / "m", dtype=mx.bfloat16, tie_word_embeddings=True)
    model, adapter = load(folder, plugins=PLUGINS).model, FullWeights()
    params = adapter.attach(model, 0)
    assert set(params) == set(model.named_parameters())
    assert "lm_head.weight" not in params
    assert {p.dtype for p in params.values()} == {mx.float32}
    params = {n: p * 1.1 for n, p in params.items()}
    model.bind(params)
    adapter.save(model, params, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["fine_tune_type"] == "full"
    found = load(folder, plugins=PLUGINS, adapter=tmp_path / "adapter")
    assert isinstance(found.adapter, FullWeights)
    assert distance(logits(found.model), logits(model)) == 0
    assert distance(theirs(folder, tmp_path / "adapter")(mx.array([IDS]))[0], logits(model)) < 1e-3
    other = checkpoint(tmp_path / "other", hidden_size=32, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load(other, plugins=PLUGINS, adapter=tmp_path / "adapter")


def test_full_weights_refuses_packed_ones_and_has_no_base(tmp_path):
    model = load(packed(tmp_path / "m"), plugins=PLUGINS).model
    with pytest.raises(ConfigError, match=r"cannot train quantized weights.*embed_tokens.scales.*convert --dequantize"):
        FullWeights().attach(model, 0)
    with pytest.raises(ConfigError, match='use "initial"'):
        FullWeights().base({})


def test_the_hand_written_backward_of_the_low_rank_term_equals_autodiff():
    key = mx.random.key(3)
    x, a, b, dy = (
        mx.random.normal(shape, key=k) for shape, k in zip([(7, 6), (6, 2), (2, 5), (7, 5)], mx.random.split(key, 4))
    )
    for dtype, bound in ((mx.float32, 1e-5), (mx.bfloat16, 1e-2)):
        inputs = [x.astype(dtype), a, b]
        (plain,), expected = mx.vjp(lambda *p: [low_rank(*p, 0.7)], inputs, [dy])
        (hand,), found = mx.vjp(lambda *p: [recomputed_low_rank(*p, 0.7)], inputs, [dy])
        assert distance(plain, hand) == 0.0
        assert [g.dtype for g in found] == [dtype, mx.float32, mx.float32]
        assert all(distance(f, e) < bound for f, e in zip(found, expected))


def test_half_precision_activations_are_kept_once(monkeypatch):
    """By autodiff each layer that reads x keeps it once more in float32."""
    model = random_model(CONFIG | {"num_hidden_layers": 4}, 0, plugins=PLUGINS, dtype="bfloat16").model
    params = LoRA(rank=4).attach(model, 0)
    model.mark_trainable(params)
    groups = [Group("g", [i % 90 for i in range(400)], [Completion([5, 6, 7])])]
    engine = Engine(model, Dense(), Full(), Separate(), (WeightedLoss("sft", SFT()),))

    def peak() -> int:
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        engine.gradients(params, groups)
        return mx.get_peak_memory() - before

    peak()  # reads the weights
    found = peak()
    monkeypatch.setattr("mortice_plugins.adapters.lora.recomputed_low_rank", low_rank)
    assert found < 0.9 * peak()


@pytest.mark.parametrize(
    ("backward", "layout"),
    [
        *itertools.product((Segmented(segment_size=1), Checkpoint()), (Separate(), PrefixShared(), Packed())),
        (Segmented(segment_size=1, compile=True), Separate()),
    ],
)
def test_dropout_is_the_same_in_every_backward_and_layout(backward, layout):
    groups = [Group("a", [1, 2, 3], [Completion([4, 5, 6]), Completion([7, 8])], ((0, 1),)),
              Group("b", [5, 1], [Completion([4, 4]), Completion([7])], ((0, 1),))]  # fmt: skip
    model, params = attached(LoRA(rank=4, dropout=0.4))
    model.mark_trainable(params)
    losses = (WeightedLoss("orpo", ORPO()),)
    plain, expected = Engine(model, Dense(), Full(), Separate(), losses).gradients(params, groups, Randomness(0, 3))
    engine = Engine(model, Dense(), backward, layout, losses, mlp_chunk=2)
    tally, found = engine.gradients(params, groups, Randomness(0, 3))
    assert tally.loss == pytest.approx(plain.loss, abs=1e-5)
    for name, value in expected.items():
        assert mx.abs(found[name] - value).max().item() <= 1e-4 * mx.abs(value).max().item(), name
    without, _ = Engine(model, Dense(), Full(), Separate(), losses).gradients(params, groups)
    other, _ = Engine(model, Dense(), Full(), Separate(), losses).gradients(params, groups, Randomness(0, 4))
    assert len({plain.loss, without.loss, other.loss}) == 3


def test_dropout_drops_its_share_and_keeps_the_mean():
    layer = LoRALinear(Linear(1000, 1), rank=1, scale=1.0, name="m", dropout=0.25)
    ctx = SpanContext(Row([1] * 50, [Span(0, 50, None, 0, "s")], [], [], [], [], []), randomness=Randomness(0, 0))
    with activate(ctx):
        dropped = layer._dropped(mx.ones((50, 1000)))
    assert (dropped == 0).mean().item() == pytest.approx(0.25, abs=0.01)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.01)
    assert mx.array_equal(layer._dropped(mx.ones((2, 1000))), mx.ones((2, 1000)))  # no context: no draw


def test_rslora_divides_by_the_root_of_the_rank():
    assert LoRA(rank=16, alpha=8).factor == 0.5 and LoRA(rank=16, alpha=8, rslora=True).factor == 2.0
    model, _ = attached(LoRA(rank=4, alpha=8, rslora=True))
    assert set(scales_of(model).values()) == {4.0}


def test_ranks_and_alphas_by_pattern(tmp_path):
    adapter = LoRA(rank=4, alpha=8, rank_pattern={"v_proj": 2, "layers.0.*": 1}, alpha_pattern={"o_proj": 1.0})
    model, params = attached(adapter)
    scales = scales_of(model)
    for layer, v_rank, q_rank in ((0, 2, 1), (1, 2, 4)):
        part = f"model.layers.{layer}.self_attn"
        assert params[f"{part}.v_proj.lora_a"].shape[1] == v_rank and params[f"{part}.q_proj.lora_a"].shape[1] == q_rank
        assert scales[f"{part}.v_proj"] == 8 / v_rank and scales[f"{part}.o_proj"] == 1 / q_rank
    adapter.save(model, params, tmp_path / "saved")
    again, _ = attached(adapter)
    loaded = adapter.load(again, tmp_path / "saved", params)
    assert all(mx.array_equal(loaded[name], value) for name, value in params.items())
    bare = tiny().model
    _, found = LoRA.from_folder(tmp_path / "saved", bare)
    assert all(mx.array_equal(found[n], v) for n, v in params.items()) and scales_of(bare) == scales
    model.bind(params)
    assert distance(logits(model), logits(bare)) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rslora": True}, "rslora goes by alpha"),
        ({"alpha_pattern": {"v_proj": 2.0}}, "alpha_pattern goes by alpha"),
        ({"rank_pattern": {"v_proj": 0}}, "rank_pattern.v_proj must be 1 or more"),
        ({"alpha": 2.0, "alpha_pattern": {"v_proj": 0.0}}, "alpha_pattern.v_proj must be above 0"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_options_of_lora_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        build_strategy(load_plugins(), "adapter", {"name": "lora", **options})


def test_a_pattern_without_a_layer_is_named():
    with pytest.raises(ConfigError, match=r"'v_prj' names no adapted layer; did you mean 'v_proj'"):
        attached(LoRA(rank_pattern={"v_prj": 3}))

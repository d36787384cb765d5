"""Every family against mlx-lm itself: logits, gradients, rows that branch, decoding, adapters, packed weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import CARRIED, DEEP, REFUSED, WORKS, row
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import load_adapters
from mortice_mlx_lm import caches
from mortice_mlx_lm.adapter import MlxLmAdapter, build
from mortice_mlx_lm.model import Addressed, LogitLaw, MlxLmModel, logit_law
from mortice_mlx_lm.refusal import Refused
from mortice_mlx_lm.twin import prove, small_twin

from mortice.batch import Completion, Group
from mortice.context import CacheContext, SpanContext
from mortice.conversion import Packing, convert_checkpoint
from mortice.errors import CheckpointError
from mortice.generation import generate_tokens
from mortice.objective import WeightedLoss
from mortice.plugins import load_plugins
from mortice.pretrained import find_adapter, load
from mortice.protocols import EngineContext, Request, Sampling
from mortice.registry import Strategy
from mortice.step import Engine
from mortice_plugins.adapters.full import FullWeights
from mortice_plugins.adapters.lora import LoRA
from mortice_plugins.backwards.checkpoint import Checkpoint
from mortice_plugins.backwards.full import Full
from mortice_plugins.backwards.segmented import Segmented
from mortice_plugins.heads.dense import Dense
from mortice_plugins.heads.flash_cce import FlashCCE
from mortice_plugins.layouts.packed import Packed
from mortice_plugins.layouts.prefix_shared import PrefixShared
from mortice_plugins.layouts.separate import Separate
from mortice_plugins.losses.orpo import ORPO
from mortice_plugins.losses.sft import SFT
from mortice_plugins.rollouts.kv_cache import KVCache

README = Path(__file__).parent.parent / "README.md"
IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
PAIRS = [
    Group("a", [1, 2, 3, 4, 8, 8, 5], [Completion([5, 6, 7, 8]), Completion([8])], ((0, 1),)),
    Group("b", [9, 3], [Completion([2, 2, 11, 4]), Completion([1, 12, 30])], ((0, 1),)),
]


class Unread:
    """In the place of a tokenizer, where nobody reads the text."""

    def decode(self, ids):
        return ""


def plugins():
    found = load_plugins()
    if not any(s.name == "mlx-lm" for s in found.registry.all("model")):
        found.registry.add(Strategy("model", "mlx-lm", MlxLmAdapter, "mortice-mlx-lm", "mlx-lm"))
    return found


def config_of(family):
    return {"model_type": family} | (WORKS.get(family) or REFUSED[family][0])


def weights_of(model: nn.Module) -> dict[str, mx.array]:
    drawn = {}
    for i, (name, value) in enumerate(tree_flatten(model.parameters())):
        noise = mx.random.normal(value.shape, key=mx.random.key(i))
        drawn[name] = 0.12 * noise if value.ndim > 1 else 1 + 0.2 * noise if name.endswith("weight") else 0.1 * noise
    return drawn


def checkpoint(folder: Path, family: str) -> Path:
    config = config_of(family)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights_of(build(config)), metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def engine(model, backward=None, layout=None, head=None, loss=None) -> Engine:
    losses = (WeightedLoss("loss", loss or ORPO()),)
    return Engine(model, head or Dense(), backward or Full(), layout or Separate(), losses)


def relative(found, expected) -> float:
    assert set(found) == set(expected)
    apart = sum(mx.square(found[n] - expected[n]).sum().item() for n in expected)
    return math.sqrt(apart / sum(mx.square(v).sum().item() for v in expected.values()))


def trained(model, strategy):
    params = strategy.attach(model, 0)
    params = {n: p + 0.02 * mx.random.normal(p.shape, key=mx.random.key(i)) for i, (n, p) in enumerate(params.items())}
    model.mark_trainable(params)
    return params


@pytest.mark.parametrize("family", WORKS)
def test_forward_and_decoding_equal_mlx_lm(tmp_path, family):
    folder = checkpoint(tmp_path, family)
    ours = load(folder, plugins=plugins())
    assert (ours.family, ours.ignored) == ("mlx-lm", ())
    assert ours.size == sum(value.size for value in ours.model.named_parameters().values())
    theirs, _ = utils.load_model(folder)
    assert (ours.model.carried > 0) == (family in CARRIED)
    if CARRIED.get(family, "").startswith("all"):
        assert ours.model.carried == len(ours.model.blocks)
    model, ids = ours.model, list(IDS)
    found = engine(model).logprobs({}, [Group("a", IDS[:4], [Completion(IDS[4:])])])[0][0]
    expected = nn.log_softmax(theirs(mx.array([IDS]))[0].astype(mx.float32), axis=-1)
    targets = mx.array(IDS[4:])
    expected = mx.take_along_axis(expected[3:-1], targets[:, None], axis=1)[:, 0]
    assert mx.abs(mx.array(found) - expected).max().item() < 1e-4
    for _ in range(12):
        ids.append(int(mx.argmax(theirs(mx.array([ids]))[0, -1]).item()))
    greedy = Sampling(max_tokens=12, temperature=0.0)
    assert list(generate_tokens(model, IDS, greedy)) == ids[len(IDS) :]
    asked = [Request(tuple(IDS), "all"), Request(tuple(IDS[:5]), "some")]
    together = KVCache().open(EngineContext(model, Unread(), print)).generate(asked, greedy)
    found = {index: list(completion.ids) for index, _, completion in together}
    assert found == {0: ids[len(IDS) :], 1: list(generate_tokens(model, IDS[:5], greedy))}


@pytest.mark.parametrize("family", DEEP)
def test_gradients_equal_autodiff_of_mlx_lm(tmp_path, family):
    folder = checkpoint(tmp_path, family)
    theirs, _ = utils.load_model(folder)
    model = load(folder, plugins=plugins()).model
    params = FullWeights().attach(model, 0)
    model.mark_trainable(params)

    def loss(weights):
        theirs.update(tree_unflatten(list(weights.items())))
        logprobs = nn.log_softmax(theirs(mx.array([IDS[:-1]]))[0].astype(mx.float32), axis=-1)
        return -mx.take_along_axis(logprobs[3:], mx.array(IDS[4:])[:, None], axis=1).mean()

    value, expected = mx.value_and_grad(loss)({n: p.astype(mx.float32) for n, p in params.items()})
    group = [Group("a", IDS[:4], [Completion(IDS[4:])])]
    for backward in (Full(), Segmented(segment_size=1), Checkpoint(segment_size=1)):
        tally, found = engine(model, backward, head=FlashCCE(), loss=SFT()).gradients(params, group)
        assert tally.loss == pytest.approx(value.item(), abs=1e-5)
        assert relative(found, expected) < 1e-4


@pytest.mark.parametrize("family", DEEP)
def test_rows_that_branch_and_segments_give_the_same(tmp_path, family):
    model = load(checkpoint(tmp_path, family), plugins=plugins()).model
    params = trained(model, LoRA(rank=2))
    plain, expected = engine(model).gradients(params, PAIRS)
    assert all(mx.abs(value).max().item() > 0 for value in expected.values())
    for backward, layout in (
        (Full(), PrefixShared()),
        (Segmented(segment_size=1), Packed()),
        (Segmented(), Separate()),
        *([(Segmented(compile=True), PrefixShared())] if family == "qwen2" else []),
    ):
        tally, found = engine(model, backward, layout, FlashCCE()).gradients(params, PAIRS)
        assert tally.loss == pytest.approx(plain.loss, abs=1e-5)
        assert relative(found, expected) < 1e-4


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "gemma2", "nemotron_h"])
def test_gradients_of_lora_equal_autodiff_of_mlx_lms_own(tmp_path, family):
    """mlx-lm puts LoRA of its own around its layers; the saved parameters go there, and its autodiff is compared."""
    folder = checkpoint(tmp_path / "model", family)
    model = load(folder, plugins=plugins()).model
    strategy = LoRA(rank=2)
    params = trained(model, strategy)
    strategy.save(model, params, tmp_path / "adapter")
    theirs, _ = utils.load_model(folder)
    theirs = load_adapters(theirs, str(tmp_path / "adapter"))

    def loss(weights):
        theirs.update(tree_unflatten(list(weights.items())))
        logprobs = nn.log_softmax(theirs(mx.array([IDS[:-1]]))[0].astype(mx.float32), axis=-1)
        return -mx.take_along_axis(logprobs[3:], mx.array(IDS[4:])[:, None], axis=1).mean()

    value, expected = mx.value_and_grad(loss)(dict(params))
    tally, found = engine(model, Segmented(), head=FlashCCE(), loss=SFT()).gradients(
        params, [Group("a", IDS[:4], [Completion(IDS[4:])])]
    )
    assert tally.loss == pytest.approx(value.item(), abs=1e-5)
    assert relative(found, expected) < 1e-4


@pytest.mark.parametrize("family", ["qwen2", "phi3", "cohere2", "mixtral", "mistral3", "gemma2", "qwen3_next"])
def test_adapters_load_in_mlx_lm(tmp_path, family):
    folder = checkpoint(tmp_path / "model", family)
    model = load(folder, plugins=plugins()).model
    strategy = LoRA(rank=2)
    params = trained(model, strategy)
    model.bind(params)
    strategy.save(model, params, tmp_path / "adapter")
    theirs, _ = utils.load_model(folder)
    theirs = load_adapters(theirs, str(tmp_path / "adapter"))
    found = engine(model).logprobs(params, [Group("a", IDS[:4], [Completion(IDS[4:])])])[0][0]
    expected = nn.log_softmax(theirs(mx.array([IDS]))[0].astype(mx.float32), axis=-1)
    expected = mx.take_along_axis(expected[3:-1], mx.array(IDS[4:])[:, None], axis=1)[:, 0]
    assert mx.abs(mx.array(found) - expected).max().item() < 1e-4


@pytest.mark.parametrize("family", ["qwen2", "granite", "mixtral", "gemma2", "gpt_oss"])
def test_packed_weights_train(tmp_path, family):
    source = checkpoint(tmp_path / "source", family)
    convert_checkpoint(source, tmp_path / "packed", packing=Packing.of(4, 32), plugins=plugins())
    convert_checkpoint(tmp_path / "packed", tmp_path / "floats", dequantize=True, plugins=plugins())
    gradients = []
    for name in ("packed", "floats"):
        model = load(tmp_path / name, plugins=plugins()).model
        params = trained(model, LoRA(rank=2))
        gradients.append(engine(model, Segmented()).gradients(params, PAIRS)[1])
    assert relative(*gradients) < 1e-4
    theirs, _ = utils.load_model(tmp_path / "packed")
    found = engine(load(tmp_path / "packed", plugins=plugins()).model).logprobs(
        {}, [Group("a", IDS[:4], [Completion(IDS[4:])])]
    )
    expected = nn.log_softmax(theirs(mx.array([IDS]))[0].astype(mx.float32), axis=-1)
    expected = mx.take_along_axis(expected[3:-1], mx.array(IDS[4:])[:, None], axis=1)[:, 0]
    assert mx.abs(mx.array(found[0][0]) - expected).max().item() < 1e-4


@pytest.mark.parametrize("family", ["gemma", "granite", "gpt2", "mamba", "apertus"])
def test_half_precision_weights_compute_in_float32(tmp_path, family):
    """As on every CPU: the family's own code would round norms, scales and decays in the type that is stored."""
    half = {
        n: w.astype(mx.bfloat16) for n, w in mx.load(str(checkpoint(tmp_path, family) / "model.safetensors")).items()
    }
    mx.eval(half)
    gradients = []
    for weights in (half, {n: w.astype(mx.float32) for n, w in half.items()}):
        mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, metadata={"format": "mlx"})
        model = load(tmp_path, plugins=plugins()).model
        params = trained(model, LoRA(rank=2))
        gradients.append(engine(model, Segmented(), Packed(), FlashCCE()).gradients(params, PAIRS)[1])
    assert relative(*gradients) < 1e-4


def test_weights_under_their_first_names(tmp_path):
    """A folder of transformers' names, each expert a tensor of its own: mlx-lm's family says what they become."""
    folder = checkpoint(tmp_path / "mlx", "mixtral")
    expected = load(folder, plugins=plugins()).model.named_parameters()
    stored = dict(mx.load(str(folder / "model.safetensors")))
    for name in [name for name in stored if "switch_mlp" in name]:
        experts = stored.pop(name)
        before, _, part = name.partition("switch_mlp.")
        number = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[part.partition(".")[0]]
        stored |= {f"{before}experts.{i}.{number}.weight": one for i, one in enumerate(experts)}
    other = tmp_path / "transformers"
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    mx.save_safetensors(str(other / "model.safetensors"), stored)
    found = load(other, plugins=plugins()).model.named_parameters()
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[name], expected[name]) for name in expected)


def test_experts_take_an_adapter_where_targets_name_them(tmp_path):
    folder = checkpoint(tmp_path / "source", "mixtral")
    convert_checkpoint(folder, tmp_path / "packed", packing=Packing.of(4, 32), plugins=plugins())
    for source in (folder, tmp_path / "packed"):
        model = load(source, plugins=plugins()).model
        params = trained(model, LoRA(rank=2, targets=("switch_mlp.up_proj",)))
        assert len(params) == 2 * len(model.blocks)
        plain, expected = engine(model).gradients(params, PAIRS)
        tally, found = engine(model, Segmented(), Packed(), FlashCCE()).gradients(params, PAIRS)
        assert tally.loss == pytest.approx(plain.loss, abs=1e-5)
        assert relative(found, expected) < 1e-4
        assert all(mx.abs(value).max().item() > 0 for value in found.values())


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_addressed_is_refused_by_name(family):
    with pytest.raises(CheckpointError, match=f"mlx-lm's {family} cannot be trained here: .*{REFUSED[family][2]}"):
        MlxLmAdapter().build(config_of(family))


@pytest.mark.parametrize(
    ("broken", "message"), [(SpanContext, "on a row that branches"), (CacheContext, "token by token")]
)
def test_the_proof_sees_a_context_that_loses_states(broken, message, monkeypatch):
    monkeypatch.setattr(broken, "scan", lambda self, recurrence, *inputs, layer=0: recurrence(inputs, None)[0])
    with pytest.raises(CheckpointError, match=f"mamba cannot be trained here: its logits {message}.* differ by"):
        MlxLmAdapter().build(config_of("mamba"))


def test_the_proof_sees_another_factor():
    """Of the proof itself: without the family's factor a Cohere's logits are others."""
    config = config_of("cohere")
    with pytest.raises(Refused, match="its logits on a plain row differ by"):
        prove(build(config), lambda: MlxLmModel(config, build(config), LogitLaw()))


def test_a_config_that_mlx_lm_does_not_take():
    with pytest.raises(CheckpointError, match="mlx-lm's qwen2 cannot be built from this config: TypeError"):
        MlxLmAdapter().build({"model_type": "qwen2"})


def test_only_where_no_other_adapter_claims():
    name, _ = find_adapter(plugins(), {"model_type": "llama"})
    assert name == "llama"
    assert find_adapter(plugins(), {"model_type": "qwen2"})[0] == "mlx-lm"
    for kind in ("no_such_family", "../evil", "os", "models.llama", None, 3):
        with pytest.raises(CheckpointError, match="no model adapter handles model_type"):
            find_adapter(plugins(), {"model_type": kind})


def test_classes_of_mlx_lm_stay_as_they_are():
    from mlx_lm.models import qwen2

    call, names = qwen2.Attention.__call__, dict(qwen2.__dict__)
    MlxLmAdapter().build(config_of("qwen2"))
    assert qwen2.Attention.__call__ is call
    assert dict(qwen2.__dict__) == names
    again = build(config_of("qwen2"))
    assert type(again.layers[0].self_attn) is qwen2.Attention


def test_a_factor_of_the_real_sizes():
    """MiniCPM divides by hidden_size / dim_model_base, whatever the twin's width."""
    wide = config_of("minicpm") | {"hidden_size": 256}
    assert logit_law(build(wide)).factor == pytest.approx(32 / 256)
    assert small_twin(wide)["hidden_size"] == 64


def test_what_a_family_does_to_its_logits():
    assert logit_law(build(config_of("qwen2"))) == LogitLaw()
    assert logit_law(build(config_of("gemma2"))) == LogitLaw(1.0, 30.0)
    assert logit_law(build(config_of("nanochat"))) == LogitLaw(1.0, 15.0)
    assert logit_law(build(config_of("cohere"))).factor == pytest.approx(0.0625, rel=1e-6)


def test_windows_are_those_of_the_caches():
    blocks = MlxLmAdapter().build(config_of("gemma3_text")).blocks
    assert all(isinstance(block, Addressed) for block in blocks)
    kept = [caches.emptied(cache) for cache in make_prompt_cache(build(config_of("gemma3_text")))]
    assert [getattr(cache, "max_size", None) for cache in kept] == [5, None, 5, None]


def test_a_twin_has_every_kind_of_layer():
    def twin(**config):
        return small_twin({"num_hidden_layers": 40} | config)

    assert twin(layer_types=["a", "a", "b"] + ["a"] * 37) == {"num_hidden_layers": 3, "layer_types": ["a", "a", "b"]}
    assert twin(hybrid_override_pattern="M-M*" + "-" * 36)["hybrid_override_pattern"] == "M-M*"
    assert twin(full_attn_idxs=[2, 5, 8]) == {"num_hidden_layers": 3, "full_attn_idxs": [2]}
    assert twin(sliding_window_pattern="LLLG")["num_hidden_layers"] == 4
    assert twin(block_types=["recurrent", "recurrent", "attention"])["num_hidden_layers"] == 3
    assert twin(first_k_dense_replace=3)["num_hidden_layers"] == 4
    assert twin(attn_layer_period=14)["num_hidden_layers"] == 14
    assert small_twin({"text_config": {"num_hidden_layers": 40}})["text_config"]["num_hidden_layers"] == 2


def test_the_shapes_of_real_models_are_proved_in_little_memory():
    """Mixtral 8x7B's sizes: nothing of them is computed, only their twin."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336}
    big = config_of("mixtral") | heads | {"num_hidden_layers": 32, "vocab_size": 32000, "num_local_experts": 8}
    mx.reset_peak_memory()
    model = MlxLmAdapter().build(big)
    assert len(model.blocks) == 32
    assert mx.get_peak_memory() < 50e6


def test_a_state_goes_to_every_branch():
    """What a carried layer keeps behind a prompt is not changed by the completions that go on from it."""
    kept = caches.emptied(make_prompt_cache(build(config_of("falcon_h1")))[0])
    own = caches.holding(kept, None)
    assert caches.length(own) == 0
    own.caches[1].update_and_fetch(mx.ones((1, 2, 3, 4)), mx.ones((1, 2, 3, 4)))
    state = caches.held(own)
    branch = caches.holding(kept, state)
    branch.caches[1].update_and_fetch(mx.ones((1, 2, 2, 4)), mx.ones((1, 2, 2, 4)))
    assert (caches.length(branch), caches.length(own), caches.length(caches.holding(kept, state))) == (5, 3, 3)
    assert caches.length(caches.at(kept, 7)) == 7


def test_the_table_is_that_of_the_families():
    rows = [line for line in README.read_text().splitlines() if line.startswith("| `")]
    assert rows == [row(family) for family in (*WORKS, *REFUSED)]

"""The gemma4 adapter: tiny checkpoints against transformers' values, and every part of the decoder by itself."""

from __future__ import annotations

import json
import math
import tracemalloc

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from attrs import evolve
from tiny_llama import PLUGINS, distance, write
from tiny_run import RUN_FILE, configure, metrics, tiny_run, write_tokenizer

from mortice import score, staging
from mortice.batch import Completion, Group, Row, Span
from mortice.context import CacheContext, SpanContext
from mortice.errors import CheckpointError
from mortice.generation import generate_tokens
from mortice.launch import Notices, train
from mortice.objective import WeightedLoss
from mortice.pretrained import load, parameter_count, random_model
from mortice.protocols import Sampling
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
from mortice_plugins.models import gemma4, gemma4_config
from mortice_plugins.models.gemma4 import Gemma4Adapter
from mortice_plugins.models.gemma4_config import FULL, SLIDING, Gemma4Config, proportional_freqs
from mortice_plugins.models.gemma4_experts import Router

IDS = [5, 17, 3, 40, 31, 31, 2, 20, 33, 8, 11, 12]
NAMES = ["e2b", "e4b", "31b", "26b_moe"]
SHARING, K_IS_V, EXPERTS = Gemma4Adapter.examples
"""Tiny configs: two layers that share keys and values, with per-layer inputs; k = v; experts."""
PAIRS = [
    Group("a", [1, 2, 3, 4], [Completion([5, 6, 7, 8]), Completion([8])], ((0, 1),)),
    Group("b", [9, 3], [Completion([2, 2, 11, 4]), Completion([1, 12, 30])], ((0, 1),)),
]


def tiny(config):
    return random_model(config, 0, plugins=PLUGINS).model


def logits(model, ids=IDS) -> mx.array:
    """`[T, V]` with the soft cap."""
    ctx = SpanContext(Row(ids, [Span(0, len(ids), None, 0)], [], [], [], [], []))
    output = model.output
    return output.finish(output.project(model.hidden(ctx, ctx.tokens)))


def folder_of(shared, name):
    return shared / "models" / f"gemma4_{name}"


def reference_of(folder) -> dict[str, mx.array]:
    return dict(mx.load(str(folder / "reference.safetensors")))


def relative(found, expected) -> float:
    assert set(found) == set(expected)
    apart = sum(mx.square(found[n] - expected[n]).sum().item() for n in expected)
    return math.sqrt(apart / sum(mx.square(v).sum().item() for v in expected.values()))


# Against transformers


@pytest.mark.parametrize("adapter", [False, True], ids=["base", "adapter"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference(shared, name, adapter):
    folder = folder_of(shared, name)
    reference = reference_of(folder)
    found = load(folder, plugins=PLUGINS, adapter=folder / "adapter" if adapter else None)
    assert (found.family, found.ignored) == ("gemma4", ())
    want = reference["adapter_logits" if adapter else "base_logits"]
    assert distance(logits(found.model, reference["input_ids"].tolist()), want) < 1e-4


@pytest.mark.parametrize(
    ("head", "backward", "layout"),
    [
        ("dense", "full", "separate"),
        ("flash-cce", {"name": "segmented", "segment_size": 1}, "prefix-shared"),
        ("flash-cce", {"name": "segmented", "segment_size": 5, "eager": False}, "packed"),
        ("flash-cce", {"name": "checkpoint", "segment_size": 3}, "prefix-shared"),
    ],
    ids=["full", "eager", "traced", "checkpoint"],
)
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_equal_the_reference(shared, name, head, backward, layout):
    folder = folder_of(shared, name)
    reference = reference_of(folder)
    ids = reference["input_ids"].tolist()
    found = score(
        folder, [{"prompt_ids": ids[:16], "completions": [ids[16:]]}], loss="sft", head=head, backward=backward,
        layout=layout, adapter=folder / "adapter", gradients=True, plugins=PLUGINS,
    )  # fmt: skip
    assert found.loss == pytest.approx(reference["loss_tokens_16_on"].item(), abs=1e-5)
    assert distance(mx.array(found.logprobs[0]), reference["adapter_logprobs"][15:]) < 1e-4
    peft = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b"}
    expected = {
        full.removeprefix("grad.").removesuffix(theirs) + ours: value.T
        for full, value in reference.items()
        for theirs, ours in peft.items()
        if full.startswith("grad.") and full.endswith(theirs)
    }
    assert relative(found.gradients, expected) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_cached_decoding_equals_a_full_forward(shared, name, monkeypatch):
    folder = folder_of(shared, name)
    model = load(folder, plugins=PLUGINS, adapter=folder / "adapter").model
    ids = list(IDS)
    for _ in range(20):
        ids.append(int(mx.argmax(logits(model, ids)[-1]).item()))
    greedy = Sampling(max_tokens=20, temperature=0.0)
    assert list(generate_tokens(model, IDS, greedy)) == ids[len(IDS) :]
    monkeypatch.setattr("mortice.generation.PREFILL", 5)
    monkeypatch.setattr("mortice.context.CACHE_STEP", 4)
    assert list(generate_tokens(model, IDS, greedy)) == ids[len(IDS) :]


def a_wider_window(monkeypatch):
    layers = gemma4_config._layers
    monkeypatch.setattr(
        gemma4_config, "_layers", lambda keys: tuple(evolve(x, window=x.window and x.window + 1) for x in layers(keys))
    )


def another_donor(monkeypatch):
    donors = gemma4_config._donors
    monkeypatch.setattr(
        gemma4_config, "_donors", lambda keys, kinds: [d and (0 if d == 1 else d) for d in donors(keys, kinds)]
    )


def a_scale(monkeypatch):
    attend = SpanContext.attend
    monkeypatch.setattr(SpanContext, "attend", lambda *args, **kw: attend(*args, **(kw | {"scale": 0.25})))


def no_norm_of_values(monkeypatch):
    def keys_and_values(self, x, ctx):
        k, _ = found(self, x, ctx)
        return k, self.v_proj(x).reshape(k.shape)

    found = gemma4.Attention.keys_and_values
    monkeypatch.setattr(gemma4.Attention, "keys_and_values", keys_and_values)


def partial_rotation(monkeypatch):
    """The first quarter of the dimensions turned, instead of a quarter of the pairs."""

    def rope(self, x, ctx):
        if self.freqs is None:
            return plain(self, x, ctx)
        return ctx.rope(x, self.dims // 4, base=1e6)

    plain = gemma4_config.Rope.__call__
    monkeypatch.setattr(gemma4_config.Rope, "__call__", rope)


def no_scalars(monkeypatch):
    def ones(params):
        return {n: mx.ones_like(p) if n.endswith("layer_scalar") else p for n, p in params.items()}

    bind = gemma4.Gemma4.bind
    monkeypatch.setattr(gemma4.Gemma4, "bind", lambda self, params: bind(self, ones(params)))


def no_soft_cap(monkeypatch):
    read = Gemma4Config.read.__func__
    monkeypatch.setattr(Gemma4Config, "read", classmethod(lambda cls, c: evolve(read(cls, c), softcap=None)))


@pytest.mark.parametrize(
    "fault",
    [a_wider_window, another_donor, a_scale, no_norm_of_values, partial_rotation, no_scalars, no_soft_cap],
)
def test_a_fault_would_be_seen(shared, fault, monkeypatch):
    folder = folder_of(shared, "e2b")
    reference = reference_of(folder)
    fault(monkeypatch)
    found = logits(load(folder, plugins=PLUGINS).model, reference["input_ids"].tolist())
    assert distance(found, reference["base_logits"]) > 0.1


# One piece, segments, layouts


def engine(model, backward=None, layout=None, head=None) -> Engine:
    losses = (WeightedLoss("orpo", ORPO()),)
    return Engine(model, head or Dense(), backward or Full(), layout or Separate(), losses)


def trained(config, adapter):
    model = tiny(config)
    params = adapter.attach(model, 0)
    params = {n: p + 0.05 * mx.random.normal(p.shape, key=mx.random.key(i)) for i, (n, p) in enumerate(params.items())}
    model.mark_trainable(params)
    return model, params


BACKWARDS = {
    "full": Full(),
    **{f"cut-{i}": Segmented(cuts=(i,)) for i in range(1, 6)},
    **{f"segmented-{n}": Segmented(segment_size=n) for n in (1, 2, 3, 4, 5, 6, 7, 8)},
    **{f"segmented-{n}-traced": Segmented(segment_size=n, eager=False) for n in (1, 3)},
    **{f"segmented-{n}-everything": Segmented(segment_size=n, keep="everything") for n in (1, 3)},
    "checkpoint": Checkpoint(segment_size=1),
}


@pytest.mark.parametrize("adapter", [LoRA(rank=2), FullWeights()], ids=["lora", "full"])
@pytest.mark.parametrize("config", Gemma4Adapter.examples, ids=["sharing", "k-is-v", "experts"])
def test_gradients_of_every_backward_and_layout_equal_the_plain_ones(config, adapter):
    """Under `full` the embeddings train, so that per-layer inputs travel in the carry."""
    model, params = trained(config, adapter)
    plain, expected = engine(model).gradients(params, PAIRS)
    assert all(mx.abs(value).max().item() > 0 for value in expected.values())
    layouts = [Separate(), PrefixShared(), Packed()]
    for i, (name, backward) in enumerate(BACKWARDS.items()):
        for layout in layouts if name in ("full", "segmented-1", "segmented-3-traced") else layouts[i % 3 :][:1]:
            tally, found = engine(model, backward, layout, FlashCCE(token_tile=3, vocab_tile=5)).gradients(
                params, PAIRS
            )
            assert tally.loss == pytest.approx(plain.loss, abs=1e-5), name
            assert relative(found, expected) < 1e-4, name


def test_the_plain_gradient_equals_finite_differences():
    model, params = trained(SHARING, FullWeights())
    _, gradients = engine(model).gradients(params, PAIRS)
    layer = "model.layers.{}.self_attn.{}_proj.weight".format
    for name in (
        layer(0, "k"), layer(1, "v"), layer(3, "q"), "model.embed_tokens_per_layer.weight",
        "model.per_layer_model_projection.weight", "model.layers.2.per_layer_input_gate.weight",
    ):  # fmt: skip
        size = mx.sqrt(mx.square(gradients[name]).sum())
        direction, step = gradients[name] / size, 5e-3
        up, down = (
            engine(model).evaluate(params | {name: params[name] + s * step * direction}, PAIRS).loss for s in (1, -1)
        )
        assert size.item() == pytest.approx((up - down) / (2 * step), rel=5e-3), name


def test_per_layer_inputs_are_a_constant_until_what_makes_them_trains():
    for adapter, keys in ((LoRA(rank=2), {"h"}), (FullWeights(), {"h", "per_layer_inputs"})):
        model, _ = trained(SHARING, adapter)
        ctx = SpanContext(Row(IDS, [Span(0, len(IDS), None, 0)], [], [], [], [], []))
        carry = model.begin(ctx, ctx.tokens)
        assert set(carry) == keys
        assert set(ctx.constants) == {"h", "per_layer_inputs"} - keys
        assert set(model.run(carry, ctx)) == {"h"}


def test_shared_keys_and_values_leave_the_carry_after_their_last_user():
    """Layers 2 (sliding) and 3 (full) share with 0 and 1; two blocks a layer."""
    model = tiny(SHARING)
    ctx = SpanContext(Row(IDS, [Span(0, len(IDS), None, 0)], [], [], [], [], []))
    carry, held = model.begin(ctx, ctx.tokens), []
    for i in range(len(model.blocks)):
        carry = model.run(carry, ctx, i, i + 1)
        held.append("".join(sorted(set(carry) - {"h"})))
    assert held == ["k0v0", "k0v0", "k0k1v0v1", "k0k1v0v1", "k1v1", "k1v1", "", ""]


@pytest.mark.parametrize("way", ["forward", "eager forward", "backward", "eager backward"])
def test_peak_of_a_sliding_layer_is_linear_in_length(way):
    """Attention and MLP of layer 0; where attention runs in numpy, what numpy holds counts too."""
    model, _ = trained(SHARING | {"sliding_window": 64}, LoRA(rank=2))

    def peak(length: int) -> int:
        ctx = SpanContext(Row([1] * length, [Span(0, length, None, 0)], [], [], [], [], []))
        carry = model.begin(ctx, ctx.tokens)
        seed = mx.ones((length, 32))
        mx.eval(carry, ctx.constants, seed)

        def layer(h):
            return [model.run({"h": h}, ctx, 0, 2)["h"]]

        before = mx.get_active_memory()
        mx.reset_peak_memory()
        tracemalloc.start()
        if way == "forward":
            mx.eval(layer(carry["h"]))
        elif way == "backward":
            mx.eval(mx.vjp(layer, [carry["h"]], [seed])[1])
        else:
            with staging.eagerly(keep="backward" in way) as tape:
                mx.eval(layer(carry["h"]))
            if "backward" in way:
                mx.eval(staging.vjp(layer, [carry["h"]], [seed], tape))
        numpy = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return mx.get_peak_memory() - before + numpy

    peaks = [peak(length) for length in (512, 1024, 2048)]
    assert peaks[1] < 2.3 * peaks[0]
    assert peaks[2] < 2.3 * peaks[1]


def test_sharers_own_no_cache():
    model = tiny(SHARING)
    ctx = CacheContext()
    model.hidden(ctx, mx.array(IDS))
    assert len(ctx.arrays()) == 2 * 2


def test_bfloat16_weights_and_activations(tmp_path):
    for i, config in enumerate(Gemma4Adapter.examples):
        weights = {n: w.astype(mx.bfloat16) for n, w in tiny(config).named_parameters().items()}
        folder = write(tmp_path / str(i), weights, config)
        stored, wide, narrow = (
            load(folder, plugins=PLUGINS, dtype=dtype).model for dtype in ("auto", "float32", "bfloat16")
        )
        assert distance(logits(stored), logits(wide)) < 0.05  # the scale of the embedding is rounded as the weights are
        assert distance(logits(narrow), logits(wide)) < 0.5
        assert narrow.run(narrow.embed(mx.array(IDS), ctx := CacheContext()), ctx)["h"].dtype == mx.bfloat16


# Experts


def test_a_router_by_hand():
    """x = [3, 4] has the root mean square √12.5; scores are x / √12.5 · scale / √2 through the rows of proj."""
    config = Gemma4Config.read(EXPERTS | {"num_experts": 3})
    router = Router(evolve(config, hidden=2, eps=0.0))
    router.proj.weight = mx.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    router.scale, router.per_expert_scale = mx.array([2.0, 1.0]), mx.array([1.0, 10.0, 100.0])
    chosen, weights = router(mx.array([[3.0, 4.0]]))
    found = dict(zip(chosen[0].tolist(), weights[0].tolist()))
    scores = [2 * 3 / 5, 4 / 5]  # √12.5 · √2 = 5
    first = 1 / (1 + math.exp(scores[1] - scores[0]))
    assert found == pytest.approx({0: first, 1: 10 * (1 - first)}, rel=1e-5)


def test_experts_equal_a_dense_sum():
    """All experts on all tokens, weighted by the router's weights or 0."""
    model = tiny(EXPERTS)
    block = model.blocks[1]
    x = mx.random.normal((7, 32), key=mx.random.key(1))
    chosen, weights = block.router(x)
    dense = np.zeros((7, 4), np.float32)
    np.put_along_axis(dense, np.array(chosen), np.array(weights), axis=1)
    expected = mx.zeros((7, 32))
    for e in range(4):
        stack = block.experts.switch_glu
        gate, up = (x @ part.weight[e].T for part in (stack.gate_proj, stack.up_proj))
        expected += mx.array(dense[:, e : e + 1]) * ((nn.gelu_approx(gate) * up) @ stack.down_proj.weight[e].T)
    assert distance(block.experts(x, chosen, weights), expected) < 1e-5


def test_experts_are_frozen_or_train_by_choice():
    _, lora = trained(EXPERTS, LoRA(rank=2))
    assert not [name for name in lora if "experts" in name]
    assert [name for name in lora if "router.proj" in name]
    _, attention = trained(EXPERTS, LoRA(rank=2, targets=("self_attn.*",)))
    assert not [name for name in attention if "router" in name]
    _, full = trained(EXPERTS, FullWeights())
    stack = "model.layers.0.experts.switch_glu"
    assert {f"{stack}.{part}_proj.weight" for part in ("gate", "up", "down")} <= set(full)
    _, experts = trained(EXPERTS, LoRA(rank=2, targets=("experts.*",)))
    assert experts[f"{stack}.up_proj.lora_a"].shape == (4, 2, 32)
    assert experts[f"{stack}.up_proj.lora_b"].shape == (4, 32, 2)
    assert len(experts) == 3 * 3 * 2


def test_experts_in_chunks_of_tokens_give_the_same():
    model, params = trained(EXPERTS, FullWeights())
    _, expected = engine(model).gradients(params, PAIRS)
    for backward in (Full(), Segmented(segment_size=1)):
        chunked = evolve(engine(model, backward), mlp_chunk=2)
        assert relative(chunked.gradients(params, PAIRS)[1], expected) < 1e-4


# Checkpoints and configs


def test_layer_scalars_never_train():
    model, params = trained(SHARING, FullWeights())
    named = set(model.named_parameters())
    assert named - set(params) == {f"model.layers.{i}.layer_scalar" for i in range(4)}


def renamed(weights, prefix):
    return {prefix + name.removeprefix("model."): value for name, value in weights.items()}


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."], ids=["transformers", "mlx-lm"])
def test_multimodal_checkpoints_without_their_towers(tmp_path, kind, prefix):
    text = tiny(SHARING)
    towers = {"vision_tower.patch.weight": mx.ones((2, 2)), "model.embed_audio.weight": mx.ones((2, 2))}
    config = {"model_type": kind, "text_config": SHARING | {"model_type": f"{kind}_text"}, "vision_config": {}}
    found = load(write(tmp_path, renamed(text.named_parameters(), prefix) | towers, config), plugins=PLUGINS)
    assert found.ignored == ("model.embed_audio.weight", "vision_tower.patch.weight")
    assert found.left_out == "weights that the model does not use are left out: embed_audio (1), vision_tower (1)"
    assert distance(logits(found.model), logits(text)) == 0
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in found.model.named_parameters()
    assert found.model.output.name == "model.language_model.embed_tokens.weight"


def test_a_run_on_a_multimodal_checkpoint(tmp_path):
    """Its note on what is left out, and the same steps with everything kept and recomputed."""
    config = SHARING | {"vocab_size": 272, "vocab_size_per_layer_input": 272}
    weights = renamed(tiny(config).named_parameters(), "model.language_model.")
    towers = {f"model.vision_tower.{i}.weight": mx.ones((2, 2)) for i in range(3)}
    losses = []
    for i, backward in enumerate(("full", "segmented")):
        file = tiny_run(tmp_path / str(i), RUN_FILE)
        write(tmp_path / str(i) / "model", weights | towers, {"model_type": "gemma4", "text_config": config})
        notices = Notices()
        outcome = train(configure(file, backward=backward, layout="prefix-shared"), notices)
        losses.append([line["loss"] for line in metrics(outcome)])
        assert "weights that the model does not use are left out: vision_tower (3)" in notices.messages
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_dead_weights_are_dropped_and_never_required(tmp_path):
    text = tiny(SHARING)
    dead = {
        **{f"model.layers.2.self_attn.{name}.weight": mx.ones((32, 32)) for name in ("k_proj", "v_proj")},
        "model.layers.2.self_attn.k_proj.scales": mx.ones((32, 1)),  # a packed checkpoint's
        "model.layers.3.self_attn.k_norm.weight": mx.ones((32,)),
        "model.rotary_emb.inv_freq": mx.ones((8,)),
        "lm_head.weight": mx.ones((41, 32)),
    }
    found = load(write(tmp_path, text.named_parameters() | dead, SHARING), plugins=PLUGINS)
    assert found.ignored == ()
    assert distance(logits(found.model), logits(text)) == 0


def transformers_experts(model) -> dict[str, mx.array]:
    """The weights with each layer's experts in two tensors, as transformers has them."""
    weights = {}
    for name, value in model.named_parameters().items():
        stem, mark, part = name.partition(".switch_glu.")
        if not mark:
            weights[name] = value
        elif part == "down_proj.weight":
            weights[f"{stem}.down_proj"] = value
        elif part == "gate_proj.weight":
            up = model.named_parameters()[f"{stem}.switch_glu.up_proj.weight"]
            weights[f"{stem}.gate_up_proj"] = mx.concatenate([value, up], axis=1)
    return weights


def test_experts_as_transformers_stores_them(tmp_path):
    text = tiny(EXPERTS)
    found = load(write(tmp_path, transformers_experts(text), EXPERTS), plugins=PLUGINS)
    assert found.ignored == ()
    assert distance(logits(found.model), logits(text)) == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_experts_equal_their_floats(tmp_path, bits):
    """As every packed checkpoint has them; with LoRA on them too."""
    packed, plain = {}, {}
    for name, value in tiny(EXPERTS).named_parameters().items():
        if ".switch_glu." not in name:
            packed[name] = plain[name] = value
            continue
        parts, stem = mx.quantize(value, group_size=32, bits=bits), name.removesuffix(".weight")
        packed |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), parts))
        plain[name] = mx.dequantize(*parts, group_size=32, bits=bits)
    config = EXPERTS | {"quantization": {"group_size": 32, "bits": bits}}
    models = [load(write(tmp_path / f"{i}", w, c), plugins=PLUGINS).model
              for i, (w, c) in enumerate(((packed, config), (plain, EXPERTS)))]  # fmt: skip
    assert distance(*(logits(model) for model in models)) < 1e-4
    assert distance(*(logits(model, IDS[:1]) for model in models)) < 1e-4  # few rows go to the packed ones
    greedy = Sampling(max_tokens=8, temperature=0.0)
    answers = [list(generate_tokens(model, IDS, greedy)) for model in models]
    assert answers[0] == answers[1]
    steps = []
    for model in models:
        params = LoRA(rank=2, targets=("experts.*", "q_proj")).attach(model, 0)
        params = {n: p + 0.05 * mx.random.normal(p.shape, key=mx.random.key(i))
                  for i, (n, p) in enumerate(params.items())}  # fmt: skip
        model.mark_trainable(params)
        # Rows of 7 and of 18 tokens: packed experts as they are, and unpacked, in a trace and outside.
        for layout in (Separate(), Packed()):
            for backward in (Full(), Segmented(segment_size=1), Checkpoint(segment_size=3)):
                steps.append(engine(model, backward, layout).gradients(params, PAIRS)[1])
    assert all(mx.abs(value).max().item() > 0 for value in steps[0].values())
    for found in steps[1:]:
        assert relative(found, steps[0]) < 1e-4


def test_experts_and_their_adapters_go_to_mlx_lm_and_back(tmp_path):
    utils = pytest.importorskip("mlx_lm")
    text = tiny(EXPERTS)
    spelled_out = EXPERTS | {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}  # mlx-lm has other defaults
    write_tokenizer(write(tmp_path / "model", transformers_experts(text), spelled_out))
    for strategy in (LoRA(rank=2, targets=("experts.*", "router.proj")), FullWeights()):
        folder = tmp_path / type(strategy).__name__
        model = load(tmp_path / "model", plugins=PLUGINS).model
        params = {n: p + 0.1 for n, p in strategy.attach(model, 0).items()}
        model.bind(params)
        strategy.save(model, params, folder)
        assert distance(logits(model), logits(text)) > 0.1
        theirs, _ = utils.load(str(tmp_path / "model"), adapter_path=str(folder))
        assert distance(theirs(mx.array([IDS]))[0], logits(model)) < 1e-4
        again = load(tmp_path / "model", plugins=PLUGINS, adapter=folder)
        assert distance(logits(again.model), logits(model)) < 1e-6


@pytest.mark.parametrize("strategy", [LoRA(rank=2), FullWeights()], ids=["lora", "full"])
@pytest.mark.parametrize("multimodal", [False, True], ids=["text", "multimodal"])
def test_adapters_go_to_mlx_lm_and_back(tmp_path, multimodal, strategy):
    utils = pytest.importorskip("mlx_lm")
    text = tiny(SHARING)
    config, weights = SHARING, text.named_parameters()
    if multimodal:
        config = {"model_type": "gemma4", "text_config": SHARING, "vocab_size": 41}
        weights = renamed(weights, "model.language_model.")
    write_tokenizer(write(tmp_path / "model", weights, config))
    model = load(tmp_path / "model", plugins=PLUGINS).model
    params = {n: p + 0.1 for n, p in strategy.attach(model, 0).items()}
    model.bind(params)
    strategy.save(model, params, tmp_path / "adapter")
    assert distance(logits(model), logits(text)) > 0.1
    theirs, _ = utils.load(str(tmp_path / "model"), adapter_path=str(tmp_path / "adapter"))
    assert distance(theirs(mx.array([IDS]))[0], logits(model)) < 1e-4
    again = load(tmp_path / "model", plugins=PLUGINS, adapter=tmp_path / "adapter")
    assert distance(logits(again.model), logits(model)) < 1e-6


@pytest.mark.parametrize("spelling", ["language_model.model.", "model.language_model."])
def test_packed_weights_under_mlx_lm_names(tmp_path, spelling):
    """4 bits but for one matrix, which its own entry in the config, named in either way, keeps as it is."""
    kept = "language_model.model.layers.1.mlp.up_proj"
    plain, packed = {}, {}
    for name, value in renamed(tiny(SHARING).named_parameters(), "language_model.model.").items():
        stem, _, last = name.rpartition(".")
        if value.ndim < 2 or stem == kept or last != "weight":
            plain[name] = packed[name] = value
            continue
        parts = mx.quantize(value, group_size=32, bits=4)
        packed |= {f"{stem}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts)}
        plain[name] = mx.dequantize(*parts, group_size=32, bits=4)
    config = {"model_type": "gemma4", "text_config": SHARING}
    entry = kept.replace("language_model.model.", spelling)
    table = {"quantization": {"group_size": 32, "bits": 4, entry: False}}
    found = load(write(tmp_path / "packed", packed, config | table), plugins=PLUGINS)
    want = load(write(tmp_path / "plain", plain, config), plugins=PLUGINS)
    assert found.ignored == ()
    assert distance(logits(found.model), logits(want.model)) < 1e-4
    wrong = {"quantization": {entry.replace("up", "down"): {"bits": 8, "group_size": 32}}}
    with pytest.raises(CheckpointError, match=r"down_proj is stored with bits 4, config\.json says 8"):
        load(write(tmp_path / "packed", packed, config | wrong), plugins=PLUGINS)


def test_an_output_matrix_of_its_own(tmp_path):
    text = tiny(K_IS_V)
    table = text.named_parameters()["model.embed_tokens.weight"]
    weights = text.named_parameters() | {"lm_head.weight": -table}
    found = load(write(tmp_path, weights, K_IS_V | {"tie_word_embeddings": False}), plugins=PLUGINS).model
    assert distance(logits(found), -logits(text)) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_of_the_config(shared, name):
    config = json.loads((folder_of(shared, name) / "config.json").read_text())
    once = {key: value for key, value in config.items() if key != "per_layer_config"}
    each = {key: value for key, value in config.items() if not key.startswith(("global_", "num_global_"))}
    padded = each | {"per_layer_config": {f"0{key}": value for key, value in each["per_layer_config"].items()}}
    shapes = [
        [(layer.head_dim, layer.kv_heads, layer.donor) for layer in Gemma4Config.read(c).layers]
        for c in (once, each, padded)
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert [head_dim for head_dim, _, _ in shapes[0]] == [16, 16, 32] * 2


def test_absent_keys_mean_what_they_mean_to_transformers():
    bare = {
        "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
    }  # fmt: skip
    c = Gemma4Config.read(bare)
    assert (c.softcap, c.per_layer, c.per_layer_vocab, c.tied, c.experts, c.bias) == (None, 256, 50, True, None, False)
    assert [layer.window for layer in c.layers] == [512] * 5 + [None] * 2
    assert [layer.head_dim for layer in c.layers] == [256] * 5 + [512] * 2
    assert {layer.donor for layer in c.layers} == {None}
    sliding, full = c.layers[0].rope, c.layers[5].rope
    assert (sliding.base, sliding.freqs, full.base) == (1e4, None, None)
    assert full.freqs.tolist()[:2] == pytest.approx([1.0, 1e6 ** (2 / 512)])
    assert (mx.isinf(full.freqs).sum().item(), full.freqs.size) == (192, 256)


def test_the_sizes_that_were_published():
    """E2B: donors are 13 (sliding) and 14 (full), MLPs of sharers twice as wide; 31B: four key heads where k = v."""
    kinds = [SLIDING, SLIDING, SLIDING, SLIDING, FULL] * 7
    e2b = {
        "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
        "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 262144, "layer_types": kinds,
        "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "global_head_dim": 512,
    }  # fmt: skip
    layers = Gemma4Config.read(e2b).layers
    assert [layer.donor for layer in layers] == [None] * 15 + [13, 13, 13, 13, 14] * 4
    assert [i for i, layer in enumerate(layers) if layer.passes_on] == [13, 14, *range(15, 33)]
    assert [layer.intermediate for layer in layers] == [6144] * 15 + [12288] * 20
    big = e2b | {"attention_k_eq_v": True, "num_key_value_heads": 16, "num_global_key_value_heads": 4}
    heads = {(layer.kv_heads, layer.k_is_v) for layer in Gemma4Config.read(big).layers}
    assert heads == {(16, False), (4, True)}
    ungated = e2b | {"num_global_key_value_heads": 4}
    assert {layer.kv_heads for layer in Gemma4Config.read(ungated).layers} == {1}


def test_proportional_frequencies_by_hand():
    """A head of 8 with base 16 has the divisors 16^(0, ¼, ½, ¾); half of the four pairs turn."""
    assert proportional_freqs(8, 16.0, 0.5).tolist() == pytest.approx([1.0, 2.0, math.inf, math.inf])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size', which a Gemma 4 model needs"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be a whole number of 1 or more, found '4'"),
        ({"hidden_activation": "silu"}, r"hidden_activation 'silu' is not supported \(supported: 'gelu_pytorch_tanh'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping must be a number above 0, found 0"),
        ({"layer_types": [FULL]}, "layer_types names 1 layers, num_hidden_layers is 4"),
        ({"layer_types": [SLIDING] * 4}, "layer_types ends with 'sliding_attention'; the last layer must be"),
        ({"layer_types": ["linear"] * 4}, "layer_types 'linear' is not supported"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3, which leaves layer 1 no full_attention"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers is 9, which leaves"),
        ({"per_layer_config": {"4": {}}}, "per_layer_config.4 is none of the 4 layers"),
        ({"per_layer_config": {"1": {"head_dims": 4}}}, r"per_layer_config\.1\.head_dims is not .*mean 'head_dim'"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn", "rope_theta": 1e4}}}, "full_attention.rope_type 'yarn'"),
        ({"rope_parameters": {FULL: {"rope_type": "default"}}}, r"lacks 'rope_parameters\.full_attention\.rope_theta"),
        ({"rope_parameters": {SLIDING: 3}}, r"rope_parameters\.sliding_attention must be a table, found 3"),
        (
            {"rope_parameters": {FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 2}}},
            r"full_attention\.partial_rotary_factor 2\.0 is not supported",
        ),
        ({"layer_types": FULL}, "layer_types must be a list, found 'full_attention'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number above 0, found 'small'"),
        ({"enable_moe_block": True}, "lacks 'num_experts'"),
        (
            {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 32},
            "top_k_experts is 3, num_experts only 2",
        ),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        Gemma4Adapter().build(SHARING | changes)
    with pytest.raises(CheckpointError, match="text_config" if "lacks" in message else message):
        Gemma4Adapter().build({"model_type": "gemma4", "text_config": SHARING | changes})


def test_a_multimodal_config_needs_its_text_part():
    with pytest.raises(CheckpointError, match="lacks 'text_config', which a gemma4 model needs"):
        Gemma4Adapter().build({"model_type": "gemma4"})


def test_families():
    adapter = Gemma4Adapter()
    assert all(adapter.handles({"model_type": kind}) for kind in ("gemma4", "gemma4_text", "gemma4_unified"))
    assert not any(adapter.handles({"model_type": kind}) for kind in ("gemma3", "gemma3n_text", "llama", None))


# The released sizes, of which nothing is computed


def kinds(count: int, every: int) -> list[str]:
    return [FULL if (i + 1) % every == 0 else SLIDING for i in range(count)]


RELEASED = {
    "model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144,
    "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0, "sliding_window": 1024,
}  # fmt: skip
PER_LAYER_INPUT = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "sliding_window": 512}


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (
            PER_LAYER_INPUT
            | {
                "hidden_size": 1536, "num_hidden_layers": 35, "layer_types": kinds(35, 5), "num_attention_heads": 8,
                "num_key_value_heads": 1, "intermediate_size": 6144, "num_kv_shared_layers": 20,
                "use_double_wide_mlp": True,
            },
            4.63,
        ),
        (
            PER_LAYER_INPUT
            | {
                "hidden_size": 2560, "num_hidden_layers": 42, "layer_types": kinds(42, 6), "num_attention_heads": 8,
                "num_key_value_heads": 2, "intermediate_size": 10240, "num_kv_shared_layers": 18,
            },
            7.46,
        ),
        (
            {
                "hidden_size": 3840, "num_hidden_layers": 48, "layer_types": kinds(48, 6), "num_attention_heads": 16,
                "num_key_value_heads": 8, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
                "intermediate_size": 15360,
            },
            11.91,
        ),
        (
            {
                "hidden_size": 2816, "num_hidden_layers": 30, "layer_types": kinds(30, 6), "num_attention_heads": 16,
                "num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
                "intermediate_size": 2112, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
                "moe_intermediate_size": 704,
            },
            25.23,
        ),
        (
            {
                "hidden_size": 5376, "num_hidden_layers": 60, "layer_types": kinds(60, 6), "num_attention_heads": 32,
                "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
                "intermediate_size": 21504,
            },
            30.70,
        ),
    ],
    ids=["E2B", "E4B", "12B", "26B-A4B", "31B"],
)  # fmt: skip
def test_parameters_of_the_released_sizes(config, billions):
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = Gemma4Adapter().build(RELEASED | config)
    assert sum(parameter_count(part) for part in model.parts) / 1e9 == pytest.approx(billions, abs=0.005)
    assert mx.get_peak_memory() - before < 10**6

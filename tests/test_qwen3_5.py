"""The qwen3_5 adapter: against transformers and mlx-lm, one piece against segments, decoding, and both spellings."""

from __future__ import annotations

import json
import math

import mlx.core as mx
import pytest
from tiny_llama import PLUGINS, distance, write
from tiny_run import RUN_FILE, configure, metrics, tiny_run, write_tokenizer

from mortice.batch import Completion, Group, Row, Span
from mortice.context import CacheContext, Piece, SpanContext, pieces, runs
from mortice.errors import CheckpointError
from mortice.generation import generate_tokens
from mortice.launch import Notices, train
from mortice.objective import WeightedLoss
from mortice.planning import estimate, workload
from mortice.pretrained import load, random_model
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
from mortice_plugins.models.qwen3_5 import CENTRED, Qwen35Adapter
from mortice_plugins.optimizers.adam import AdamW

(CONFIG,) = Qwen35Adapter.examples
IDS = [5, 17, 3, 40, 31, 31, 2, 20, 33, 8, 11, 12, 7, 7, 1]
PAIRS = [
    Group("a", [1, 2, 3, 4], [Completion([5, 6, 7, 8]), Completion([8])], ((0, 1),)),
    Group("b", [9, 3], [Completion([2, 2, 11, 4]), Completion([1, 12, 30])], ((0, 1),)),
]


def tiny(config=CONFIG, seed=0):
    """Random weights, with decay, strength and norms away from where they start."""
    model = random_model(config, seed, plugins=PLUGINS).model
    flat = {n: p for n, p in model.named_parameters().items() if p.ndim == 1}
    model.bind({n: p + 0.3 * mx.random.normal(p.shape, key=mx.random.key(i)) for i, (n, p) in enumerate(flat.items())})
    return model


def logits(model, ids=IDS) -> mx.array:
    ctx = SpanContext(Row(ids, [Span(0, len(ids), None, 0)], [], [], [], [], []))
    return model.output.project(model.hidden(ctx, ctx.tokens))


def relative(found, expected) -> float:
    assert set(found) == set(expected)
    apart = sum(mx.square(found[n] - expected[n]).sum().item() for n in expected)
    return math.sqrt(apart / sum(mx.square(v).sum().item() for v in expected.values()))


def in_transformers_form(model, prefix="model.") -> dict[str, mx.array]:
    """The weights as transformers stores them: norms around 0, filters `[channels, 1, tokens]`."""
    weights = {}
    for name, value in model.named_parameters().items():
        if name.endswith(CENTRED) or name == "model.norm.weight":
            value = value - 1.0
        if name.endswith("conv1d.weight"):
            value = value.swapaxes(1, 2)
        weights[prefix + name.removeprefix("model.")] = value
    return weights


# Against transformers and mlx-lm


@pytest.mark.oracle
def test_logits_and_gradients_equal_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3_5TextConfig(
        **{k: v for k, v in CONFIG.items() if k not in ("model_type", "initializer_range")},
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        initializer_range=0.1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path, plugins=PLUGINS)
    assert (ours.family, ours.ignored) == ("qwen3_5", ())
    ids = [int(i) for i in torch.randint(0, 41, (150,))]
    theirs = theirs.double()
    out = theirs(torch.tensor([ids])).logits[0]
    assert distance(logits(ours.model, ids), mx.array(out.detach().float().numpy())) < 5e-5
    loss = -out.log_softmax(-1)[torch.arange(99, 149), torch.tensor(ids[100:])].mean()
    loss.backward()
    expected = {}
    for name, parameter in theirs.named_parameters():
        value = mx.array(parameter.grad.float().numpy())
        expected[name] = value.swapaxes(1, 2) if name.endswith("conv1d.weight") else value
    model = ours.model
    params = FullWeights().attach(model, 0)
    model.mark_trainable(params)
    from mortice_plugins.losses.sft import SFT

    group = Group("a", ids[:100], [Completion(ids[100:])])
    for backward in (Full(), Segmented(segment_size=1), Segmented(segment_size=3, eager=False), Checkpoint()):
        one = Engine(model, FlashCCE(), backward, Separate(), (WeightedLoss("sft", SFT()),))
        tally, gradients = one.gradients(params, [group])
        assert tally.loss == pytest.approx(loss.item(), abs=1e-5)
        expected.pop("lm_head.weight", None)
        assert relative(gradients, expected) < 1e-4


@pytest.mark.parametrize("strategy", [LoRA(rank=2), FullWeights()], ids=["lora", "full"])
@pytest.mark.parametrize("nested", [False, True], ids=["text", "multimodal"])
def test_adapters_go_to_mlx_lm_and_back(tmp_path, nested, strategy):
    utils = pytest.importorskip("mlx_lm")
    config = CONFIG | {"model_type": "qwen3_5", "rope_parameters": {"rope_theta": 1e4, "type": "default"}}
    if nested:
        config = {"model_type": "qwen3_5", "text_config": config | {"model_type": "qwen3_5_text"}}
    prefix = "model.language_model." if nested else "model."
    write_tokenizer(write(tmp_path / "model", in_transformers_form(tiny(), prefix), config))
    model = load(tmp_path / "model", plugins=PLUGINS).model
    before = logits(model)
    theirs, _ = utils.load(str(tmp_path / "model"))
    assert distance(theirs(mx.array([IDS]))[0], before) < 1e-4
    params = {n: p + 0.1 for n, p in strategy.attach(model, 0).items()}
    model.bind(params)
    strategy.save(model, params, tmp_path / "adapter")
    assert distance(logits(model), before) > 0.1
    theirs, _ = utils.load(str(tmp_path / "model"), adapter_path=str(tmp_path / "adapter"))
    assert distance(theirs(mx.array([IDS]))[0], logits(model)) < 1e-4
    again = load(tmp_path / "model", plugins=PLUGINS, adapter=tmp_path / "adapter")
    assert distance(logits(again.model), logits(model)) < 1e-6


# Recurrence over rows


def test_pieces_end_where_another_sequence_branches_off():
    """A prompt of 4 with a first completion behind it, a second one, and a row of its own."""
    spans = [Span(0, 4, None, 0), Span(4, 7, 0, 4), Span(7, 9, 0, 4), Span(9, 12, None, 0)]
    assert pieces(runs(spans)) == [Piece(0, 4, None), Piece(4, 7, 4), Piece(7, 9, 4), Piece(9, 12, None)]


def test_a_plain_row_is_one_piece():
    assert pieces(runs([Span(0, 4, None, 0), Span(4, 7, 0, 4)])) == [Piece(0, 7, None)]


def test_scan_hands_on_the_state_of_the_parent():
    """A running sum: behind the prompt (1 + 2 = 3) each completion begins with 3, another group with 0."""
    ctx = SpanContext(Row([0] * 6, [Span(0, 2, None, 0), Span(2, 3, 0, 2), Span(3, 5, 0, 2), Span(5, 6, None, 0)],
                          [], [], [], [], []))  # fmt: skip

    def add(inputs, state):
        total = mx.cumsum(inputs[0]) + (0 if state is None else state[0])
        return total, (total[-1],)

    assert ctx.scan(add, mx.array([1, 2, 10, 20, 30, 7])).tolist() == [1, 3, 13, 23, 53, 7]


def test_scan_in_decoding_goes_on_from_what_is_done():
    def add(inputs, state):
        total = mx.cumsum(inputs[0]) + (0 if state is None else state[0])
        return total, (total[-1],)

    ctx = CacheContext()
    assert ctx.scan(add, mx.array([1, 2]), layer=3).tolist() == [1, 3]
    assert ctx.scan(add, mx.array([1, 2]), layer=3).tolist() == [1, 3]  # not done yet
    ctx.advance(2)
    assert ctx.scan(add, mx.array([5]), layer=3).tolist() == [8]
    assert ctx.scan(add, mx.array([5]), layer=4).tolist() == [5]


def engine(model, backward=None, layout=None, head=None) -> Engine:
    losses = (WeightedLoss("orpo", ORPO()),)
    return Engine(model, head or Dense(), backward or Full(), layout or Separate(), losses)


def trained(adapter):
    model = tiny()
    params = adapter.attach(model, 0)
    params = {n: p + 0.05 * mx.random.normal(p.shape, key=mx.random.key(i)) for i, (n, p) in enumerate(params.items())}
    model.mark_trainable(params)
    return model, params


BACKWARDS = {
    **{f"cut-{i}": Segmented(cuts=(i,)) for i in range(1, 8)},
    "segmented-1": Segmented(segment_size=1),
    "segmented-3-traced": Segmented(segment_size=3, eager=False),
    "segmented-everything": Segmented(segment_size=3, keep="everything"),
    "segmented-compiled": Segmented(segment_size=4, eager=False, compile=True),
    "checkpoint": Checkpoint(segment_size=1),
    "full": Full(),
}


@pytest.mark.parametrize("adapter", [LoRA(rank=2), FullWeights()], ids=["lora", "full"])
def test_gradients_of_every_backward_and_layout_equal_the_plain_ones(adapter):
    model, params = trained(adapter)
    plain, expected = engine(model).gradients(params, PAIRS)
    assert all(mx.abs(value).max().item() > 0 for value in expected.values())
    layouts = [Separate(), PrefixShared(), Packed()]
    for i, (name, backward) in enumerate(BACKWARDS.items()):
        for layout in layouts if name in ("full", "segmented-1") else layouts[i % 3 :][:1]:
            one = engine(model, backward, layout, FlashCCE(token_tile=3, vocab_tile=5))
            tally, found = one.gradients(params, PAIRS)
            assert tally.loss == pytest.approx(plain.loss, abs=1e-5), name
            assert relative(found, expected) < 1e-4, name


def test_the_plain_gradient_equals_finite_differences():
    model, params = trained(FullWeights())
    _, gradients = engine(model).gradients(params, PAIRS)
    layer = "model.layers.0.linear_attn.{}".format
    for name in (layer("conv1d.weight"), layer("A_log"), layer("dt_bias"), layer("in_proj_b.weight"),
                 "model.layers.3.self_attn.q_proj.weight"):  # fmt: skip
        size = mx.sqrt(mx.square(gradients[name]).sum())
        direction, step = gradients[name] / size, min(5e-3, 0.02 / size.item())
        up, down = (
            engine(model).evaluate(params | {name: params[name] + s * step * direction}, PAIRS).loss for s in (1, -1)
        )
        assert size.item() == pytest.approx((up - down) / (2 * step), rel=1e-2), name


def test_no_group_of_a_packed_row_sees_another():
    model, params = trained(LoRA(rank=2))
    one = engine(model, layout=Packed(row_tokens=64))
    changed = Group("a", [7, 7, 7, 7], [Completion([1, 1, 1, 1]), Completion([2])], ((0, 1),))
    before = one.logprobs(params, PAIRS)[1]
    after = one.logprobs(params, [changed, PAIRS[1]])[1]
    assert before == after


def test_cached_decoding_equals_a_full_forward(monkeypatch):
    model = tiny()
    ids = list(IDS)
    for _ in range(20):
        ids.append(int(mx.argmax(logits(model, ids)[-1]).item()))
    greedy = Sampling(max_tokens=20, temperature=0.0)
    assert list(generate_tokens(model, IDS, greedy)) == ids[len(IDS) :]
    monkeypatch.setattr("mortice.generation.PREFILL", 4)
    assert list(generate_tokens(model, IDS, greedy)) == ids[len(IDS) :]


# Checkpoints


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_spellings_of_a_checkpoint(tmp_path, prefix):
    model = tiny()
    rest = {"mtp.fc.weight": mx.ones((2, 2)), "model.visual.patch.weight": mx.ones((2, 2)),
            "lm_head.weight": mx.ones((41, 32))}  # fmt: skip
    nested = prefix != "model."
    config = {"model_type": "qwen3_5", "text_config": CONFIG, "tie_word_embeddings": True} if nested else CONFIG
    if prefix.startswith("language"):
        weights = {prefix + n.removeprefix("model."): p for n, p in model.named_parameters().items()}
    else:
        weights = in_transformers_form(model, prefix)
    found = load(write(tmp_path, weights | rest, config), plugins=PLUGINS)
    assert found.ignored == ("model.visual.patch.weight", "mtp.fc.weight")
    assert distance(logits(found.model), logits(model)) < 1e-5


def test_an_output_matrix_of_its_own(tmp_path):
    model = tiny()
    weights = in_transformers_form(model)
    weights["lm_head.weight"] = -weights["model.embed_tokens.weight"]
    found = load(write(tmp_path, weights, CONFIG | {"tie_word_embeddings": False}), plugins=PLUGINS).model
    assert distance(logits(found), -logits(model)) < 1e-5


def test_bfloat16_weights_and_activations(tmp_path):
    weights = {n: w.astype(mx.bfloat16) for n, w in in_transformers_form(tiny()).items()}
    folder = write(tmp_path, weights, CONFIG)
    wide, narrow = (load(folder, plugins=PLUGINS, dtype=dtype).model for dtype in ("float32", "bfloat16"))
    assert distance(logits(narrow), logits(wide)) < 1.0
    ctx = CacheContext()
    assert narrow.run(narrow.embed(mx.array(IDS), ctx), ctx)["h"].dtype == mx.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "num_experts is set: the mixture of experts is not supported"),
        ({"layer_types": ["linear_attention"]}, "layer_types must name the kind of each of the 4 layers"),
        ({"layer_types": ["mamba"] * 4}, "layer_types 'mamba' is not supported"),
        ({"hidden_size": None}, "lacks 'hidden_size', which a Qwen3.5 model needs"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3, no multiple of 2 key heads"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type 'yarn' is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "0.1 of heads of 16 is no even number"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        Qwen35Adapter().build(CONFIG | changes)


def test_layers_by_interval_or_by_name():
    by_interval = Qwen35Adapter().build(CONFIG | {"full_attention_interval": 2})
    kinds = ["linear_attention", "full_attention"] * 2
    by_name = Qwen35Adapter().build(CONFIG | {"layer_types": kinds})
    names = set(by_interval.named_parameters())
    assert names == set(by_name.named_parameters())
    assert "model.layers.1.self_attn.q_proj.weight" in names


# Runs


def test_a_run_and_its_plan(tmp_path):
    config = CONFIG | {"vocab_size": 272}
    losses = []
    for i, backward in enumerate(("full", "segmented")):
        file = tiny_run(tmp_path / str(i), RUN_FILE)
        write(tmp_path / str(i) / "model", in_transformers_form(tiny(config)), config)
        outcome = train(configure(file, backward=backward, layout="prefix-shared"), Notices())
        losses.append([line["loss"] for line in metrics(outcome)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert json.loads((outcome.path / "adapter" / "adapter_config.json").read_text())["fine_tune_type"] == "lora"


def test_a_plan_repeats_every_four_layers():
    model, _ = random_model(CONFIG | {"num_hidden_layers": 16}, 0, plugins=PLUGINS).model, None
    params = LoRA(rank=2).attach(model, 0)
    model.mark_trainable(params)
    groups = [Group("a", [1] * 40, [Completion([2] * 30), Completion([3] * 30)], ((0, 1),))]
    one = engine(model, Segmented(), PrefixShared())
    found = estimate(one, params, AdamW().build(), workload(one, groups, 1))
    assert found.layers == (8, 12)

"""What a run is predicted to need against what its step takes: the peak within 10 %, and nothing changed by looking."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve, frozen
from tiny_llama import logits, tiny

from mortice.batch import Completion, Group, Limits, LossOutput
from mortice.linear import Embedding, Linear, Quantization, on_cpu, quantized
from mortice.model import Model
from mortice.objective import WeightedLoss
from mortice.planning import MEANING, PARTS, Estimate, estimate, workload
from mortice.protocols import Params
from mortice.step import Engine, clip
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
from mortice_plugins.optimizers.adam import AdamW

VOCAB = 1024
SMALL: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 16384,
}  # fmt: skip
WINDOW = {"model_type": "mistral", "sliding_window": 64}
MIXED = {"model_type": "qwen3", "head_dim": 32, "use_sliding_window": True, "sliding_window": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-4bit": {"packed": True},
    "llama-tied": {"tie_word_embeddings": True},
    "window": WINDOW,
    "alternating": MIXED | {"layer_types": ["sliding_attention", "full_attention"] * 6},
    "split": MIXED | {"max_window_layers": 8},
}
"""Changes of `SMALL`; `packed`: quantized to 4 bits."""
BACKWARDS = {
    "full": Full(),
    "checkpoint": Checkpoint(),
    "checkpoint-8": Checkpoint(segment_size=8),
    "segmented": Segmented(),
    "segmented-1": Segmented(segment_size=1),
    "segmented-8": Segmented(segment_size=8),
    "cuts": Segmented(keep="cuts"),
    "traced": Segmented(eager=False),
    "everything": Segmented(keep="everything"),
    "uneven": Segmented(cuts=(3, 10, 17)),
}
BACKWARDS = {name: b for name, b in BACKWARDS.items() if on_cpu() or getattr(b, "keep", "auto") in ("auto", "cuts")}
LAYOUTS = {"separate": Separate(), "shared": PrefixShared(), "packed": Packed(row_tokens=450)}


def model(name: str, **changes: Any) -> Model:
    config = SMALL | MODELS[name] | changes
    packed = config.pop("packed", False)
    built = tiny(**config).model
    for path, module, put in list(built.named_modules()) if packed else ():
        if isinstance(module, (Linear, Embedding)):
            values = mx.quantize(module.weight, group_size=32, bits=4)
            put(quantized(module, Quantization(4, 32)))
            built.invalidate()
            built.bind({f"{path}.{part}": value for part, value in zip(("weight", "scales", "biases"), values)})
    return built


def pairs(tokens: int, count: int = 2, answer: int = 50) -> list[Group]:
    """Pairs whose prompt and two answers are so many tokens together."""
    rng = np.random.default_rng(tokens)

    def completion() -> Completion:
        return Completion(rng.integers(0, VOCAB, answer).tolist())

    def prompt() -> list[int]:
        return rng.integers(0, VOCAB, tokens - 2 * answer).tolist()

    return [Group(f"{tokens}.{i}", prompt(), [completion(), completion()], ((0, 1),)) for i in range(count)]


def setup(built: Model, *, adapter: Any = None, **strategies: Any) -> tuple[Engine, Params]:
    params = (adapter or LoRA(rank=4)).attach(built, 0)
    built.mark_trainable(params)
    mx.eval(params, list(built.named_parameters().values()))
    plain = {"head": FlashCCE(tile_memory="4MB"), "backward": Segmented(), "layout": PrefixShared()}
    losses = (WeightedLoss("orpo", ORPO()),)
    return Engine(model=built, **({"losses": losses} | plain | strategies)), params


def held(engine: Engine, params: Params) -> int:
    """Bytes of weights and trainable parameters."""
    arrays = engine.model.named_parameters() | dict(params)
    return sum(value.nbytes for value in arrays.values())


def measured(engine: Engine, params: Params, groups: Sequence[Group]) -> tuple[int, float]:
    """(peak above what was held before, seconds) of one step's gradient."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    start = time.perf_counter()
    engine.gradients(params, groups)
    return mx.get_peak_memory() - before, time.perf_counter() - start


def predicted(engine: Engine, params: Params, groups: Sequence[Group]) -> Estimate:
    return estimate(engine, params, AdamW().build(), workload(engine, groups, len(groups)))


def check(engine: Engine, params: Params, groups: Sequence[Group], rel: float = 0.1) -> Estimate:
    """Compare the prediction of one step's gradient with the step; the share above the weights too, more loosely."""
    found = predicted(engine, params, groups)
    peak, _ = measured(engine, params, groups)
    fixed = held(engine, params)
    working = sum(found.parts.values()) - found.parts["optimizer"] - fixed
    assert fixed + working == pytest.approx(fixed + peak, rel=rel)
    assert working == pytest.approx(peak, rel=1.5 * rel)
    return found


# The peak


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backward", ["full", "segmented"])
def test_peak_of_every_kind_of_model(name, backward):
    engine, params = setup(model(name), backward=BACKWARDS[backward])
    found = check(engine, params, pairs(512, count=1))
    assert found.layers == {"alternating": (6, 10), "split": (12,)}.get(name, (6, 9))


@pytest.mark.parametrize("backward", BACKWARDS)
def test_peak_of_every_backward(backward):
    engine, params = setup(model("llama"), backward=BACKWARDS[backward])
    check(engine, params, pairs(256, count=1))


@pytest.mark.parametrize("backward", ["full", "segmented"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_peak_of_every_layout(layout, backward):
    engine, params = setup(model("llama"), backward=BACKWARDS[backward], layout=LAYOUTS[layout])
    found = check(engine, params, [*pairs(200), *pairs(140, answer=40)])
    assert found.micro_batches == (2 if layout == "packed" else 4)


@pytest.mark.parametrize("backward", ["full", "checkpoint", "segmented"])
def test_peak_where_all_weights_train(backward):
    engine, params = setup(model("llama-tied"), adapter=FullWeights(), backward=BACKWARDS[backward])
    check(engine, params, pairs(256))


@pytest.mark.parametrize("backward", ["full", "segmented"])
def test_peak_of_long_rows(backward):
    engine, params = setup(model("alternating"), backward=BACKWARDS[backward])
    check(engine, params, pairs(1024, count=1))


def test_peak_of_full_logits():
    engine, params = setup(model("llama", vocab_size=4096), head=Dense())
    found = check(engine, params, pairs(512, answer=150))
    assert found.head >= 2 * 300 * 4096 * 4  # logits and probabilities of 300 scored tokens


def test_peak_of_micro_batches_of_several_groups():
    engine, params = setup(model("llama"), limits=Limits(groups=2), backward=Full())
    found = check(engine, params, pairs(256, count=4))
    assert (found.micro_batches, found.tokens) == (2, 2 * 254)  # the last token of an answer is scored, not run


def test_peak_with_chunks():
    engine, params = setup(model("llama"), mlp_chunk=64, attention_chunk=32, backward=Full())
    check(engine, params, pairs(256, count=1))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2048, 4096, 8192])
@pytest.mark.parametrize("name", ["llama", "llama-4bit", "window"])
@pytest.mark.parametrize("backward", ["full", "checkpoint", "segmented", "everything"])
def test_peak_up_to_8192_tokens(name, backward, tokens):
    engine, params = setup(model(name), backward=BACKWARDS[backward])
    check(engine, params, pairs(tokens, count=1))


@frozen
class Closer:
    """How much nearer than the reference: needs ref_logprobs."""

    requires = frozenset({"ref_logprobs"})

    def counts(self, batch):
        return {"closer": batch.owner.size}

    def __call__(self, scores, batch):
        return LossOutput({"closer": ((batch.ref_logprobs - scores.logprobs).sum(), batch.owner.size)})


def test_a_loss_with_a_reference_holds_nothing_twice():
    """Its numbers are there before training, and the reference is gone."""
    engine, params = setup(model("llama"), losses=(WeightedLoss("closer", Closer()),))
    groups = [
        group.with_completions([evolve(c, ref_logprobs=[0.0] * len(c.ids)) for c in group.completions])
        for group in pairs(256, count=1)
    ]
    assert set(check_parts(check(engine, params, groups)).parts) == set(PARTS)


@pytest.mark.parametrize("adapter", [LoRA(rank=16), FullWeights()], ids=["lora", "full"])
def test_peak_while_the_optimizer_steps(adapter):
    engine, params = setup(model("llama"), adapter=adapter)
    found = predicted(engine, params, pairs(128, count=1))
    optimizer = AdamW().build()
    optimizer.init(dict(params))
    mx.eval(optimizer.state)
    fixed = held(engine, params) + found.parts["optimizer"]
    _, gradients = engine.gradients(params, pairs(128, count=1))
    mx.eval(gradients)
    mx.clear_cache()
    before = mx.get_active_memory() - sum(g.nbytes for g in gradients.values())
    mx.reset_peak_memory()
    clipped, _ = clip(gradients, 1e-9)
    updated = optimizer.apply_gradients(clipped, params)
    mx.eval(updated, optimizer.state)
    assert found.update == pytest.approx(fixed + mx.get_peak_memory() - before, rel=0.1)


# What a prediction says


def check_parts(found: Estimate) -> Estimate:
    assert tuple(found.parts) == PARTS == tuple(MEANING)
    assert all(size >= 0 for size in found.parts.values())
    assert found.peak == max(sum(found.parts.values()), found.update) + found.elsewhere
    return found


def test_what_is_held_beside_the_run_adds_to_its_peak():
    engine, params = setup(model("llama"))
    without = predicted(engine, params, pairs(128))
    beside = mx.zeros((10**7,), mx.uint8)
    mx.eval(beside)
    found = check_parts(predicted(engine, params, pairs(128)))
    assert found.elsewhere - without.elsewhere == pytest.approx(10**7, rel=0.01)
    assert sum(found.parts.values()) == pytest.approx(sum(without.parts.values()), rel=0.01)


def test_parts_are_what_they_are_called():
    engine, params = setup(model("llama"), backward=Full())
    found = check_parts(predicted(engine, params, pairs(256)))
    own = sum(p.nbytes for p in params.values())
    assert found.parts["adapter"] == own
    assert found.parts["weights"] == held(engine, params) - own
    assert 2 * own <= found.parts["optimizer"] <= 2 * own + 64
    assert found.parts["gradients"] == own  # of the first of two micro-batches
    assert (found.tokens, found.longest, found.scored, found.micro_batches) == (
        254,
        254,
        255,
        2,
    )  # ORPO's NLL is over the prompt too
    assert predicted(engine, params, pairs(256, count=1)).parts["gradients"] == 0


def test_a_backward_that_keeps_more_keeps_more():
    kept = [
        predicted(*setup(model("llama"), backward=backward), pairs(256, count=1)).parts["kept"]
        for backward in (Segmented(eager=False), Full())
    ]
    # A trace of all layers keeps them; segments keep h [T, D] at each cut: 12 of 254 tokens, 128 wide, in float32.
    assert kept[0] == pytest.approx(12 * 254 * 128 * 4, rel=0.3)
    assert kept[1] > 5 * kept[0]


def test_seconds_of_a_step_are_near_those_measured():
    engine, params = setup(model("llama"))
    groups = pairs(256)
    found = predicted(engine, params, groups)
    seconds = min(measured(engine, params, groups)[1] for _ in range(3))
    assert seconds / 4 < found.seconds < 4 * seconds  # loose: other processes run beside the tests


def test_a_prediction_changes_nothing():
    engine, params = setup(model("alternating"), adapter=LoRA(rank=4))
    groups = pairs(128)
    state = mx.random.state[0].tolist()
    before = engine.model.named_parameters()
    _, gradients = engine.gradients(params, groups)
    predicted(engine, params, groups)
    after = engine.model.named_parameters()
    assert list(after) == list(before)
    assert all(mx.array_equal(after[name], before[name]) for name in before)
    assert all(mx.array_equal(after[name], value) for name, value in params.items())
    assert mx.random.state[0].tolist() == state
    _, again = engine.gradients(params, groups)
    assert all(mx.array_equal(again[name], value) for name, value in gradients.items())


def test_the_largest_micro_batch_of_a_packing_layout_need_not_hold_the_longest_groups():
    engine, _ = setup(model("llama"), layout=Packed(row_tokens=1000))
    groups = [*pairs(602, count=4), *pairs(252, count=8)]
    found = workload(engine, groups, 4)
    assert sum(group.tokens for group in found.largest) > 602  # four short ones fill a row
    assert [len(group.prompt_ids) for group in found.largest] == [152] * 4
    assert (found.micro_batches, found.tokens) == (4, 4 * 600)
    separate, _ = setup(model("llama"), layout=PrefixShared())
    assert [len(group.prompt_ids) for group in workload(separate, groups, 4).largest] == [502]


# A model cut short


def test_first_layers_share_weights_and_leave_the_model_as_it_is():
    whole = tiny(num_hidden_layers=3).model
    small = whole.first_layers(2)
    assert (small.num_layers, whole.num_layers) == (2, 3)
    names = set(whole.named_parameters())
    assert {n for n in names if not n.startswith("model.layers.2.")} == set(small.named_parameters()) < names
    before = logits(small)
    name = "model.layers.2.mlp.up_proj.weight"
    whole.bind({name: 0 * whole.named_parameters()[name]})
    assert mx.array_equal(logits(small), before)  # knows nothing of layer 2
    name = "model.layers.1.mlp.up_proj.weight"
    whole.bind({name: 0 * whole.named_parameters()[name]})
    assert not mx.array_equal(logits(small), before)


def test_a_model_of_few_layers_is_run_whole():
    engine, params = setup(model("llama", num_hidden_layers=3))
    found = check(engine, params, pairs(128, count=1))
    assert (found.layers, found.all_layers) == ((3,), 3)


def test_unequal_cuts_are_run_whole():
    engine, params = setup(model("llama"), backward=BACKWARDS["uneven"])
    assert predicted(engine, params, pairs(128, count=1)).layers == (12,)


def test_layers_are_taken_in_whole_segments():
    engine, params = setup(model("llama", num_hidden_layers=18), backward=Segmented(segment_size=8))
    assert predicted(engine, params, pairs(128, count=1)).layers == (8, 12)

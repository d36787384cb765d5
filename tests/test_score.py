"""`mortice.score` against what other implementations compute on the same token ids (the `shared` reference values)."""

from __future__ import annotations

import itertools
import json
import math

import mlx.core as mx
import pytest

from mortice import score
from mortice.errors import ConfigError, DataError, PluginError
from mortice.pretrained import load

SFT_FULL = {"name": "sft", "scope": "full"}
ORPO_RESPONSE = {"name": "orpo", "sft_scope": "response"}
PREFERENCE = {
    "trl_dpo": "dpo",
    "trl_dpo_b05": {"name": "dpo", "beta": 0.5},
    "trl_hinge": {"name": "dpo", "variant": "hinge"},
    "trl_robust": {"name": "dpo", "variant": "robust", "label_smoothing": 0.1},
    "trl_sigmoid_norm": {"name": "dpo", "length_normalised": True},
    "trl_ipo": "ipo",
    "trl_exo": "exo",
    "trl_nca": "nca",
    "trl_bco": "bco",
    "trl_sppo": "sppo",
    "trl_apo_zero": "apo-zero",
    "trl_apo_down": "apo-down",
    "trl_discopop": "discopop",
    "trl_simpo": "simpo",
}
CASES = [
    ("sft_completion", "sft", "chosen"),
    ("sft_full", SFT_FULL, "chosen"),
    ("orpo_response", ORPO_RESPONSE, "pairs"),
    ("trl_orpo_full_batch4", {"name": "orpo", "beta": 0.1}, "pairs"),
    *((f"trl_orpo_full_row{i}", "orpo", i) for i in range(4)),
    *((name, loss, "pairs") for name, loss in PREFERENCE.items()),
]
HEADS = ["dense", {"name": "flash-cce", "token_tile": 7, "vocab_tile": 100}]
BACKWARDS = ["full", {"name": "segmented", "segment_size": 1}, {"name": "segmented", "segment_size": 3}]
LAYOUTS = ["separate", "prefix-shared"]
WAYS = [
    *itertools.product(HEADS, BACKWARDS, LAYOUTS),
    ({"name": "chunked", "chunk": 5}, "full", "packed"),
    ({"name": "chunked", "chunk": 5}, {"name": "segmented", "segment_size": 1}, "separate"),
    ("dense", {"name": "checkpoint", "segment_size": 1}, "prefix-shared"),
    (HEADS[1], {"name": "checkpoint", "segment_size": 3}, "packed"),
]


@pytest.fixture(scope="module")
def pairs(shared):
    rows = json.loads((shared / "losses" / "pairs.json").read_text())
    return [{"prompt_ids": r["prompt_ids"], "completions": [r["chosen_ids"], r["rejected_ids"]]} for r in rows]


@pytest.fixture(scope="module")
def expected(shared):
    return json.loads((shared / "losses" / "expected.json").read_text())


def chosen_only(pairs):
    return [pair | {"completions": pair["completions"][:1]} for pair in pairs]


def peft_gradients(path) -> dict[str, mx.array]:
    names = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b"}
    out = {}
    for name, value in mx.load(str(path)).items():
        for theirs, ours in names.items():
            if name.endswith(theirs):
                out[name.removesuffix(theirs) + ours] = value.T
    return out


def relative(found, expected) -> float:
    assert set(found) == set(expected)
    difference = sum(mx.square(found[n] - expected[n]).sum().item() for n in expected)
    return math.sqrt(difference / sum(mx.square(v).sum().item() for v in expected.values()))


@pytest.mark.parametrize(("head", "backward", "layout"), WAYS)
@pytest.mark.parametrize(("name", "loss", "which"), CASES, ids=[c[0] for c in CASES])
def test_losses_and_gradients_equal_the_reference(shared, pairs, expected, name, loss, which, head, backward, layout):
    groups = pairs if which == "pairs" else chosen_only(pairs) if which == "chosen" else [pairs[which]]
    found = score(
        shared / "losses" / "base", groups, loss=loss, head=head, backward=backward, layout=layout,
        adapter=shared / "losses" / "adapter", reference="base", gradients=True, micro_batch_size=3,
    )  # fmt: skip
    want = expected[name]["loss"]
    assert abs(found.loss - want) <= 1e-5 * max(1.0, abs(want))
    assert relative(found.gradients, peft_gradients(shared / "losses" / f"grads_{name}.safetensors")) < 1e-4


def test_every_reference_value_that_is_no_form_of_grpo_is_compared(expected):
    assert {name for name in expected if not name.startswith("form_")} == {name for name, _, _ in CASES}


@pytest.mark.parametrize(("head", "backward", "layout"), WAYS[::3])
def test_losses_add_up_by_their_weights(shared, pairs, expected, head, backward, layout):
    """DPO with a tenth of the NLL of the chosen answers: loss and gradient are the sum of both references."""
    found = score(
        shared / "losses" / "base", pairs, loss=["dpo", {"name": "sft", "weight": 0.1}], head=head, backward=backward,
        layout=layout, adapter=shared / "losses" / "adapter", reference="base", gradients=True, micro_batch_size=3,
    )  # fmt: skip
    assert found.loss == pytest.approx(expected["trl_dpo"]["loss"] + 0.1 * expected["sft_completion"]["loss"], rel=1e-5)
    assert found.metrics["dpo/preference"] == pytest.approx(expected["trl_dpo"]["loss"], rel=1e-5)
    dpo, sft = (
        peft_gradients(shared / "losses" / f"grads_{n}.safetensors") for n in ("trl_dpo", "sft_completion")
    )  # fmt: skip
    assert relative(found.gradients, {name: value + 0.1 * sft[name] for name, value in dpo.items()}) < 1e-4


@pytest.mark.parametrize("name", ["minicpm5", "smollm2", "llama3_rope", "qwen3"])
@pytest.mark.parametrize(
    ("head", "backward", "layout"),
    [("dense", "full", "separate"), ("flash-cce", "segmented", "prefix-shared")],
)
def test_models_equal_the_reference(shared, name, head, backward, layout):
    folder = shared / "models" / name
    reference = mx.load(str(folder / "reference.safetensors"))
    ids = reference["input_ids"].tolist()
    group = {"prompt_ids": ids[:16], "completions": [ids[16:]]}
    found = score(
        folder, [group], loss="sft", head=head, backward=backward, layout=layout, adapter=folder / "adapter",
        gradients=True,
    )  # fmt: skip
    assert found.loss == pytest.approx(reference["loss_tokens_16_on"].item(), abs=1e-5)
    logprobs = mx.array(found.logprobs[0])
    assert mx.abs(logprobs - reference["adapter_logprobs"][15:]).max().item() < 1e-4
    gradients = {n.removeprefix("grad."): v for n, v in reference.items() if n.startswith("grad.")}
    path = {}
    for full, value in gradients.items():
        stem, _, kind = full.removesuffix(".weight").rpartition(".")
        path[f"{stem}.{kind.replace('lora_A', 'lora_a').replace('lora_B', 'lora_b')}"] = value.T
    assert relative(found.gradients, path) < 1e-4


@pytest.mark.parametrize("name", ["minicpm5", "smollm2", "llama3_rope", "qwen3"])
@pytest.mark.parametrize("adapter", [False, True], ids=["base", "adapter"])
def test_logits_equal_the_reference(shared, name, adapter):
    from mortice.batch import Row, Span
    from mortice.context import SpanContext

    folder = shared / "models" / name
    reference = mx.load(str(folder / "reference.safetensors"))
    ids = reference["input_ids"].tolist()
    model = load(folder, adapter=folder / "adapter" if adapter else None).model
    ctx = SpanContext(Row(ids, [Span(0, len(ids), None, 0)], [], [], [], [], []))
    logits = model.output.project(model.hidden(ctx, ctx.tokens))
    want = reference["adapter_logits" if adapter else "base_logits"]
    assert mx.abs(logits - want).max().item() < 1e-4


def test_logprobs_of_every_completion_with_and_without_adapter(shared, pairs):
    want = json.loads((shared / "losses" / "logps.json").read_text())
    base = score(shared / "losses" / "base", pairs, loss="orpo")
    adapted = score(shared / "losses" / "base", pairs, loss="orpo", adapter=shared / "losses" / "adapter")
    assert [len(x) for x in base.logprobs] == [len(c) for p in pairs for c in p["completions"]]
    flat = json.dumps(want)
    assert base.logprobs != adapted.logprobs
    for found in (base, adapted):
        assert f"{found.logprobs[0][0]:.2f}" in flat


def test_masks_leave_tokens_out(shared, pairs):
    group = chosen_only(pairs)[0]
    mask = [i % 2 == 0 for i in range(len(group["completions"][0]))]
    found = score(shared / "losses" / "base", [group | {"loss_masks": [mask]}], loss="sft")
    kept = [v for v, m in zip(found.logprobs[0], mask) if m]
    assert found.loss == pytest.approx(-sum(kept) / len(kept), abs=1e-5)
    assert all(math.isnan(v) for v, m in zip(found.logprobs[0], mask) if not m)


def test_the_reference_policy(shared, pairs):
    """A loss from outside that needs a reference: `initial` is the adapter itself, `base` the model without it."""
    from attrs import frozen

    from mortice.batch import LossOutput
    from mortice.plugins import load_plugins
    from mortice.registry import Strategy

    @frozen
    class Gap:
        """Mean log-ratio to the reference."""

        requires = frozenset({"ref_logprobs"})

        def __call__(self, scores, batch):
            gap = batch.sum(scores.logprobs - batch.ref_logprobs)
            return LossOutput({"gap": (gap.sum(), gap.size)})

    plugins = load_plugins()
    plugins.registry.add(Strategy("loss", "gap", Gap, "test", "test"))
    arguments = {"loss": "gap", "adapter": shared / "losses" / "adapter", "plugins": plugins}
    assert score(shared / "losses" / "base", pairs, **arguments).loss == 0.0
    base = score(shared / "losses" / "base", pairs, reference="base", **arguments)
    plain = score(shared / "losses" / "base", pairs, loss="sft")
    for found, want in zip(base.ref_logprobs, plain.logprobs, strict=True):
        assert found == pytest.approx(want, abs=1e-5)
    given = [g | {"ref_logprobs": [[0.0] * len(c) for c in g["completions"]]} for g in pairs]
    assert score(shared / "losses" / "base", given, **arguments).ref_logprobs[0][0] == 0.0


def test_gradients_without_an_adapter_are_those_of_every_weight(shared, pairs):
    found = score(shared / "losses" / "base", pairs, loss="orpo", gradients=True)
    assert "model.embed_tokens.weight" in found.gradients
    assert "lm_head.weight" in found.gradients
    assert mx.abs(found.gradients["model.norm.weight"]).max().item() > 0


def test_temperature_divides_the_logits(shared, pairs):
    one, half = (score(shared / "losses" / "base", pairs, loss="sft", temperature=t) for t in (1.0, 0.5))
    assert one.loss != pytest.approx(half.loss, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"completion": [[1]]}, r"groups\[0\]: unknown key 'completion'; did you mean 'completions'\?"),
        ({"prompt_ids": []}, r"groups\[0\]: 'prompt_ids' is missing or empty"),
        ({"loss_masks": [[True]]}, r"groups\[0\]: 'loss_masks' has 1 entries for 2 completions"),
        ({"old_logprobs": [[0.0], [0.0]]}, r"groups\[0\]: old_logprobs has 1 entries for 10 token ids"),
    ],
)
def test_malformed_groups_are_named(shared, pairs, change, message):
    with pytest.raises(DataError, match=message):
        score(shared / "losses" / "base", [pairs[0] | change], loss="orpo")


def test_wrong_strategies_and_requirements_are_named(shared, pairs):
    base = shared / "losses" / "base"
    with pytest.raises(PluginError, match="did you mean 'orpo'"):
        score(base, pairs, loss="orp")
    with pytest.raises(ConfigError, match=r"loss.betta: unknown key; did you mean 'beta'\?"):
        score(base, pairs, loss={"name": "orpo", "betta": 1.0})
    with pytest.raises(ConfigError, match="loss 'orpo' needs pairs"):
        score(base, chosen_only(pairs), loss="orpo")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": [99999]}, "token id 99999, but the model's vocabulary has 512 tokens"),
        ({"prompt_ids": [1.7]}, "must be whole numbers of 0 or more, found 1.7"),
        ({"prompt_ids": "abc"}, "must be whole numbers, found 'abc'"),
        ({"completions": [[-1], [2]]}, "must be whole numbers of 0 or more, found -1"),
        ({"completions": [[], [2]]}, r"groups\[0\]: completion 0 has no scored token"),
        (
            {"completions": [[1], [2]], "loss_masks": [[False], [True]]},
            r"groups\[0\]: completion 0 has no scored token",
        ),
        ({"advantages": 3}, "'advantages' must be a list"),
    ],
)
def test_what_has_no_logprob_is_refused(shared, pairs, change, message):
    with pytest.raises(DataError, match=message):
        score(shared / "losses" / "base", [pairs[0] | change], loss="orpo")


def test_arrays_are_lists_of_ids(shared, pairs):
    import numpy as np

    plain = score(shared / "losses" / "base", pairs, loss="orpo").loss
    for kind in (np.array, mx.array):
        arrays = [
            {"prompt_ids": kind(p["prompt_ids"]), "completions": [kind(c) for c in p["completions"]]} for p in pairs
        ]
        assert score(str(shared / "losses" / "base"), arrays, loss="orpo").loss == plain


def test_the_weight_of_a_loss_counts(shared, pairs):
    base = shared / "losses" / "base"
    assert score(base, pairs, loss={"name": "orpo", "weight": 2.0}).loss == pytest.approx(
        2 * score(base, pairs, loss="orpo").loss
    )
    with pytest.raises(ConfigError, match="must be > 0"):
        score(base, pairs, loss={"name": "orpo", "weight": 0})
    with pytest.raises(ConfigError, match="temperature must be > 0"):
        score(base, pairs, loss="orpo", temperature=0)

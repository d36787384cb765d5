"""The reference policy of whole runs: what it may be, that a run starts from it exactly, and what is kept on disk."""

from __future__ import annotations

import gc
import itertools
import json
import math
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve, frozen
from tiny_llama import checkpoint, tiny
from tiny_run import (
    RUN_FILE,
    WORDS,
    adapter,
    configure,
    metrics,
    pairs,
    plugin,
    run,
    same,
    tiny_run,
    validations,
    write_lines,
    write_tokenizer,
)

from mortice.batch import Completion, Group
from mortice.errors import CheckpointError, ConfigError, TrainingError
from mortice.launch import Notices, prepare, train
from mortice.reference import Reference, reference_params
from mortice.reference_cache import FOLDER, KEEP, ReferenceCache
from mortice.step import Engine
from mortice_plugins.adapters.lora import LoRA
from mortice_plugins.backwards.full import Full

LN2 = np.float32(math.log(2))
DPO = RUN_FILE.replace('"orpo"', '"dpo"').replace("[train]", "[train]\nvalidate_every = 99")
BACKWARDS = {
    "full": ("backward.name=full",),
    "checkpoint": ("backward.name=checkpoint",),
    "segmented": ("backward.name=segmented",),
    "segmented-traced": ("backward.name=segmented", "backward.eager=false"),
}
LAYOUTS = {
    "separate": ("layout.name=separate", "train.micro_batch_size=3"),
    "prefix-shared": ("layout.name=prefix-shared",),
    "packed": ("layout.name=packed", "layout.row_tokens=64"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One folder for tests that do not change it."""
    return tiny_run(tmp_path_factory.mktemp("tiny"), DPO)


@pytest.fixture
def counted(monkeypatch):
    """Groups that were scored outside training and evaluation, as they are scored."""
    seen: list[str] = []
    scores = Engine.scores

    def counting(self, params, micro, **options):
        seen.extend(group.id for group in micro.groups)
        return scores(self, params, micro, **options)

    monkeypatch.setattr(Engine, "scores", counting)
    return seen


def started(outcome) -> tuple[float, float, float, float]:
    """Loss and margin of the first step and of the validation before it."""
    step, valid = metrics(outcome)[0], validations(outcome)[0]
    return step["loss"], step["margin"], valid["valid/loss"], valid["valid/margin"]


def exactly_ln_2(outcome) -> bool:
    loss, margin, held_out, held_out_margin = started(outcome)
    return (np.float32(loss), margin, np.float32(held_out), held_out_margin) == (LN2, 0.0, LN2, 0.0)


def said(file, *settings: str) -> tuple[list[str], object]:
    """What a run says of its reference, and how it went."""
    lines: list[str] = []

    @frozen
    class Listener:
        """Keeps what is said."""

        def open(self, info):
            return nullcontext(SimpleNamespace(log=lambda *_: None, say=lines.append))

    heard = file.with_name("heard.toml")
    heard.write_text(file.read_text() + '\n[[tracker]]\nname = "listener"\n\n[[tracker]]\nname = "jsonl"\n')
    config = configure(heard, *settings, plugins=[plugin("tracker", "listener", Listener)])
    outcome = train(config, Notices(show=lines.append))
    return [line for line in lines if line.startswith("reference")], outcome


# The start


@pytest.mark.parametrize(("backward", "layout", "head"), [
    (b, lay, "dense" if (i + j) % 2 else "flash-cce")
    for (i, b), (j, lay) in itertools.product(enumerate(BACKWARDS), enumerate(LAYOUTS))
])  # fmt: skip
def test_a_fresh_run_starts_at_exactly_ln_2(home, backward, layout, head):
    """To the last bit, in training and validation, whatever computes it."""
    settings = (*BACKWARDS[backward], *LAYOUTS[layout], f"head.name={head}")
    outcome = run(home, "train.steps=2", "reference.cache=false", *settings)
    assert exactly_ln_2(outcome), started(outcome)
    assert metrics(outcome)[1]["margin"] != 0


@pytest.mark.parametrize("settings", [
    ("adapter.name=full",),
    ("adapter.name=full", "reference.policy=base", "backward.name=segmented"),
    ("reference.policy=base",),
    ("model.dtype=bfloat16",),
], ids=str)  # fmt: skip
def test_other_fresh_runs_do_too(home, tmp_path, settings):
    text = DPO.replace("rank = 4", "") if "adapter.name=full" in settings else DPO
    file = home.parent / f"other-{tmp_path.name}.toml"
    file.write_text(text)
    assert exactly_ln_2(run(file, "train.steps=1", "reference.cache=false", *settings))


def test_with_a_loss_of_prompts_beside_it(home):
    """Prompt targets change what the head multiplies at once; the reference is scored beside them too."""
    file = home.parent / "two.toml"
    losses = '[[loss]]\nname = "dpo"\n\n[[loss]]\nname = "sft"\nscope = "full"\nweight = 0.1\n'
    file.write_text(DPO.replace('[loss]\nname = "dpo"\n', losses))
    outcome = run(file, "train.steps=1", "reference.cache=false")
    assert metrics(outcome)[0]["margin"] == validations(outcome)[0]["valid/margin"] == 0.0


def test_a_backward_without_a_forward_of_its_own_runs_whole(home):
    @frozen
    class Bare:
        """`full`, and nothing beside it."""

        def __call__(self, *arguments):
            return Full()(*arguments)

    outcome = run(home, "train.steps=1", "reference.cache=false", plugins=[plugin("backward", "bare", Bare)],
                  backward="bare")  # fmt: skip
    assert exactly_ln_2(outcome)


# What it may be


@pytest.fixture(scope="module")
def tuned(home):
    """An adapter folder after some steps of SFT."""
    return run(home, "train.steps=6", loss="sft").path / "adapter"


def test_a_run_from_an_sft_adapter(home, tuned):
    """`initial` is that adapter; `base` is the model without it; the adapter's own folder is `initial` again."""
    from_it = ("train.steps=1", f"adapter.init={tuned}", "reference.cache=false")
    initial = run(home, *from_it)
    assert exactly_ln_2(initial)
    base = run(home, *from_it, "reference.policy=base")
    assert metrics(base)[0]["displacement"] > 0.01
    assert metrics(base)[0]["lw"] == metrics(initial)[0]["lw"]
    assert exactly_ln_2(run(home, *from_it, f"reference.policy={tuned}"))
    fresh = run(home, "train.steps=1", f"reference.policy={tuned}", "reference.cache=false")
    assert metrics(fresh)[0]["displacement"] == pytest.approx(-metrics(base)[0]["displacement"], abs=1e-5)


def test_a_run_that_goes_on_with_preferences_keeps_its_reference_by_choice(home, tuned):
    first = run(home, "train.steps=4", f"adapter.init={tuned}", "reference.cache=false")
    from_it = ("train.steps=1", f"adapter.init={first.path / 'adapter'}", "reference.cache=false")
    kept = run(home, *from_it, f"reference.policy={tuned}")
    assert validations(kept)[0]["valid/loss"] == pytest.approx(first.after["loss"], rel=1e-6)
    assert validations(kept)[0]["valid/margin"] == pytest.approx(first.after["margin"], rel=1e-4)
    assert exactly_ln_2(run(home, *from_it))


def test_an_adapter_of_another_shape(home, tmp_path):
    """Rank, layers and scale of its own, on the same base, which is loaded and let go for it."""
    small = LoRA(rank=2, targets=["q_proj"], scale=1.0)
    model = tiny(vocab_size=272).model
    params = small.attach(model, 3)
    params = {name: value + 0.3 for name, value in params.items()}
    small.save(model, params, tmp_path / "small")
    outcome = run(home, "train.steps=1", f"reference.policy={tmp_path / 'small'}", "reference.cache=false")

    prepared = prepare(configure(home))
    groups, _ = prepared.source.next(0)
    own = prepared.engine.logprobs(prepared.policy.params, groups)
    model.bind(params)
    theirs = evolve(prepared.engine, model=model).logprobs(params, groups)
    moved = [np.mean(np.subtract(a[0], b[0])) for a, b in zip(own, theirs)]
    assert abs(np.mean(moved)) > 0.01
    assert metrics(outcome)[0]["displacement"] == pytest.approx(np.mean(moved), abs=1e-5)


def other_model(folder, **changes):
    checkpoint(folder, seed=5, vocab_size=272, **changes)
    write_tokenizer(folder)
    return folder


def test_another_model(home, tmp_path):
    """Of other sizes, with the same tokenizer."""
    folder = other_model(tmp_path / "other", hidden_size=32, num_hidden_layers=1)
    outcome = run(home, "train.steps=4", f"reference.policy={folder}", "reference.cache=false")
    prepared = prepare(configure(home))
    model = tiny(5, vocab_size=272, hidden_size=32, num_hidden_layers=1).model
    groups = prepared.source.valid
    own = prepared.engine.logprobs(prepared.policy.params, groups)
    theirs = evolve(prepared.engine, model=model).logprobs({}, groups)
    ratios = [[sum(a) - sum(b) for a, b in zip(g, h)] for g, h in zip(own, theirs)]
    margins = [0.1 * (chosen - rejected) for chosen, rejected in ratios]
    assert validations(outcome)[0]["valid/margin"] == pytest.approx(np.mean(margins), rel=1e-4)


def test_another_model_needs_the_same_tokenizer(home, tmp_path):
    folder = other_model(tmp_path / "other")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"has another tokenizer.*\(2 tokens differ: 'a' is \d+ here and \d+ there"):
        prepare(configure(home, f"reference.policy={folder}"))
    file.unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json, so nobody can say"):
        prepare(configure(home, f"reference.policy={folder}"))


def test_a_folder_that_is_neither(home, tuned, tmp_path):
    with pytest.raises(ConfigError, match=rf"neither an adapter .* nor a model .*; did you mean {tuned}\?"):
        prepare(configure(home, f"reference.policy={tuned.parent}"))
    broken = tmp_path / "broken"
    shutil.copytree(tuned, broken)
    (broken / "adapters.safetensors").write_bytes(b"not much")
    with pytest.raises(CheckpointError, match="damaged"):
        run(home, f"reference.policy={broken}")


def test_one_model_is_resident(tmp_path, monkeypatch):
    """The other model is scored and gone before the own weights are read, and full weights are not held twice."""
    file = tiny_run(tmp_path, DPO)
    for name, seed in (("model", 0), ("other", 5)):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        checkpoint(tmp_path / name, seed=seed, vocab_size=272, hidden_size=256, intermediate_size=512)
        write_tokenizer(tmp_path / name)
    weights = (tmp_path / "model" / "model.safetensors").stat().st_size
    held: list[int] = []
    scores = Engine.scores

    def measured(self, *arguments, **options):
        found = scores(self, *arguments, **options)
        held.append(mx.get_active_memory())
        return found

    monkeypatch.setattr(Engine, "scores", measured)

    def most(*settings: str) -> tuple[float, float]:
        """Weights that were held while the reference was scored, and at the end of a step."""
        held.clear()
        gc.collect()
        before = mx.get_active_memory()
        outcome = run(file, "train.steps=2", "reference.cache=false", "backward.name=segmented", *settings)
        step = metrics(outcome)[1]["memory_active_gb"] * 1e9
        return (max(held) - before) / weights, (step - before) / weights

    scoring, training = most(f"reference.policy={tmp_path / 'other'}")
    assert 0.9 < scoring < 1.3 and training < 1.3
    file.write_text(DPO.replace("rank = 4", 'name = "full"'))
    scoring, training = most()
    assert scoring < 1.3
    assert training < 4.3  # weights, two moments, and the gradient


def test_a_source_that_samples_takes_no_second_model(home, tmp_path):
    @frozen
    class Sampling:
        """Pairs out of nothing."""

        provides = frozenset({"pairs"})

        def open(self, context):
            def pull(step):
                sides = [Completion([3, 4 + step]), Completion([5])]
                return [Group(f"g{step}", [1, 2], sides, ((0, 1),))], 1

            return SimpleNamespace(
                provides=self.provides, steps_per_epoch=None, can_validate=False, next=pull, state=dict
            )

    plugins = [plugin("source", "sampling", Sampling)]
    outcome = run(home, "train.steps=3", plugins=plugins, source="sampling")
    lines = metrics(outcome)
    assert np.float32(lines[0]["loss"]) == LN2 and lines[2]["margin"] != 0
    folder = other_model(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"another model in memory during training.*'sampling' does not know"):
        run(home, f"reference.policy={folder}", "train.steps=1", plugins=plugins, source="sampling")
    file = home.parent / "sampled-full.toml"
    file.write_text(DPO.replace("rank = 4", 'name = "full"'))
    with pytest.raises(ConfigError, match="a second copy of all weights in memory"):
        run(file, "train.steps=1", plugins=plugins, source="sampling")


def test_a_source_may_not_bring_what_it_did_not_know(home):
    prepared = prepare(configure(home))
    reference = Reference(prepared.engine, prepared.policy.params, known=True)
    groups, _ = prepared.source.next(0)
    reference.fill(groups, training=True)
    reference.settle()
    assert reference.params is None
    reference.fill(groups, training=True)
    with pytest.raises(TrainingError, match="new: not scored under the reference policy before training"):
        reference.fill([Group("new", [1, 2], [Completion([3]), Completion([4])], ((0, 1),))], training=True)


def test_scores_that_a_completion_has_are_kept(home):
    prepared = prepare(configure(home))
    params = reference_params("initial", prepared.adapter, prepared.engine.model, prepared.policy.params)
    group = prepared.source.next(0)[0][0]
    chosen, rejected = group.completions
    given = [-0.5] * len(chosen.ids)
    group = group.with_completions([evolve(chosen, ref_logprobs=given), rejected])
    filled = Reference(prepared.engine, params).fill([group])[0]
    assert filled.completions[0].ref_logprobs == tuple(given)
    own = prepared.engine.logprobs(params, [group])[0][1]
    assert filled.completions[1].ref_logprobs == own


def test_a_reference_that_nothing_needs_is_said(home):
    notices = Notices()
    prepare(configure(home, "reference.policy=base", loss="simpo"), notices)
    assert "no loss of this run needs a reference; [reference] changes nothing" in notices.messages


# What is kept


def test_with_a_cache_no_reference_forward_runs(home, tmp_path, counted):
    """10 rows of training and 3 held out are scored once; a second run, with another seed and loss, scores none but
    those of its first step where they stand beside others."""
    settings = ("train.steps=6", f"reference.cache={tmp_path}")
    first = run(home, *settings)
    assert len(counted) == 13
    counted.clear()
    second = run(home, *settings)
    assert counted == []
    assert metrics(second)[5]["loss"] == metrics(first)[5]["loss"]
    assert same(adapter(first.path / "adapter"), adapter(second.path / "adapter"))
    other = run(home, *settings, "train.seed=7", "adapter.rank=2", loss="ipo")
    assert counted == []
    assert metrics(other)[0]["margin"] == 0.0
    run(home, *settings, "train.seed=7", "train.micro_batch_size=2")
    assert len(counted) == 4 + 2  # of the first step, and the two held out that share a micro-batch


def test_a_short_run_scores_what_it_needs_and_a_longer_one_the_rest(home, tmp_path, counted):
    run(home, "train.steps=1", f"reference.cache={tmp_path}")
    assert len(counted) == 4 + 3
    run(home, "train.steps=9", f"reference.cache={tmp_path}")
    assert len(counted) == 13


def test_the_cache_lies_beside_the_data_unless_told_otherwise(tmp_path):
    file = tiny_run(tmp_path, DPO)
    run(file, "train.steps=1")
    assert len(list((tmp_path / FOLDER).glob("*.safetensors"))) == 1
    shutil.rmtree(tmp_path / FOLDER)
    run(file, "train.steps=1", "reference.cache=false")
    assert not (tmp_path / FOLDER).exists()
    file.write_text(DPO + '\n[reference]\ncache = "kept"\n')
    run(file, "train.steps=1")
    assert list((tmp_path / "kept").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("head.name=flash-cce", "head"),
        ("backward.name=segmented", "backward"),
        ("layout.name=prefix-shared", "layout"),
        ("context.mlp_chunk=3", "context"),
        ("model.dtype=bfloat16", "dtype"),
        ("adapter.init", "reference"),
        ("model", "model"),
    ],
)
def test_what_the_scores_depend_on_is_told_apart(tmp_path, counted, tuned, setting, name):
    """A change is seen, what changed is said, and all is scored again."""
    file = tiny_run(tmp_path, DPO)
    run(file, "train.steps=3")
    counted.clear()
    settings = [setting]
    if setting == "model":
        checkpoint(tmp_path / "model", seed=9, vocab_size=272)
        settings = []
    if setting == "adapter.init":
        settings = [f"adapter.init={tuned}"]
    lines, outcome = said(file, "train.steps=3", *settings)
    assert len(counted) == 13
    assert any(f"is of another {name} (" in line for line in lines), lines
    assert exactly_ln_2(outcome)
    assert len(list((tmp_path / FOLDER).glob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("settings", "scored", "change"),
    [
        (("data.max_length=12",), 13, "data.max_length (64 → 12)"),
        (("data.max_length=12", "data.truncation=keep-start"), 13, "data.truncation (keep-end → keep-start)"),
        (("rows",), 1, "content of data.train"),
    ],
)
def test_data_that_changed_is_scored_again_and_no_other(tmp_path, counted, settings, scored, change):
    file = tiny_run(tmp_path, DPO)
    run(file, "train.steps=3")
    counted.clear()
    if settings == ("rows",):
        write_lines(tmp_path / "train.jsonl", pairs([*WORDS[:-1], "mauve"]))
        settings = ()
    lines, outcome = said(file, "train.steps=3", *settings)
    assert len(counted) == scored
    assert any("since the others were" in line and change in line for line in lines), lines
    assert exactly_ln_2(outcome)


def test_a_damaged_cache_is_said_and_made_anew(tmp_path, counted):
    file = tiny_run(tmp_path, DPO)
    first = run(file, "train.steps=3")
    [kept] = (tmp_path / FOLDER).glob("*.safetensors")
    whole = kept.read_bytes()
    wrong = bytearray(whole)
    wrong[-1] ^= 1
    for content in (whole[: len(whole) // 2], bytes(wrong), b""):
        kept.write_bytes(content)
        counted.clear()
        lines, outcome = said(file, "train.steps=3")
        assert any(f"{kept} cannot be used (damaged" in line for line in lines), lines
        assert len(counted) == 13
        assert same(adapter(first.path / "adapter"), adapter(outcome.path / "adapter"))
        assert kept.read_bytes() == whole


def test_two_runs_share_a_file(tmp_path):
    """What one has written while the other scored stays."""
    group, other = b"g" * 16, b"h" * 16
    caches = [ReferenceCache.open(tmp_path, {"model": "a"}, {}, print) for _ in range(2)]
    for cache, key in zip(caches, (group, other)):
        cache.put(b"t", key, bytes(16), np.float32([1.5, math.nan]))
    for cache in caches:
        cache.save()
    again = ReferenceCache.open(tmp_path, {"model": "a"}, {}, print)
    for key in (group, other):
        np.testing.assert_array_equal(again.find(b"t", key, bytes(16), exact=True), np.float32([1.5, math.nan]))
    assert again.find(b"e", group, bytes(16), exact=False) is None
    assert again.find(b"t", group, b"x" * 16, exact=True) is None
    assert again.find(b"t", group, b"x" * 16, exact=False) is not None
    assert [file.suffix for file in tmp_path.iterdir()] == [".safetensors"]


def test_a_folder_keeps_the_files_used_last(tmp_path):
    for i in range(KEEP + 3):
        cache = ReferenceCache.open(tmp_path, {"model": str(i)}, {}, print)
        cache.put(b"t", b"g" * 16, bytes(16), np.float32([i]))
        cache.save()
    assert len(list(tmp_path.iterdir())) == KEEP
    assert cache.file.exists()


def test_a_folder_that_cannot_be_written_is_said(home, tmp_path):
    (tmp_path / "file").write_text("")
    lines, outcome = said(home, "train.steps=1", f"reference.cache={tmp_path / 'file' / 'below'}")
    assert any("scores are not kept: cannot write" in line for line in lines)
    assert exactly_ln_2(outcome)


def test_what_was_scored_before_an_interruption_is_kept(home, tmp_path, counted, monkeypatch):
    fill = Reference.fill

    def interrupted(self, groups, **options):
        if len(counted) >= 8:
            raise KeyboardInterrupt
        return fill(self, groups, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Reference, "fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(home, "train.steps=3", f"reference.cache={tmp_path}")
    assert len(counted) == 8
    run(home, "train.steps=3", f"reference.cache={tmp_path}")
    assert len(counted) == 13


def test_another_model_is_kept_too_and_then_not_even_loaded(home, tmp_path, counted, monkeypatch):
    folder = other_model(tmp_path / "other")
    settings = ("train.steps=3", f"reference.policy={folder}", f"reference.cache={tmp_path / 'kept'}")
    first = run(home, *settings)
    assert len(counted) == 13
    monkeypatch.setattr("mortice.reference_policy.load", None)
    again = run(home, *settings)
    assert len(counted) == 13
    assert same(adapter(first.path / "adapter"), adapter(again.path / "adapter"))

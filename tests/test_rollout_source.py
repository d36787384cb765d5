"""The rollout source: sample, reward, advantage or pairs, several passes, held-out prompts, states."""

from __future__ import annotations

import json
import math
from itertools import count
from typing import ClassVar

import numpy as np
import pytest
from attrs import evolve, frozen
from tiny_run import adapter, configure, plugin, run, same, tiny_run, write_lines

from mortice.batch import Completion
from mortice.cli import main
from mortice.errors import ConfigError, DataError, TrainingError
from mortice.launch import Notices, plan, prepare
from mortice.trainer import Stopped
from mortice_plugins.rollouts.sequential import Sequential
from mortice_plugins.sources.advantages import advantages, best_and_worst, without_signal

RUN_FILE = """
[model]
path = "model"

[data]
train = "prompts.jsonl"
valid = "held_out.jsonl"
max_length = 64

[loss]
name = "grpo"

[rollout]
samples = 4
max_tokens = 6

[[reward]]
name = "share"

[adapter]
rank = 4

[optimizer]
learning_rate = 1e-2

[train]
steps = 4
batch_size = 3
"""


@frozen
class Share:
    """How much of the answer is in the first half of the alphabet of bytes."""

    weight: float = 1.0

    def __call__(self, completion, record):
        return sum(ord(c) < 64 for c in completion) / max(1, len(completion))


@frozen
class Broken:
    weight: float = 1.0

    def __call__(self, completion, record):
        return math.nan if completion else 0.0


@frozen
class Counting:
    """Problems without end: "1: ", "2: ", …"""

    def problems(self, split, seed):
        return ({"prompt": f"{split} {seed} {i}: "} for i in count())

    def check(self, completion, problem):
        return {"correct": float(problem["prompt"] in completion)}


@frozen
class Few(Counting):
    def problems(self, split, seed):
        return ({"prompt": f"{split} {i}: "} for i in range(5))


ONLINE = ("source.name=rollout", "data.format=prompt", "rollout.name=sequential")
"""What the profile of a loss of groups says, for a loss of pairs."""
PLUGINS = [
    plugin("reward", "share", Share), plugin("reward", "broken", Broken), plugin("task", "counting", Counting),
    plugin("task", "few", Few),
]  # fmt: skip


@pytest.fixture
def file(tmp_path):
    found = tiny_run(tmp_path, RUN_FILE)
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"say {i}: ", "answer": i} for i in range(7)])
    write_lines(tmp_path / "held_out.jsonl", [{"prompt": f"tell {i}: "} for i in range(2)])
    return found


def go(file, *settings, **strategies):
    return run(file, *settings, plugins=PLUGINS, **strategies)


def ready(file, *settings, **strategies):
    return prepare(configure(file, *settings, plugins=PLUGINS, **strategies), Notices(), train=True)


def lines(outcome, name="metrics.jsonl"):
    return [json.loads(line) for line in (outcome.path / name).read_text().splitlines()]


def steps(outcome):
    return [line for line in lines(outcome) if "loss" in line]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([[1.0, 1.0]], [[0.0, 0.0]]),
        ([[0.1 + 0.2, 0.3 + 1e-17 + 0.0]], None),
        ([[0.0, 0.0, 0.0, 1.0]], [[-0.4999] * 3 + [1.4997]]),
        ([[0.0, 1.0], [10.0, 11.0]], [[-0.7070, 0.7070]] * 2),
    ],
)
def test_case_b19_advantages(rewards, expected):
    """By the sample standard deviation, each group by itself."""
    found = advantages(rewards)
    assert all(abs(a) <= (len(g) - 1) / math.sqrt(len(g)) for g in found for a in g)
    if expected is not None:
        assert np.allclose(found, expected, atol=1e-4)
    assert all(map(math.isfinite, np.concatenate(found)))


def test_equal_rewards_give_exactly_zero():
    for baseline in ("group", "others"):
        assert advantages([[0.1] * 3], baseline) == [[0.0] * 3]
    assert advantages([[0.1] * 3] * 3, "batch", "batch") == [[0.0] * 3] * 3


def test_other_baselines_and_scales():
    rewards = [[0.0, 1.0], [2.0, 5.0]]
    assert advantages(rewards, "group", "none") == [[-0.5, 0.5], [-1.5, 1.5]]
    assert advantages(rewards, "batch", "none") == [[-2.0, -1.0], [0.0, 3.0]]
    assert advantages([[0.0, 1.0, 5.0]], "others", "none") == [[-3.0, -1.5, 4.5]]
    spread = np.std([0, 1, 2, 5], ddof=1) + 1e-4
    assert np.allclose(
        advantages(rewards, "group", "batch"), [[-0.5 / spread, 0.5 / spread], [-1.5 / spread, 1.5 / spread]]
    )


def test_best_and_worst():
    assert best_and_worst([1.0, 3.0, 0.0, 3.0, 0.0]) == (1, 2)
    assert best_and_worst([2.0, 2.0]) is None and without_signal([2.0, 2.0]) and not without_signal([2.0, 2.1])


def test_a_run_learns_what_is_rewarded_and_says_so(file):
    outcome = go(file, "train.steps=20", "optimizer.learning_rate=0.03", "train.validate_every=20")
    found = steps(outcome)
    first, last = (np.mean([line["reward"] for line in part]) for part in (found[:5], found[-5:]))
    assert last > first + 0.1
    held = [line for line in lines(outcome) if "valid/reward" in line]
    assert held[0]["step"] == 0 and held[-1]["step"] == 20
    ours = ("reward_std", "reward/share", "zero_signal", "length", "truncated", "rollout_tokens_per_second")
    for name in (*ours, "entropy", "clip_high", "clip_low", "tokens_per_second"):
        assert name in found[0], name
    samples = lines(outcome, "samples.jsonl")
    assert len(samples) >= 20 * 4
    assert samples[0].keys() >= {"prompt", "text", "reward", "reward/share", "finish_reason", "tokens", "sample"}
    assert (outcome.path / "best").exists()


def test_best_is_the_highest_reward(file):
    outcome = go(file, "train.steps=6", "train.validate_every=1", "train.keep=0", "optimizer.learning_rate=0.03")
    held = {line["step"]: line["valid/reward"] for line in lines(outcome) if "valid/reward" in line and line["step"]}
    best = int((outcome.path / "best").read_text().split()[0].removeprefix("step-"))
    assert held[best] == max(held.values())


def test_case_b22_ratios_move_in_the_second_pass(file):
    """One pass a rollout: every ratio is 1. Two: an optimizer step lies between them, old log-probabilities stay."""
    once = steps(go(file, "train.micro_batch_size=1"))
    assert all(line["policy_change"] < 1e-5 and line["clip_high"] == line["clip_low"] == 0 for line in once)
    twice = steps(go(file, "source.inner_epochs=2", "optimizer.learning_rate=0.05"))
    assert [line["rollout_seconds"] for line in twice[0::2]] == [line["rollout_seconds"] for line in twice[1::2]]
    assert all(line["policy_change"] < 1e-5 for line in twice[0::2])
    assert all(line["policy_change"] > 1e-3 for line in twice[1::2])
    assert any(line["clip_high"] + line["clip_low"] > 0 for line in twice[1::2])


@pytest.mark.parametrize("old", ["sampled", "scored"])
def test_case_b48_one_temperature_everywhere(file, old):
    found = steps(go(file, "rollout.temperature=0.7", f"source.old_logprobs={old}", "loss.beta=0.1", "train.steps=2"))
    assert found[0]["policy_change"] < 1e-5 and found[0]["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert found[0]["kl"] == pytest.approx(0.0, abs=1e-7) and found[1]["kl"] > 0
    if old == "scored":
        assert found[0]["policy_change"] == 0.0


def test_temperature_changes_scores(file):
    entropy = [steps(go(file, f"rollout.temperature={t}", "train.steps=1"))[0]["entropy"] for t in (0.5, 1.0, 2.0)]
    assert entropy[0] < entropy[1] < entropy[2]


@pytest.mark.parametrize(
    "option", ["top_p=0.8", "top_k=2", "min_p=0.1", "repetition_penalty=1.1", "presence_penalty=0.5"]
)
def test_case_b52_other_distributions_are_refused(file, option):
    with pytest.raises(ConfigError, match=rf"rollout\.{option.replace('=', ' = ')}: answers would come from another"):
        ready(file, f"rollout.{option}")


def test_pairs_may_come_from_other_distributions(file):
    ready(file, "rollout.top_p=0.8", *ONLINE, loss="simpo")


def test_case_b19_one_sample_is_refused(file):
    with pytest.raises(ConfigError, match=r"rollout.samples is 1: .* at least 2"):
        ready(file, "rollout.samples=1")


def test_greedy_training_is_refused(file):
    with pytest.raises(ConfigError, match=r"rollout\.temperature: must be > 0"):
        ready(file, "rollout.temperature=0")


def test_without_rewards(file):
    file.write_text(RUN_FILE.replace('[[reward]]\nname = "share"\n', ""))
    with pytest.raises(ConfigError, match=r"needs \[\[reward\]\]"):
        ready(file)


def test_a_broken_reward_stops_or_counts_as_zero(file):
    file.write_text(RUN_FILE.replace('name = "share"', 'name = "broken"'))
    with pytest.raises(DataError, match=r"held_out.jsonl:1, sample \d: reward broken gave nan"):
        go(file)
    found = steps(go(file, "source.reward_errors=zero", "train.steps=1"))
    assert found[0]["reward"] == 0 and found[0]["reward_errors_broken"] >= 8
    assert found[0]["zero_signal"] == 1.0 and found[0]["grad_norm"] == 0.0


def test_rewards_are_summed_by_their_weights(file):
    two = 'name = "share"\nweight = 2.0\n[[reward]]\nname = "share"\nweight = -0.5'
    file.write_text(RUN_FILE.replace('name = "share"', two))
    found = steps(go(file, "train.steps=1"))[0]
    assert found["reward"] == pytest.approx(2 * found["reward/share"] - 0.5 * found["reward/share-2"])


def test_truncated_answers_can_be_left_out(file):
    """Of those of sixty tokens some end in time; masked, the others give no gradient."""
    long = "rollout.max_tokens=60", "data.max_length=80", "train.steps=1"
    kept, masked = (steps(go(file, f"source.mask_truncated={m}", *long))[0] for m in ("false", "true"))
    assert 0 < kept["truncated"] == masked["truncated"] < 1
    assert masked["grad_norm"] != kept["grad_norm"]
    settings = "rollout.max_tokens=3", "rollout.samples=2", "train.batch_size=1"
    live = ready(file, "source.mask_truncated=true", *settings).source
    live.sampling = evolve(live.sampling, eos_ids=tuple(range(0, 272, 9)))
    groups = [group for step in range(8) for group in live.next(step)[0]]
    assert all(c.weight == (c.finish_reason != "length") for g in groups for c in g.completions)
    assert all(any(c.weight for c in g.completions) for g in groups) and live.rollout > 8


def test_where_all_answers_are_cut_that_is_said(file):
    live = ready(file, "source.mask_truncated=true", "rollout.max_tokens=1").source
    live.sampling = evolve(live.sampling, eos_ids=())
    with pytest.raises(TrainingError, match=r"all answers of 10 rollouts in a row were cut at rollout\.max_tokens = 1"):
        live.next(0)


def test_two_runs_are_equal_and_seeds_differ(file):
    one, two, other = (go(file, f"train.seed={s}") for s in (0, 0, 1))
    assert same(adapter(one.path / "adapter"), adapter(two.path / "adapter"))
    texts = [[line["text"] for line in lines(outcome, "samples.jsonl")] for outcome in (one, two, other)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("layout", ["prefix-shared", "packed"])
def test_layouts_train_alike(file, layout):
    plain = steps(go(file, layout="separate"))
    found = steps(go(file, layout=layout))
    for a, b in zip(plain, found):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5) and a["grad_norm"] == pytest.approx(
            b["grad_norm"], rel=1e-3
        )
    assert found[0]["tokens"] < plain[0]["tokens"]


def test_steps_are_optimizer_steps_and_epochs_count_passes(file):
    done = ready(file, "train.epochs=2", "source.inner_epochs=3")
    assert done.total_steps == 2 * 3 * 3  # seven prompts, three a rollout
    assert steps(go(file, "train.steps=3", "source.inner_epochs=2"))[-1]["step"] == 3


def test_pairs_of_best_and_worst(file):
    found = steps(go(file, *ONLINE, "train.steps=3", loss="dpo"))
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert found[0]["pairs"] <= 3 and found[0]["margin"] == pytest.approx(0.0, abs=1e-6)


def test_no_pair_at_all_is_said(file):
    file.write_text(RUN_FILE.replace('name = "share"', 'name = "broken"'))
    with pytest.raises(TrainingError, match="10 rollouts in a row gave no pair"):
        go(file, *ONLINE, "source.reward_errors=zero", loss="simpo")


def test_rloo_measures_against_the_others(file):
    live = ready(file, loss="rloo").source
    assert (live.options.baseline, live.options.scale) == ("others", "none")
    assert steps(go(file, "train.steps=1", loss="rloo"))[0]["grad_norm"] > 0


def test_a_state_goes_on_between_two_passes(file):
    """Through JSON into another source: the same groups for the passes that are left, the same rollout behind them."""
    first, second = (ready(file, "source.inner_epochs=2", "loss.beta=0.1").source for _ in range(2))
    first.next(0)
    groups, passes = first.next(2)
    state = json.loads(json.dumps(first.state()))
    second.restore(state)
    again, more = second.next(3)
    assert passes == more == 2
    for a, b in zip(groups, again):
        assert (a.id, a.prompt_ids, a.completions, a.pairs) == (b.id, b.prompt_ids, b.completions, b.pairs)
    assert all(isinstance(c, Completion) and c.old_logprobs for g in again for c in g.completions)
    later = [[c.ids for g in source.next(4)[0] for c in g.completions] for source in (first, second)]
    assert later[0] == later[1]


def test_what_was_sampled_beyond_a_state_is_taken_off(file, tmp_path):
    source = ready(file, f'run.path="{tmp_path / "out"}"').source
    (tmp_path / "out").mkdir()
    source.next(0)
    state = source.state()
    before = (tmp_path / "out" / "samples.jsonl").read_text()
    source.next(1)
    assert len((tmp_path / "out" / "samples.jsonl").read_text()) > len(before)
    source.restore(state)
    assert (tmp_path / "out" / "samples.jsonl").read_text() == before


def test_prompts_of_a_task(file):
    files = 'train = "prompts.jsonl"\nvalid = "held_out.jsonl"\n'
    file.write_text(RUN_FILE.replace(files, "") + '[task]\nname = "counting"\n')
    outcome = go(file, "source.valid_prompts=2", "train.steps=2")
    assert {line["prompt"] for line in lines(outcome, "samples.jsonl")} == {f"train:{i}" for i in range(1, 7)}
    with pytest.raises(ConfigError, match=r"data.train and \[task\] both say"):
        ready(file, f"data.train={file.parent / 'prompts.jsonl'}")
    with pytest.raises(TrainingError, match="no more problems after 6"):
        go(file, "train.steps=5", "task.name=few")


def test_prompts_that_leave_no_room_are_counted(file):
    write_lines(file.parent / "prompts.jsonl", [{"prompt": "x" * n} for n in (5, 70)])
    done = ready(file)
    assert done.notices.counts["data_dropped"] == 1 and len(done.source.prompts) == 1
    write_lines(file.parent / "prompts.jsonl", [{"prompt": "x" * 70}])
    with pytest.raises(DataError, match="nothing is left"):
        ready(file)


def test_bad_prompts_are_listed(file):
    write_lines(file.parent / "prompts.jsonl", [{"prompt": "a"}, {"promt": "b"}, 3])
    with pytest.raises(DataError) as refused:
        ready(file)
    assert "2 bad of 3 rows" in str(refused.value) and "prompts.jsonl:2: no 'prompt', found 'promt'" in str(
        refused.value
    )


def test_a_plan_goes_by_the_longest_answers(file):
    short, long = (plan(ready(file, f"rollout.max_tokens={n}")).peak for n in (4, 40))
    assert long > short > 0


def test_prompt_options(file):
    write_lines(file.parent / "prompts.jsonl", [{"question": "what?"}])
    done = ready(file, "data.key=question", 'data.suffix=" Say yes."', f"data.valid={file.parent / 'prompts.jsonl'}")
    (prompt,) = done.source.prompts.take(0, 3)
    assert done.pretrained.tokenizer.decode(prompt.ids) == "what? Say yes."


def test_the_order_of_the_file_can_be_kept(file):
    plain = ready(file, "source.shuffle=false").source
    assert [p.where for p in plain.prompts.take(0, 3)] == [f"prompts.jsonl:{i}" for i in (1, 2, 3)]
    shuffled = ready(file).source
    epoch = [p.where for i in range(3) for p in shuffled.prompts.take(i, 3)]
    assert sorted(epoch) == [f"prompts.jsonl:{i}" for i in range(1, 8)] != epoch


@frozen
class Picky:
    """Cannot read an answer of no text; refuses records without an answer key."""

    weight: float = 1.0

    def __call__(self, completion, record):
        if "answer" not in record:
            raise DataError("no 'answer'")
        return float(completion[0] < "a")


@frozen
class Costly:
    weight: float = 1.0
    costly = True

    def __call__(self, completion, record):
        assert completion, "tried before anything was sampled"
        return float(len(completion))


@frozen
class Wordless:
    """A sampler that gives no log-probabilities."""

    provides = frozenset({"token-ids", "weight-sync"})
    shift = 0.0

    def open(self, context):
        return WordlessEngine(self, Sequential().open(context))


@frozen
class Shifted(Wordless):
    """A sampler with other numbers: its log-probabilities are off by 0.5."""

    provides = frozenset({"token-ids", "weight-sync", "logprobs-at-temperature"})
    shift = 0.5


@frozen
class Remote(Wordless):
    provides = frozenset({"token-ids"})


@frozen(eq=False)
class WordlessEngine:
    about: Wordless
    inner: object
    closed: ClassVar[list] = []

    def generate(self, requests, sampling):
        for i, k, c in self.inner.generate(requests, sampling):
            changed = tuple(x + self.about.shift for x in c.sampler_logprobs) if self.about.shift else None
            yield i, k, evolve(c, sampler_logprobs=changed)

    def close(self):
        self.closed.append(self.about)


PLUGINS += [
    plugin("reward", "picky", Picky), plugin("reward", "costly", Costly), plugin("rollout", "wordless", Wordless),
    plugin("rollout", "shifted", Shifted), plugin("rollout", "remote", Remote),
]  # fmt: skip


def test_an_engine_without_logprobs_is_rescored(file):
    found = steps(go(file, "train.steps=1", "rollout.name=wordless"))[0]
    assert found["policy_change"] == 0.0 and found["ratio"] == 1.0 and found["grad_norm"] > 0
    for asked in ("source.old_logprobs=sampled", "loss.importance_cap=2.0"):
        with pytest.raises(ConfigError, match="Wordless gives none at the temperature"):
            ready(file, asked, "rollout.name=wordless")


def test_an_engine_that_samples_otherwise_is_corrected_for(file):
    """Off by 0.5 a token: taken at its word the ratio is e^-0.5; with old scores of training it is 1, and each token
    counts e^-0.5 times, or the cap."""
    settings = "train.steps=1", "train.validate_every=9", "train.clip_norm=0"
    plain = steps(go(file, *settings, "rollout.name=wordless"))[0]
    word = steps(go(file, *settings, "rollout.name=shifted"))[0]
    assert word["ratio"] == pytest.approx(math.exp(-0.5), abs=1e-5) and word["clip_low"] > 0
    for cap, share in ((2.0, math.exp(-0.5)), (0.1, 0.1)):
        found = steps(go(file, *settings, f"loss.importance_cap={cap}", "rollout.name=shifted"))[0]
        assert found["ratio"] == 1.0
        assert found["grad_norm"] == pytest.approx(share * plain["grad_norm"], rel=1e-3)
    with pytest.raises(ConfigError, match="would be the engine's own"):
        ready(file, "loss.importance_cap=2.0", "source.old_logprobs=sampled")


def test_an_engine_that_does_not_follow_the_weights(file):
    with pytest.raises(ConfigError, match=r"Remote does not follow .* source\.off_policy = true"):
        ready(file, "rollout.name=remote")
    ready(file, "source.off_policy=true", "rollout.name=remote")


def test_the_engine_is_closed_however_training_ends(file):
    WordlessEngine.closed.clear()
    go(file, "train.steps=1", "rollout.name=wordless")
    assert len(WordlessEngine.closed) == 1
    file.write_text(RUN_FILE.replace('name = "share"', 'name = "broken"'))
    with pytest.raises(DataError):
        go(file, "rollout.name=wordless")
    assert len(WordlessEngine.closed) == 2


def test_records_that_a_reward_refuses_are_found_before_the_run(file):
    file.write_text(RUN_FILE.replace('name = "share"', 'name = "picky"'))
    with pytest.raises(DataError, match=r"held_out.jsonl: 2 bad of 2 rows\n .*reward picky: no 'answer'"):
        ready(file)
    ready(file, "source.reward_errors=zero")
    ready(file, f"data.valid={file.parent / 'prompts.jsonl'}")  # what it does with an empty answer is no news
    file.write_text(RUN_FILE.replace('name = "share"', 'name = "costly"'))
    ready(file)


def test_failures_are_counted_over_a_restart(file):
    file.write_text(RUN_FILE.replace('name = "share"', 'name = "broken"'))
    first, second = (ready(file, "source.reward_errors=zero") for _ in range(2))
    first.source.next(0)
    second.source.restore(json.loads(json.dumps(first.source.state())))
    assert first.notices.counts == second.notices.counts and first.notices.counts["reward_errors_broken"] > 0
    for prepared in (first, second):
        prepared.source.next(1)
    assert first.notices.counts == second.notices.counts


def test_a_signal_while_answers_are_sampled_loses_none(file):
    """The state that is saved then goes on with the rollout that was interrupted, not with the one behind it."""
    whole, cut = (ready(file).source for _ in range(2))
    whole.next(0), cut.next(0)
    calls = count()

    def poll():
        if next(calls) == 3:
            raise Stopped

    cut.close()
    cut.context = evolve(cut.context, poll=poll)
    with pytest.raises(Stopped):
        cut.next(1)
    again = ready(file).source
    again.restore(json.loads(json.dumps(cut.state())))
    expected, found = (source.next(1)[0] for source in (whole, again))
    assert [g.id for g in expected] == [g.id for g in found]
    assert [c.ids for g in expected for c in g.completions] == [c.ids for g in found for c in g.completions]


@pytest.mark.parametrize("settings", [[], ["loss.importance_cap=2.0", "loss.beta=0.1"]])
def test_all_that_losses_need_is_in_a_state(file, settings):
    one, two = (ready(file, "source.inner_epochs=3", *settings) for _ in range(2))
    one.policy.logprobs = lambda groups: one.engine.logprobs(one.policy.params, groups, as_trained=True)
    first, second = one.source, two.source
    groups, _ = first.next(0)
    second.restore(json.loads(json.dumps(first.state())))
    again, _ = second.next(2)
    assert [g.completions for g in groups] == [g.completions for g in again]
    assert first.metrics() == second.metrics() != {}


def test_online_pairs_keep_their_answers_in_a_state(file):
    first, second = (ready(file, *ONLINE, "source.inner_epochs=2", loss="dpo").source for _ in range(2))
    groups, _ = first.next(0)
    assert all(g.pairs == ((0, 1),) and g.completions[0].reward > g.completions[1].reward for g in groups)
    second.restore(json.loads(json.dumps(first.state())))
    assert [(g.completions, g.pairs) for g in second.next(1)[0]] == [(g.completions, g.pairs) for g in groups]


def test_a_loss_that_no_reward_changes_is_refused(file):
    with pytest.raises(ConfigError, match="neither by advantages nor by pairs"):
        ready(file, *ONLINE, loss="sft")


def test_case_b48_other_sources_have_no_temperature(tmp_path):
    """SFT and DPO on data are scored as the model is, and a table that changes nothing is said to."""
    file = tiny_run(tmp_path)
    done = ready(file, "rollout.name=sequential", "rollout.temperature=0.5")
    assert done.engine.temperature == 1.0
    assert "source 'dataset' samples nothing; [rollout] changes nothing" in done.notices.messages


def test_filters_are_refused(file):
    file.write_text(RUN_FILE + '[[filter]]\nname = "duplicates"\n')
    with pytest.raises(ConfigError, match=r"\[\[filter\]\] goes over records with their answers"):
        ready(file)


def test_dr_grpo_leaves_the_deviation_out(file):
    settings = "loss.variant=dr-grpo", "loss.max_tokens=6"
    assert ready(file, *settings).source.options.scale == "none"
    assert ready(file, *settings, "source.scale=group").source.options.scale == "group"
    assert ready(file).source.options.scale == "group"


def of_task(file, name, *settings):
    files = 'train = "prompts.jsonl"\nvalid = "held_out.jsonl"\n'
    file.write_text(RUN_FILE.replace(files, "") + f'[task]\nname = "{name}"\n')
    return ready(file, *settings)


def test_long_prompts_of_a_task_are_refused(file):
    with pytest.raises(DataError, match=r"task, test:1: a prompt of \d+ tokens leaves no room for 55 tokens"):
        of_task(file, "counting", "rollout.max_tokens=55")


def test_a_plan_for_a_task_goes_by_its_longest_prompts(file):
    done = of_task(file, "counting", "train.batch_size=1")
    (group,) = done.source.largest()
    assert len(group.prompt_ids) == len("train 0 255: ") and [len(c.ids) for c in group.completions] == [6] * 4
    assert plan(done).peak > 0
    first = [c.ids for g in done.source.next(0)[0] for c in g.completions]  # looking ahead draws nothing
    assert first == [c.ids for g in of_task(file, "counting", "train.batch_size=1").source.next(0)[0]
                     for c in g.completions]  # fmt: skip


@pytest.mark.parametrize("loss", ["grpo", "dpo"])
def test_plans_of_losses_that_compare(file, loss):
    more = ["loss.beta=0.1", *(["loss.importance_cap=2.0"] if loss == "grpo" else ONLINE)]
    assert plan(ready(file, *more, loss=loss)).peak > 0
    assert ready(file, *more, "train.memory_limit=2GB", loss=loss).fitted is not None


def test_prompts_are_shown(file, capsys):
    file.write_text(RUN_FILE.replace('name = "share"', 'name = "length"\nmin = 1'))
    with pytest.raises(SystemExit) as ended:
        main(["data", str(file), "--set", "data.max_length=15"])
    shown = capsys.readouterr().out
    assert not ended.value.code
    assert "prompt tokens" in shown and "scored tokens" not in shown and "say 0: " in shown


def test_prompts_are_no_data_to_fit(file):
    with pytest.raises(DataError, match=r"prompts\.jsonl:1: a prompt without an answer is for a source that samples"):
        ready(file, *ONLINE, "source.name=dataset", loss="sft")


def test_another_engine_keeps_how_answers_are_sampled(file):
    config = configure(file, plugins=PLUGINS, rollout="shifted")
    assert (config.sampling.samples, config.sampling.max_tokens) == (4, 6)
    assert config.all("rollout")[0].name == "shifted"
    assert not [notice for notice in config.notices if "rollout" in notice]
    file.write_text(RUN_FILE.replace("[rollout]", '[rollout]\nname = "sequential"\nrows = 3'))
    config = configure(file, plugins=PLUGINS, rollout="shifted")
    assert config.sampling.samples == 4 and any(
        "takes the place of rollout 'sequential' in run.toml; its options (rows) are left out" in notice
        for notice in config.notices
    )


def test_a_plan_for_a_small_task(file):
    """Less than what is looked at for planning: 81 to train on."""
    assert len(of_task(file, "arithmetic", "task.digits=1", 'task.operations="+"').source.largest()) == 3


def test_problems_of_a_task_are_answered_once_each(file):
    """Until they are used up, which is said; in another order by the seed."""
    live, other = (of_task(file, "arithmetic", f"train.seed={seed}").source for seed in (0, 1))
    seen = [prompt.record["prompt"] for i in range(4) for prompt in live.prompts.take(i, 3)]
    assert len(set(seen)) == 12 and live.prompts.take(1, 3)[0].record["prompt"] == seen[3]
    assert [prompt.record["prompt"] for prompt in other.prompts.take(0, 3)] != seen[:3]


def test_a_function_of_the_users_is_not_called_before_the_run(file):
    code = "def grade(completion, record):\n    assert completion\n    return len(completion)\n"
    (file.parent / "mine.py").write_text(code)
    reward = 'name = "python"\nfile = "mine.py"\nfunction = "grade"'
    file.write_text(RUN_FILE.replace('name = "share"', reward))
    assert ready(file).source.next(0)
    file.write_text(RUN_FILE.replace('name = "share"', reward.replace("grade", "grate")))
    with pytest.raises(ConfigError, match="has no function 'grate'"):
        ready(file)

"""Filters: what of a data file is trained on, what is said of the rest, and what weights of pairs do."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from attrs import evolve, frozen
from test_data_command import call
from tiny_run import RUN_FILE, WORDS, adapter, apart, configure, metrics, plugin, run, tiny_run, write_lines
from tiny_tokenizers import tokenizer

from mortice.batch import SCORE, Completion, Group
from mortice.data import load_groups
from mortice.errors import ConfigError, DataError
from mortice.objective import make_batch
from mortice.testing.batches import arrange
from mortice_plugins.filters.length import Length
from mortice_plugins.filters.pairwise import GapWeight, Identical, LengthRatio, ScoreGap
from mortice_plugins.filters.repeats import Ambiguous, Duplicates
from mortice_plugins.formats.completion import CompletionFormat
from mortice_plugins.formats.preference import Preference
from mortice_plugins.losses.pairs import mean_over_pairs

TOK = tokenizer(None, eos="</s>")


@frozen
class Options:
    max_length: int = 512
    truncation: str = "keep-end"
    limit: int | None = None


def pair(id: str, chosen: str, rejected: str, *scores: float, prompt: str = "q") -> Group:
    extras = [{SCORE: score} for score in scores] or [{}, {}]
    answers = [Completion(list(text.encode()), text=text, extras=e) for text, e in zip((chosen, rejected), extras)]
    return Group(f"f.jsonl:{id}", list(prompt.encode()), answers, ((0, 1),))


def kept(keep, *groups: Group) -> list[str]:
    """Lines that stay whole, those that lose pairs marked."""
    found = keep(groups)
    assert len(found) == len(groups)
    return [
        left.id.rpartition(":")[2] + ("" if left.pairs == group.pairs else f" {len(left.pairs)} pairs")
        for group, left in zip(groups, found)
        if left is not None
    ]


def several(id: str, chosen: str, *rejected: str, scores: tuple[float, ...] = ()) -> Group:
    extras = [{SCORE: score} for score in scores] or [{}] * (1 + len(rejected))
    answers = [Completion(list(t.encode()), text=t, extras=e) for t, e in zip((chosen, *rejected), extras)]
    return Group(f"f.jsonl:{id}", [1], answers, tuple((0, 1 + r) for r in range(len(rejected))))


def test_identical_answers():
    assert kept(Identical(), pair("1", "a", "a"), pair("2", "a", "b"), several("3", "a", "a", "b")) == [
        "2",
        "3 1 pairs",
    ]


def test_length_ratio_of_the_longer_to_the_shorter():
    groups = [
        pair("1", "ab", "abcd"),
        pair("2", "abcde", "ab"),
        pair("3", "ab", "abcde"),
        several("4", "a", "ab", "abc"),
    ]
    assert kept(LengthRatio(max=2.0), *groups) == ["1", "4 1 pairs"]
    assert kept(LengthRatio(max=3.0), *groups) == ["1", "2", "3", "4"]


def test_score_gap():
    groups = [
        pair("1", "a", "b", 3, 1),
        pair("2", "a", "b", 2, 1.5),
        pair("3", "a", "b", 1, 2),
        pair("4", "a", "b", 1, 1),
    ]
    assert kept(ScoreGap(min=1.0), *groups) == ["1"]
    assert kept(ScoreGap(min=0.5), *groups) == ["1", "2"]
    assert kept(ScoreGap(min=0.0), *groups) == ["1", "2", "4"]
    bare = [pair(str(i), "a", "b") for i in range(5)]
    with pytest.raises(DataError, match=r"5 of 6 rows have no scores: f.jsonl:0, f.jsonl:1, f.jsonl:2 and 2 more"):
        ScoreGap(min=1.0)([groups[0], *bare])


def test_pairs_that_go_take_answers_with_them_that_no_other_names():
    (left,) = ScoreGap(min=1.0)([several("1", "a", "b", "c", "d", scores=(3, 2.5, 1, 0))])
    assert [completion.text for completion in left.completions] == ["a", "c", "d"]
    assert left.pairs == ((0, 1), (0, 2))


def test_duplicates_leave_the_first():
    groups = [pair("1", "a", "b"), pair("2", "a", "b"), pair("3", "a", "b", prompt="r"), pair("4", "b", "a")]
    assert kept(Duplicates(), *groups, several("5", "a", "b", "b", "c")) == ["1", "3", "4", "5 2 pairs"]
    single = [evolve(g, pairs=(), completions=g.completions[:1]) for g in groups]
    assert kept(Duplicates(), *single) == ["1", "3", "4"]


def test_ambiguous_pairs_all_go():
    groups = [pair("1", "a", "b"), pair("2", "b", "a"), pair("3", "a", "c"), pair("4", "b", "a", prompt="r")]
    assert kept(Ambiguous(), *groups, pair("5", "a", "b"), pair("6", "d", "d")) == ["3", "4", "6"]


def test_lengths_within_bounds():
    groups = [pair("1", "a", "abc"), pair("2", "ab", "abcd"), pair("3", "ab", "abc", prompt="long")]
    assert kept(Length(min_answer=2), *groups) == ["2", "3"]
    assert kept(Length(max_answer=3), *groups) == ["1", "3"]
    assert kept(Length(max_prompt=3), *groups) == ["1", "2"]
    assert kept(Length(max_total=4), *groups) == ["1"]
    single = [evolve(g, pairs=(), completions=g.completions[1:]) for g in groups]
    assert kept(Length(max_answer=3), *single) == ["1", "3"]
    assert Length(min_answer=2, max_prompt=9).reason == "answer shorter than 2 or prompt longer than 9 tokens"
    with pytest.raises(ValueError, match="give at least one bound"):
        Length()
    with pytest.raises(ValueError, match="min_answer 3 is above max_answer 2"):
        Length(min_answer=3, max_answer=2)


def test_pairs_weigh_as_much_as_their_scores_are_apart():
    group = several("1", "a", "b", "c", "d", scores=(3, 2, 0.5, 3))
    (left,) = GapWeight()([group])
    assert (left.pairs, left.pair_weights) == (((0, 1), (0, 2)), (1.0, 2.5))
    (capped,) = GapWeight(cap=2.0)([group])
    assert capped.pair_weights == (1.0, 2.0)
    (twice,) = GapWeight()([left])
    assert twice.pair_weights == (1.0, 6.25)
    assert GapWeight()([pair("1", "a", "b", 1, 1)]) == [None]


def test_a_batch_has_the_weight_of_every_pair():
    weighed = evolve(several("1", "a", "b", "c"), pair_weights=(1.0, 3.0))
    heavy = pair("2", "a", "b")
    heavy = heavy.with_completions([evolve(c, weight=0.5) for c in heavy.completions])
    batch = make_batch(arrange([weighed, heavy]))
    assert batch.pair_weights.tolist() == [1, 3, 0.5]
    assert batch.weights.tolist() == [1, 1, 1, 0.5, 0.5]
    total, count = mean_over_pairs(mx.array([1.0, 2.0, 4.0]), batch)
    assert (total.item(), count.item()) == (1 + 6 + 2, 4.5)
    with pytest.raises(ValueError, match="pair_weights has 1 entries for 2 pairs"):
        evolve(weighed, pair_weights=(1.0,))


def pair_file(folder, *records):
    file = folder / "p.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return file


RECORDS = [
    {"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": 3, "score_rejected": 1},
    {"prompt": "q", "chosen": "c", "rejected": "d", "score_chosen": 2, "score_rejected": 1.5},
    {"prompt": "q", "chosen": "a", "rejected": ["b", "e"], "score_chosen": 3, "score_rejected": [1, 1]},
    {"prompt": "q", "chosen": "f", "rejected": "f", "score_chosen": 3, "score_rejected": 1},
]


def test_filters_go_in_order_and_say_what_they_dropped(tmp_path):
    file = pair_file(tmp_path, *RECORDS)
    filters = (("score-gap", ScoreGap(min=1.0)), ("duplicates", Duplicates()), ("identical", Identical()))
    groups, counts = load_groups(file, Preference(), TOK, Options(), filters=filters)
    assert [group.id for group in groups] == ["p.jsonl:1", "p.jsonl:3"]
    assert (counts.rows, counts.kept, counts.pairs, counts.identical_pairs) == (4, 2, 2, 0)
    assert [(f.filter, f.rows, f.pairs, f.examples) for f in counts.filtered] == [
        ("score-gap", 1, 0, ("2",)),
        ("duplicates", 0, 1, ("3",)),
        ("identical", 1, 0, ("4",)),
    ]
    assert list(counts.messages(file, 64)) == [
        (
            "p.jsonl: filter score-gap drops 1 row: chosen is rated less than 1 above rejected (line 2)",
            ("data_filter_score_gap", 1),
        ),
        (
            "p.jsonl: filter duplicates drops 1 pair of other rows: the same stands in the file before (line 3)",
            ("data_filter_duplicates", 1),
        ),
        (
            "p.jsonl: filter identical drops 1 row: chosen and rejected are identical (line 4)",
            ("data_filter_identical", 1),
        ),
    ]


def test_the_first_lines_are_named_and_that_there_are_more(tmp_path):
    file = pair_file(tmp_path, *[RECORDS[0]] * 8)
    _, counts = load_groups(file, Preference(), TOK, Options(), filters=(("duplicates", Duplicates()),))
    assert "drops 7 rows" in str(counts.filtered[0])
    assert "(lines 2, 3, 4, 5, 6, …)" in str(counts.filtered[0])


def test_lengths_are_those_before_anything_is_cut(tmp_path):
    file = pair_file(tmp_path, {"prompt": "q", "completion": "a" * 40}, {"prompt": "q", "completion": "a"})
    groups, counts = load_groups(
        file, CompletionFormat(), TOK, Options(max_length=16), filters=(("length", Length(max_answer=20)),)
    )
    assert [group.id for group in groups] == ["p.jsonl:2"]
    assert counts.completions_cut == 0


def test_nothing_left_says_which_filters_took_it(tmp_path):
    file = pair_file(tmp_path, *RECORDS[:2])
    with pytest.raises(DataError) as error:
        load_groups(file, Preference(), TOK, Options(), filters=(("score-gap", ScoreGap(min=9.0)),))
    assert "nothing is left to train on; all 2 rows were dropped\n  p.jsonl: filter score-gap drops 2 rows" in str(
        error.value
    )
    bare = pair_file(tmp_path, {"prompt": "q", "chosen": "a", "rejected": "b"})
    with pytest.raises(DataError, match=f"{bare}: filter score-gap: 1 of 1 rows have no scores: p.jsonl:1"):
        load_groups(bare, Preference(), TOK, Options(), filters=(("score-gap", ScoreGap(min=9.0)),))


FILTERS = """
[[filter]]
name = "score-gap"
min = 1.0
[[filter]]
name = "duplicates"
"""


def scored_run(folder, text: str = FILTERS):
    """Ten pairs with gaps 0.5, 1, 1.5, …, and the first once more."""
    folder.mkdir(exist_ok=True)
    file = tiny_run(folder, RUN_FILE + text)
    records = [
        {
            "prompt": f"say {w}: ",
            "chosen": f"{w}!",
            "rejected": f"no {w}",
            "score_chosen": i / 2,
            "score_rejected": -0.5,
        }
        for i, w in enumerate(WORDS)
    ]
    write_lines(folder / "train.jsonl", [*records, records[-1]])
    write_lines(folder / "valid.jsonl", records[4:7])
    return file


def test_check_data_and_train_report_filters(tmp_path, capsys):
    file = scored_run(tmp_path)
    gap = "train.jsonl: filter score-gap drops 1 row: chosen is rated less than 1 above rejected (line 1)"
    repeated = "train.jsonl: filter duplicates drops 1 row: the same stands in the file before (line 11)"
    code, out, err = call(capsys, "data", str(file), "--rows", "0")
    assert code == 0, err
    assert gap in out and repeated in out
    assert "score gap, chosen − rejected" in out and "length difference, chosen − rejected tokens" in out
    code, out, err = call(capsys, "data", str(file), "--json")
    report = json.loads(out)[0]
    assert [f["rows"] for f in report["counts"]["filtered"]] == [1, 1]
    assert report["spreads"]["score gap, chosen − rejected"]["max"] == 5.0
    code, out, err = call(capsys, "check", str(file))
    assert code == 0 and gap in err and repeated in err
    code, out, err = call(capsys, "check", str(file), "--json")
    assert json.loads(out)["counts"]["data_filter_score_gap"] == 1
    code, out, err = call(capsys, "train", str(file), "--set", "train.steps=1")
    assert code == 0 and gap in err and repeated in err


def test_weights_by_gap_change_what_is_learned(tmp_path):
    results = {}
    for name, text in (("plain", ""), ("weighed", '[[filter]]\nname = "gap-weight"\n')):
        outcome = run(scored_run(tmp_path / name, text), "source.shuffle=false")
        results[name] = (metrics(outcome)[0]["loss"], adapter(outcome.path / "adapter"))
        assert mx.isfinite(mx.array(results[name][0])).item()
    assert results["plain"][0] != results["weighed"][0]
    assert apart(results["plain"][1], results["weighed"][1]) > 0


@pytest.mark.parametrize("micro", [2, 4])
def test_weighed_steps_do_not_depend_on_how_they_are_split(tmp_path, micro):
    text = '[[filter]]\nname = "gap-weight"\n'
    losses = [
        metrics(run(scored_run(tmp_path / folder, text), f"train.micro_batch_size={size}"))[-1]["loss"]
        for folder, size in (("a", 1), ("b", micro))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_filter_that_needs_pairs_is_refused_without_them(tmp_path):
    text = (
        RUN_FILE.replace('"preference"', '"completion"').replace('"orpo"', '"sft"') + '[[filter]]\nname = "identical"\n'
    )
    file = tiny_run(tmp_path, text)
    write_lines(tmp_path / "train.jsonl", [{"prompt": "a", "completion": "b"}])
    write_lines(tmp_path / "valid.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(
        ConfigError, match="filter 'identical' needs pairs, which this run does not have; it comes with data"
    ):
        run(file)


def test_options_of_filters_are_checked_like_all_others(tmp_path):
    file = tiny_run(tmp_path, RUN_FILE + '[[filter]]\nname = "score-gap"\nminimum = 1\n[[filter]]\nname = "scoregap"\n')
    with pytest.raises(ConfigError) as error:
        configure(file)
    said = str(error.value)
    assert "filter.0.minimum: unknown key" in said and "did you mean 'min'" in said
    assert "filter.0.min: is required" in said
    assert "unknown filter 'scoregap'; did you mean 'score-gap'?" in said


@frozen
class Short:
    """Keeps groups whose answers are short: a plugin of another package."""

    reason = "an answer of more than 6 tokens"

    def __call__(self, groups, /):
        return [g if all(len(c.ids) <= 6 for c in g.completions) else None for g in groups]


def test_a_third_party_filter_takes_part(tmp_path):
    file = tiny_run(tmp_path, RUN_FILE + '[[filter]]\nname = "short"\n')
    write_lines(tmp_path / "train.jsonl", [{"prompt": "a", "chosen": "b" * n, "rejected": "c"} for n in range(1, 10)])
    write_lines(tmp_path / "valid.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    config = configure(file, plugins=[plugin("filter", "short", Short)])
    assert [name for name, _ in config.filters] == ["short"]
    groups, counts = load_groups(
        config.data.train, config.format, TOK, config.data, name="preference", filters=config.filters
    )
    assert (len(groups), counts.filtered[0].rows) == (5, 4)
    assert "[[filter]]" in config.effective_toml()

    class Loses(Short):
        """Forgets groups."""

        def __call__(self, groups, /):
            return groups[:1]

    with pytest.raises(ValueError, match="filter loses returned 1 groups for 9"):
        load_groups(config.data.train, config.format, TOK, config.data, filters=(("loses", Loses()),))

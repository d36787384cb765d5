"""Formats of preferences: several answers a side, rated answers, published data sets' records."""

from __future__ import annotations

import json

import pytest
from attrs import frozen
from tiny_run import adapter, apart, metrics, run, tiny_run, write_lines
from tiny_tokenizers import tokenizer

from mortice.batch import SCORE
from mortice.data import load_groups
from mortice.errors import DataError
from mortice_plugins.formats.answers import rated_pairs
from mortice_plugins.formats.hh import HH, turns
from mortice_plugins.formats.preference import Preference
from mortice_plugins.formats.rated import Rated
from mortice_plugins.formats.text import Text
from mortice_plugins.formats.ultrafeedback import UltraFeedback


@frozen
class Options:
    max_length: int = 512
    truncation: str = "keep-end"
    limit: int | None = None


TOK = tokenizer()
RAW = tokenizer(None, eos="</s>")


def read(form, record, tok=RAW):
    return form(record, tok, source="f:1").group


def texts(group) -> list[tuple[str, str]]:
    return [(group.completions[c].text, group.completions[r].text) for c, r in group.pairs]


def scores(group) -> list[float]:
    return [completion.extras[SCORE] for completion in group.completions]


def message(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("wrap", [lambda text: text, message], ids=["strings", "messages"])
def test_each_chosen_answer_is_paired_with_each_rejected_one(wrap):
    record = {"prompt": "q", "chosen": [wrap("a"), wrap("b")], "rejected": [wrap("x"), wrap("y")]}
    group = read(Preference(), record, TOK)
    assert texts(group) == [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
    assert len(group.completions) == 4
    assert group.one_prompt
    one = read(Preference(), {"prompt": "q", "chosen": wrap("a"), "rejected": [wrap("x"), wrap("y")]}, TOK)
    assert texts(one) == [("a", "x"), ("a", "y")]
    single = read(Preference(), {"prompt": "q", "chosen": wrap("a"), "rejected": wrap("x")}, TOK)
    listed = read(Preference(), {"prompt": "q", "chosen": [wrap("a")], "rejected": [wrap("x")]}, TOK)
    assert (single.completions, single.pairs) == (listed.completions, listed.pairs)


def test_whole_conversations_of_several_answers_share_their_prompt():
    def whole(text):
        return [{"role": "user", "content": "q"}, *message(text)]

    split = read(Preference(), {"prompt": "q", "chosen": "a", "rejected": ["x", "y"]}, TOK)
    group = read(Preference(), {"chosen": whole("a"), "rejected": [whole("x"), whole("y")]}, TOK)
    assert (group.prompt_ids, group.completions, group.pairs) == (split.prompt_ids, split.completions, split.pairs)


def test_ratings_of_both_sides_are_read():
    record = {"prompt": "q", "chosen": "a", "rejected": ["x", "y"], "score_chosen": 8, "score_rejected": [5, 6.5]}
    assert scores(read(Preference(), record)) == [8, 5, 6.5]
    own = Preference(score_keys=("good", "bad"))
    group = read(own, {"prompt": "q", "chosen": "a", "rejected": ["x", "y"], "good": 2, "bad": 1})
    assert scores(group) == [2, 1, 1]
    assert "good" in own.keys and "score_chosen" not in own.keys
    assert read(Preference(), {"prompt": "q", "chosen": "a", "rejected": "x"}).completions[0].extras == {}
    with pytest.raises(ValueError, match="must be two keys"):
        Preference(score_keys=("good",))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"score_chosen": 1}, "'score_chosen' is there and 'score_rejected' is not"),
        ({"score_chosen": 1, "score_rejected": [1, 2]}, "'score_rejected' has 2 ratings for 1 answers"),
        ({"score_chosen": "8", "score_rejected": 1}, "'score_chosen' must be a number, found a string"),
        ({"rejected": []}, "must end with an assistant turn"),
        ({"rejected": ["x", 3]}, r"rejected\[0\] must be a message, found a string"),
    ],
)
def test_what_is_wrong_with_a_preference_record_is_said(change, wrong):
    with pytest.raises(DataError, match=wrong):
        read(Preference(), {"prompt": "q", "chosen": "a", "rejected": "x"} | change)


@pytest.mark.parametrize(
    ("which", "gap", "found"),
    [
        ("best-worst", 0, [(1, 3)]),
        ("best-worst", 3, [(1, 3)]),
        ("best-worst", 3.1, []),
        ("all", 0, [(1, 2), (1, 0), (1, 3), (2, 0), (2, 3), (0, 3)]),
        ("all", 1.5, [(1, 0), (1, 3), (2, 3)]),
        ("adjacent", 0, [(1, 2), (2, 0), (0, 3)]),
        ("adjacent", 1.5, [(1, 0), (2, 3)]),
    ],
)
def test_pairs_of_rated_answers(which, gap, found):
    """Scores 2, 4, 3, 1."""
    assert rated_pairs([2, 4, 3, 1], which, gap) == found


@pytest.mark.parametrize("which", ["best-worst", "all", "adjacent"])
def test_ties_never_make_a_pair(which):
    assert rated_pairs([2, 2, 2], which) == []
    assert set(rated_pairs([2, 1, 2, 1], which)) <= {(0, 1), (0, 3), (2, 1), (2, 3)}
    assert rated_pairs([2, 1, 2, 1], "best-worst") == [(0, 1)]


def test_only_answers_that_a_pair_names_stay():
    record = {"prompt": "q", "completions": ["low", "high", "mid"], "scores": [1, 3, 2], "weight": 0.5}
    group = read(Rated(), record)
    assert [c.text for c in group.completions] == ["low", "high"]
    assert texts(group) == [("high", "low")]
    assert scores(group) == [1, 3]
    assert {c.weight for c in group.completions} == {0.5}
    assert len(read(Rated(pairs="all"), record).completions) == 3
    assert texts(read(Rated(pairs="adjacent"), record)) == [("high", "mid"), ("mid", "low")]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"scores": [1]}, "'scores' has 1 entries for 2 completions"),
        ({"scores": [1, None]}, r"scores\[1\] must be a number, found null"),
        ({"scores": [1, float("nan")]}, r"scores\[1\] must be a number, found the number nan"),
        ({"scores": 3}, "'scores' must be a list, found the number 3"),
        ({"completions": ["a"], "scores": [1]}, "has 1 entries: a pair takes two"),
        ({"completions": ["a", 3]}, r"'completions\[1\]' must be a string or a list of messages, found the number 3"),
    ],
)
def test_what_is_wrong_with_a_rated_record_is_said(change, wrong):
    with pytest.raises(DataError, match=wrong):
        read(Rated(), {"prompt": "q", "completions": ["a", "b"], "scores": [1, 2]} | change)


def rating(value):
    return {"Rating": value, "Rationale": "…"}


RAW_ULTRAFEEDBACK = {
    "source": "evol_instruct",
    "instruction": "q",
    "models": ["a", "b", "c"],
    "correct_answers": ["None"],
    "incorrect_answers": ["None"],
    "completions": [
        {
            "model": "a",
            "response": "bad",
            "overall_score": 10.0,  # was 1: the mistake of the published data
            "annotations": {"helpfulness": rating("1"), "honesty": rating("N/A"), "truthfulness": rating("2")},
            "custom_system_prompt": "…",
        },
        {
            "model": "b",
            "response": "good",
            "overall_score": 8.0,
            "annotations": {"helpfulness": rating("5"), "honesty": rating("5"), "instruction_following": rating("4")},
        },
        {
            "model": "c",
            "response": "fair",
            "overall_score": 6.5,
            "annotations": {"helpfulness": rating("3")},
        },
    ],
}


def test_ultrafeedback_as_published():
    form = UltraFeedback()
    assert form.matches(RAW_ULTRAFEEDBACK)
    assert set(RAW_ULTRAFEEDBACK) <= form.keys
    group = read(form, RAW_ULTRAFEEDBACK, TOK)
    assert (texts(group), scores(group)) == ([("bad", "fair")], [10, 6.5])
    by_ratings = read(UltraFeedback(score="ratings"), RAW_ULTRAFEEDBACK, TOK)
    assert (texts(by_ratings), scores(by_ratings)) == ([("good", "bad")], [1.5, 14 / 3])
    assert list(group.prompt_ids) == TOK.render_prompt([{"role": "user", "content": "q"}])


def test_ultrafeedback_binarized():
    def whole(text):
        return [{"content": "q", "role": "user"}, {"content": text, "role": "assistant"}]

    record = {
        "prompt": "q", "prompt_id": "5b", "chosen": whole("good"), "rejected": whole("bad"), "messages": whole("good"),
        "score_chosen": 8.0, "score_rejected": 6.5,
    }  # fmt: skip
    form = UltraFeedback()
    assert form.matches(record)
    assert set(record) <= form.keys
    group = read(form, record, TOK)
    assert (texts(group), scores(group)) == ([("good", "bad")], [8, 6.5])
    assert group.prompt_ids == read(form, RAW_ULTRAFEEDBACK, TOK).prompt_ids
    assert read(UltraFeedback(min_gap=2.0), record, TOK).pairs == ()
    assert read(form, record | {"score_rejected": 8.0}, TOK).pairs == ()


@pytest.mark.parametrize(
    ("item", "wrong"),
    [
        ({"text": "x"}, r"completions\[0\] must be an object with the text of a 'response', found 'text'"),
        ({"response": "x"}, r"completions\[0\].overall_score must be a number, found null"),
        ("x", "found a string"),
    ],
)
def test_what_is_wrong_with_an_ultrafeedback_record_is_said(item, wrong):
    record = RAW_ULTRAFEEDBACK | {"completions": [item, *RAW_ULTRAFEEDBACK["completions"]]}
    with pytest.raises(DataError, match=wrong):
        read(UltraFeedback(), record)
    with pytest.raises(DataError, match="'Rating' for none of"):
        bare = {"response": "x", "annotations": {"helpfulness": rating("N/A")}}
        read(UltraFeedback(score="ratings"), record | {"completions": [bare]})


START = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: go"
TRANSCRIPTS = {"chosen": f"{START}\n\nAssistant: yes: \n\nAssistants help", "rejected": f"{START}\n\nAssistant: no"}


def test_transcripts_become_messages_where_there_is_a_template():
    group = read(HH(), TRANSCRIPTS, TOK)
    start = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "go"},
    ]
    assert list(group.prompt_ids) == TOK.render_prompt(start)
    assert texts(group) == [("yes: \n\nAssistants help", "no")]
    assert group.one_prompt


def test_transcripts_stay_text_where_there_is_none():
    group = read(HH(), TRANSCRIPTS)
    assert RAW.decode(group.prompt_ids) == f"{START}\n\nAssistant:"
    assert [RAW.decode(c.ids) for c in group.completions] == [" yes: \n\nAssistants help</s>", " no</s>"]
    kept = read(HH(template="none"), TRANSCRIPTS, TOK)
    assert TOK.decode(kept.prompt_ids) == f"{START}\n\nAssistant:"


def test_transcripts_that_part_early_keep_their_own_prompts():
    early = TRANSCRIPTS | {"rejected": "\n\nHuman: hi\n\nAssistant: no"}
    group = read(HH(), early)
    assert not group.one_prompt
    assert RAW.decode(group.prompt_of(1)) == "\n\nHuman: hi\n\nAssistant:"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("hello", "must begin with 'Human:', found 'hello'"),
        ("\n\nHuman: hi", r"end with 'Assistant:', found \['Human'\]"),
        ("\n\nAssistant: hi", "must begin with 'Human:' and"),
        (3, "must be a transcript, found the number 3"),
    ],
)
def test_what_is_wrong_with_a_transcript_is_said(text, wrong):
    with pytest.raises(DataError, match=wrong):
        turns(text, "chosen")
    with pytest.raises(DataError, match="share no first turn"):
        read(HH(), TRANSCRIPTS | {"rejected": "\n\nHuman: ho\n\nAssistant: no"})
    with pytest.raises(DataError, match="format = 'hh' reads transcripts"):
        read(Preference(), TRANSCRIPTS)


def lines(folder, *records):
    file = folder / "d.jsonl"
    file.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return file


GOOD = {
    "rated": (Rated(), {"prompt": "q", "completions": ["a", "b"], "scores": [1, 2]}),
    "ultrafeedback": (UltraFeedback(), RAW_ULTRAFEEDBACK),
    "hh": (HH(), TRANSCRIPTS),
    "preference": (Preference(), {"prompt": "q", "chosen": ["a"], "rejected": ["x", "y"]}),
}


@pytest.mark.parametrize("name", GOOD)
def test_case_b03_bad_rows_of_every_format_of_pairs_come_at_once(tmp_path, name):
    form, good = GOOD[name]
    surrogate = json.loads(
        json.dumps(good).replace('"a"', '"\\ud83d"').replace("no", "\\ud83d").replace("fair", "\\ud83d")
    )
    file = lines(tmp_path, good, '{"broken', surrogate, [1], {"txt": "a"}, good)
    with pytest.raises(DataError) as error:
        load_groups(file, form, RAW, Options(), name=name, formats=lambda: {n: f for n, (f, _) in GOOD.items()})
    said = str(error.value)
    assert f"{file}: 4 bad of 6 rows" in said
    assert [line.split(":")[1] for line in said.splitlines()[1:5]] == ["2", "3", "4", "5"]
    assert "no JSON" in said and "lone surrogate" in said and "expected a JSON object, found list" in said
    assert f"format {name} reads " in said
    with pytest.raises(DataError, match=f"format = .*'{name}'.* would read them"):
        load_groups(lines(tmp_path, good), Text(), RAW, Options(), formats=lambda: {n: f for n, (f, _) in GOOD.items()})


def test_ties_are_left_out_and_counted(tmp_path):
    tie = {"prompt": "q", "completions": ["a", "b"], "scores": [1, 1]}
    file = lines(tmp_path, tie, tie | {"scores": [1, 2]}, tie)
    groups, counts = load_groups(file, Rated(), RAW, Options())
    assert [g.id for g in groups] == ["d.jsonl:2"]
    assert (counts.rows, counts.kept, counts.tied, counts.tied_examples) == (3, 1, 2, ("1", "3"))
    said = [text for text, _ in counts.messages(file, 64)]
    assert said == ["d.jsonl: 2 of 3 rows dropped, whose answers tie: no pair (lines 1, 3)"]
    with pytest.raises(DataError, match=r"nothing is left to train on(.|\n)*2 of 2 rows dropped, whose answers tie"):
        load_groups(lines(tmp_path, tie, tie), Rated(), RAW, Options())


def test_case_b04_identical_answers_among_several(tmp_path):
    same = {"prompt": "q", "chosen": "a", "rejected": ["a", "a"]}
    groups, counts = load_groups(lines(tmp_path, same, same | {"rejected": ["a", "b"]}), Preference(), RAW, Options())
    assert (len(groups), counts.pairs, counts.identical_pairs) == (2, 4, 3)
    assert "3 of 4 pairs whose chosen" in next(text for text, _ in counts.messages(tmp_path / "d.jsonl", 64))
    with pytest.raises(DataError, match="in every one of the 2 pairs chosen and rejected are identical"):
        load_groups(lines(tmp_path, same), Preference(), RAW, Options())


def test_case_b05_several_answers_are_cut_together(tmp_path):
    """max_length 10, prompt 8, longest answer 3 of 4: 7 prompt tokens stay, from the side that was asked for."""
    record = {"prompt": "abcdefgh", "completions": ["x", "yz", "v"], "scores": [1, 2, 3]}
    for side, prompt in (("keep-end", "bcdefgh"), ("keep-start", "abcdefg")):
        (group,), counts = load_groups(
            lines(tmp_path, record), Rated(pairs="all"), RAW, Options(max_length=10, truncation=side)
        )
        assert RAW.decode(group.prompt_ids) == prompt
        assert [RAW.decode(c.ids) for c in group.completions] == ["x</s>", "yz</s>", "v</s>"]
        assert counts.prompts_cut == 1


@pytest.mark.parametrize("layout", ["separate", "prefix-shared", "packed"])
def test_several_rejected_answers_train_like_a_pair_each(tmp_path, layout):
    """One step on {a > x, y} is one step on {a > x} and {a > y}: a loss of pairs is a mean over pairs."""
    ways = {
        "one": [{"prompt": "say: ", "chosen": "abc", "rejected": ["x", "yz"]}],
        "two": [{"prompt": "say: ", "chosen": "abc", "rejected": text} for text in ("x", "yz")],
    }
    found = {}
    for name, records in ways.items():
        (tmp_path / name).mkdir()
        file = tiny_run(tmp_path / name)
        for part in ("train", "valid"):
            write_lines(tmp_path / name / f"{part}.jsonl", records)
        outcome = run(file, "train.steps=2", loss="simpo", layout=layout)
        found[name] = (metrics(outcome)[-1]["loss"], adapter(outcome.path / "adapter"))
    assert found["one"][0] == pytest.approx(found["two"][0], rel=1e-5)
    assert apart(found["one"][1], found["two"][1]) < 1e-5

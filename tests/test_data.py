"""Files: reading, naming what is bad, cutting to length, counting."""

from __future__ import annotations

import json
import re

import pytest
from attrs import frozen
from tiny_tokenizers import tokenizer

from mortice.batch import Completion, Group
from mortice.data import DataCounts, load_groups, truncate
from mortice.errors import DataError
from mortice_plugins.formats.completion import CompletionFormat
from mortice_plugins.formats.preference import Preference
from mortice_plugins.formats.text import Text

TOK = tokenizer(None, eos="</s>")


@frozen
class Options:
    max_length: int = 64
    truncation: str = "keep-end"
    limit: int | None = None


def load(file, form=None, **options):
    return load_groups(file, form or Text(), TOK, Options(**options), name="text")


def test_case_b01_the_same_rows_however_they_were_saved(tmp_path):
    rows = ['{"text": "één"}', '{"text": "two 😀"}']
    ways = {
        "plain": "\n".join(rows) + "\n",
        "bom": "\ufeff" + "\n".join(rows) + "\n",
        "crlf": rows[0] + "\r\n\r\n" + rows[1] + "\r\n",
        "open": "\n".join(rows),
    }
    found = []
    for name, content in ways.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content.encode())
        groups, counts = load(tmp_path / f"{name}.jsonl")
        assert counts.rows == counts.kept == 2
        found.append([(g.prompt_ids, g.completions[0].ids) for g in groups])
    assert found[0] == found[1] == found[2] == found[3]
    (tmp_path / "list.json").write_text(f"[{','.join(rows)}]", "utf-8")
    groups, _ = load(tmp_path / "list.json")
    assert [(g.prompt_ids, g.completions[0].ids) for g in groups] == found[0]


BAD = {
    "broken": ('{"text": "a"', "no JSON"),
    "key": ('{"txt": "a"}', "no 'text', found 'txt'; is 'txt' meant as 'text'?"),
    "surrogate": ('{"text": "\\ud83d"}', "lone surrogate"),
    "list": ('["a"]', "expected a JSON object, found list"),
    "number": ('{"text": 3}', "'text' must be a string, found int"),
    "null": ('{"text": null}', "'text' must be a string, found NoneType"),
}


@pytest.mark.parametrize("kind", BAD)
def test_case_b03_a_bad_row_is_named(tmp_path, kind):
    line, message = BAD[kind]
    good = json.dumps({"text": "ok"})
    file = tmp_path / "d.jsonl"
    file.write_text("\n".join([good, good, line, good, good]))
    with pytest.raises(DataError) as error:
        load(file)
    assert f"{file}: 1 bad of 5 rows\n  d.jsonl:3: " in str(error.value)
    assert message in str(error.value)
    if kind in ("key", "list"):
        assert 'format text reads {"text"}' in str(error.value)


def test_case_b03_all_bad_rows_at_once(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text("\n".join(line for line, _ in BAD.values()))
    with pytest.raises(DataError) as error:
        load(file)
    assert re.findall(r"d\.jsonl:(\d)", str(error.value)) == ["1", "2", "3", "4", "5", "6"]
    file.write_text("\n".join(["{"] * 25))
    with pytest.raises(DataError, match=r"25 bad of 25 rows(.|\n)* and 5 more"):
        load(file)


def test_case_b03_the_format_that_would_read_the_rows_is_named(tmp_path):
    file = pair_file(tmp_path, *[{"prompt": "a", "chosen": "x", "rejected": "y"}] * 2)
    formats = {"text": Text(), "completion": CompletionFormat(), "preference": Preference()}
    with pytest.raises(DataError) as error:
        load_groups(file, Text(), TOK, Options(), name="text", formats=lambda: formats)
    assert str(error.value).splitlines()[1:] == [
        "  p.jsonl:1: no 'text', found 'prompt', 'chosen', 'rejected'",
        "  p.jsonl:2: no 'text', found 'prompt', 'chosen', 'rejected'",
        'format text reads {"text"}: every token but the first is scored, and the EOS that is appended.',
        "format = 'preference' would read them",
    ]


def test_case_b12_missing_and_empty_files_give_the_path(tmp_path):
    with pytest.raises(DataError, match=f"not found: {tmp_path}/x.jsonl"):
        load(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match=f"empty: {tmp_path}/x.jsonl"):
        load(tmp_path / "x.jsonl")


def test_other_files_are_refused_by_what_they_are(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "\xe9"}')
    with pytest.raises(DataError, match=r"latin\.jsonl is not UTF-8 \(byte 10\)"):
        load(tmp_path / "latin.jsonl")
    (tmp_path / "object.json").write_text('{"text": "a"}')
    with pytest.raises(DataError, match="must hold a list of records, found dict"):
        load(tmp_path / "object.json")


def pair_file(folder, *records):
    file = folder / "p.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return file


def test_case_b04_identical_pairs_are_counted_and_alone_refused(tmp_path):
    same = {"prompt": "a", "chosen": "x", "rejected": "x"}
    other = {"prompt": "a", "chosen": "x", "rejected": "y"}
    groups, counts = load(pair_file(tmp_path, same, other), Preference())
    assert (len(groups), counts.identical_pairs) == (2, 1)
    assert any("1 of 2 pairs whose chosen" in m for m, _ in counts.messages(tmp_path / "p.jsonl", 64))
    with pytest.raises(DataError, match="in every one of the 2 pairs chosen and rejected are identical"):
        load(pair_file(tmp_path, same, same), Preference())


def group(prompt: int, *answers: int) -> Group:
    completions = [Completion(range(100 * (k + 1), 100 * (k + 1) + n)) for k, n in enumerate(answers)]
    return Group("g", range(1, prompt + 1), completions, ((0, 1),) if len(answers) == 2 else ())


def test_case_b05_the_prompt_is_cut_no_more_than_needed():
    """max_length 10, prompt 8, completion 3: 7 prompt tokens stay, from the side that was asked for."""
    counts = DataCounts()
    end = truncate(group(8, 3), 10, "keep-end", None, counts)
    assert end.prompt_ids == (2, 3, 4, 5, 6, 7, 8)
    assert truncate(group(8, 3), 10, "keep-start", None).prompt_ids == (1, 2, 3, 4, 5, 6, 7)
    assert (counts.prompts_cut, counts.completions_cut, counts.dropped) == (1, 0, 0)
    assert end.completions == group(8, 3).completions
    assert truncate(group(8, 2), 10, "keep-end", None).prompt_ids == group(8, 2).prompt_ids


def test_both_sides_of_a_pair_share_the_prompt_cut_for_the_longer():
    found = truncate(group(8, 3, 6), 10, "keep-end", None)
    assert found.prompt_ids == (5, 6, 7, 8)
    assert found.one_prompt


def test_a_leading_bos_stays():
    assert truncate(group(8, 6), 10, "keep-end", 1).prompt_ids == (1, 6, 7, 8)
    assert truncate(group(8, 9), 10, "keep-end", 1).prompt_ids == (8,)


def test_case_b05_prompt_40_completion_5_max_32():
    found = truncate(group(40, 5), 32, "keep-end", None)
    assert (len(found.prompt_ids), found.completions[0].ids) == (27, tuple(range(100, 105)))


def test_case_b09_a_cut_answer_loses_its_end_in_ids_and_mask():
    counts = DataCounts()
    found = truncate(group(4, 12), 8, "keep-end", None, counts)
    assert found.prompt_ids == (4,)
    assert found.completions[0].ids == tuple(range(100, 107))
    assert len(found.completions[0].loss_mask) == 7
    assert (counts.completions_cut, counts.prompts_cut) == (1, 1)


def test_case_b05_what_is_left_with_nothing_to_score_is_dropped():
    counts = DataCounts()
    late = Group("g", [1], [Completion([2, 3, 4, 5], [False, False, False, True])])
    assert truncate(late, 4, "keep-end", None, counts) is None
    assert counts.dropped == 1
    assert truncate(late, 5, "keep-end", None, counts) is not None


def test_counts_say_what_was_cut(tmp_path):
    records = [{"prompt": "p" * 20, "completion": "c" * 5}, {"prompt": "p", "completion": "c" * 40, "id": 7}]
    groups, counts = load(pair_file(tmp_path, *records), CompletionFormat(), max_length=16)
    assert [len(g.prompt_ids) + len(g.completions[0].ids) for g in groups] == [16, 16]
    assert (counts.rows, counts.kept, counts.prompts_cut, counts.completions_cut) == (2, 2, 1, 1)
    assert counts.extra_keys == ("id",)
    said = [message for message, _ in counts.messages(tmp_path / "p.jsonl", 16)]
    assert said[0] == "p.jsonl: 1 of 2 prompts shortened to fit max_length 16"
    assert said[-1] == "p.jsonl: keys not read: id"


def test_rows_of_weight_0_are_dropped_and_said_for_what_they_are(tmp_path):
    records = [{"prompt": "a", "completion": "b", "weight": weight} for weight in (0, 1)]
    groups, counts = load(pair_file(tmp_path, *records), CompletionFormat())
    assert (len(groups), counts.weightless, counts.dropped) == (1, 1, 0)
    assert [m for m, _ in counts.messages(tmp_path / "p.jsonl", 16)] == [
        "p.jsonl: 1 of 2 rows dropped, whose weight is 0"
    ]
    with pytest.raises(DataError, match=r"dropped\n  p\.jsonl: 1 of 1 rows dropped, whose weight is 0"):
        load(pair_file(tmp_path, records[0]), CompletionFormat())


def test_a_limit_reads_the_first_rows(tmp_path):
    records = [{"prompt": "a", "completion": str(i)} for i in range(5)]
    groups, counts = load(pair_file(tmp_path, *records), CompletionFormat(), limit=2)
    assert [g.id for g in groups] == ["p.jsonl:1", "p.jsonl:2"]
    assert counts.rows == 2


def test_groups_with_different_prompts_are_counted(tmp_path):
    class Odd(Preference):
        """{"prompt", "chosen", "rejected"}: the second answer follows another prompt."""

        def __call__(self, record, tokenizer, /, *, source):
            found = super().__call__(record, tokenizer, source=source)
            from attrs import evolve

            second = evolve(found.group.completions[1], prompt_ids=(9, 9))
            return evolve(found, group=found.group.with_completions([found.group.completions[0], second]))

    groups, counts = load(pair_file(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"}), Odd())
    assert counts.different_prompts == 1
    assert not groups[0].one_prompt

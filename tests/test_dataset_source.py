"""The dataset source: epochs, steps, validation, what it says, what it goes on from."""

from __future__ import annotations

import json

import pytest
from attrs import evolve, frozen
from tiny_tokenizers import tokenizer

from mortice.errors import DataError
from mortice.protocols import SourceContext
from mortice_plugins.formats.completion import CompletionFormat
from mortice_plugins.formats.preference import Preference
from mortice_plugins.sources.dataset import Dataset


@frozen
class Options:
    train: object
    valid: object = None
    format: str = "completion"
    max_length: int = 64
    truncation: str = "keep-end"
    limit: int | None = None


def rows(folder, name: str, count: int):
    file = folder / name
    file.write_text("\n".join(json.dumps({"prompt": "q", "completion": str(i)}) for i in range(count)))
    return file


def context(data: Options, *, batch_size: int = 4, seed: int = 0, form=None, said: list | None = None) -> SourceContext:
    def report(message, /, *, count=None):
        if said is not None:
            said.append(message)

    return SourceContext(data, form or CompletionFormat(), tokenizer(), batch_size, seed, report)


def lines(source, step: int) -> list[int]:
    groups, passes = source.next(step)
    assert passes == 1
    return [int(group.id.rpartition(":")[2]) for group in groups]


def test_each_row_once_an_epoch_and_the_last_step_is_short(tmp_path):
    source = Dataset().open(context(Options(rows(tmp_path, "t.jsonl", 10))))
    assert source.steps_per_epoch == 3
    epochs = [[lines(source, 3 * epoch + place) for place in range(3)] for epoch in range(2)]
    for epoch in epochs:
        assert [len(step) for step in epoch] == [4, 4, 2]
        assert sorted(line for step in epoch for line in step) == list(range(1, 11))
    assert epochs[0] != epochs[1]


def test_a_step_depends_on_seed_and_number_alone(tmp_path):
    data = Options(rows(tmp_path, "t.jsonl", 20))
    first, second = (Dataset().open(context(data, seed=7)) for _ in range(2))
    forwards = [lines(first, step) for step in range(10)]
    assert [lines(second, step) for step in reversed(range(10))] == forwards[::-1]
    other = Dataset().open(context(data, seed=8))
    assert [lines(other, step) for step in range(10)] != forwards


def test_without_shuffle_the_order_is_the_file_s(tmp_path):
    source = Dataset(shuffle=False).open(context(Options(rows(tmp_path, "t.jsonl", 6))))
    assert [lines(source, step) for step in range(4)] == [[1, 2, 3, 4], [5, 6], [1, 2, 3, 4], [5, 6]]


def test_case_b12_fewer_rows_than_a_step_takes(tmp_path):
    """3 rows at 4 a step are trained on in one short step; one validation row is a validation set."""
    data = Options(rows(tmp_path, "t.jsonl", 3), rows(tmp_path, "v.jsonl", 1))
    source = Dataset().open(context(data))
    assert source.steps_per_epoch == 1
    assert sorted(lines(source, 0)) == [1, 2, 3]
    assert source.can_validate
    assert source.validate(lambda groups: {"rows": len(groups)}) == {"rows": 1}


def test_case_b12_without_validation_data_it_says_so_once(tmp_path):
    said: list[str] = []
    source = Dataset().open(context(Options(rows(tmp_path, "t.jsonl", 3)), said=said))
    assert not source.can_validate
    assert said == ["evaluation is off: data.valid is not set"]


def test_case_b12_files_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match=r"data\.train is not set"):
        Dataset().open(context(Options(None)))
    with pytest.raises(DataError, match=f"not found: {tmp_path}/t.jsonl"):
        Dataset().open(context(Options(tmp_path / "t.jsonl")))


def test_what_was_cut_is_said(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"prompt": "long " * 9, "chosen": "a", "rejected": "a", "note": 1}) + "\n" * 2)
    with file.open("a") as more:
        more.write(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}))
    said: list[str] = []
    options = Options(file, format="preference", max_length=40)
    source = Dataset().open(context(options, form=Preference(), said=said))
    assert source.provides == Preference.provides
    assert said[0] == "t.jsonl: 1 of 2 prompts shortened to fit max_length 40"
    assert said[1] == "t.jsonl: 1 of 2 pairs whose chosen and rejected answers are identical: no preference signal"
    assert said[2] == "t.jsonl: keys not read: note"


def test_a_state_fits_only_the_data_it_was_made_with(tmp_path):
    data = Options(rows(tmp_path, "t.jsonl", 5))
    state = json.loads(json.dumps(Dataset().open(context(data)).state()))
    Dataset().open(context(data)).restore(state)
    with pytest.raises(DataError, match=r"not what this run was started with \(batch_size changed\)"):
        Dataset().open(context(data, batch_size=2)).restore(state)
    longer = rows(tmp_path, "t.jsonl", 6)
    with pytest.raises(DataError, match=r"\(rows, fingerprint changed\)"):
        Dataset().open(context(evolve(data, train=longer))).restore(state)

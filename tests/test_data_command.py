"""`mortice data`: what a user sees of the records before anything trains."""

from __future__ import annotations

import json

import pytest
from tiny_tokenizers import CHATML, tokenizer

from mortice.cli import main
from mortice.cli.data import histogram, runs, spread


@pytest.fixture
def run_file(tmp_path):
    """Two pairs and a tokenizer of bytes; there is no model, since none is needed."""
    model = tmp_path / "model"
    model.mkdir()
    tokenizer().backend.save(str(model / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (model / "tokenizer_config.json").write_text(json.dumps(special))
    pairs = [{"prompt": "[bold]hi[/bold]", "chosen": "yes", "rejected": "no", "id": 1}, {"prompt": "p" * 80}]
    pairs[1] |= {"chosen": "a", "rejected": "a"}
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\npath = "model"\n[data]\nformat = "preference"\ntrain = "pairs.jsonl"\nmax_length = 70\n'
        '[loss]\nname = "orpo"\n'
    )
    return path


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code or 0, *capsys.readouterr()


def test_counts_lengths_and_what_is_scored_are_shown(capsys, run_file):
    code, out, err = call(capsys, "data", str(run_file), "--rows", "1")
    assert code == 0, err
    facts = {words[:-1]: words[-1] for line in reversed(out.splitlines()) if (words := tuple(line.split()))}
    assert facts["rows",] == "2"
    assert (facts["prompts", "cut"], facts["identical", "pairs"], facts["extra", "keys"]) == ("1", "1", "id")
    assert facts["scored", "tokens"] == str(4 + 3 + 2 + 2)
    assert facts["pairs",] == "2"
    assert facts["max",] == "68"
    assert "<|im_start|>user\n[bold]hi[/bold]<|im_end|>" in out
    assert "[chosen, 4 of 4 tokens scored] ⟦yes<|im_end|>⟧" in out
    assert "[rejected, 3 of 3 tokens scored] ⟦no<|im_end|>⟧" in out
    assert "pairs.jsonl:2" not in out


def test_json_holds_the_same(capsys, run_file):
    code, out, err = call(capsys, "data", str(run_file), "--json")
    assert code == 0, err
    (report,) = json.loads(out)
    assert report["counts"]["prompts_cut"] == report["counts"]["identical_pairs"] == 1
    spreads = report["spreads"]
    assert spreads["prompt tokens"]["max"] == 70 - 2
    assert [spreads[f"{side} tokens"]["max"] for side in ("chosen", "rejected")] == [4, 3]
    assert spreads["length difference, chosen − rejected tokens"] == {
        "min": 0, "median": 1, "max": 1, "bins": {"0": 1, "1": 1}
    }  # fmt: skip
    chosen = report["groups"][0]["completions"][0]
    assert (chosen["text"], chosen["scored"]) == ("yes<|im_end|>", [True] * 4)


def test_bad_rows_end_the_command(capsys, run_file):
    (run_file.parent / "pairs.jsonl").write_text('{"text": "a"}')
    code, out, err = call(capsys, "data", str(run_file))
    assert (code, out) == (2, "")
    assert "pairs.jsonl:1: no 'chosen' and no 'rejected', found 'text'" in err
    assert "format = 'text' would read them" in err
    run_file.write_text(run_file.read_text().replace('train = "pairs.jsonl"\n', ""))
    code, _, err = call(capsys, "data", str(run_file))
    assert code == 2 and "data.train is not set" in err


def test_lengths_fall_into_bins_that_hold_them_all():
    found = spread([1, 2, 2, 20])
    assert found["bins"] == {"1–3": 3, "4–6": 0, "7–9": 0, "10–12": 0, "13–15": 0, "16–18": 0, "19–21": 1}
    assert (found["min"], found["median"], found["max"]) == (1, 2, 20)
    assert histogram(found)[0] == ("1–3", "3", "█" * 40)
    assert spread([5])["bins"] == {"5": 1}
    assert spread([-3, 8, 8])["bins"] == {
        "-3 to -2": 1,
        "-1 to 0": 0,
        "1 to 2": 0,
        "3 to 4": 0,
        "5 to 6": 0,
        "7 to 8": 2,
    }
    gaps = spread([0.5, 0.5, 4.5])["bins"]
    assert (len(gaps), gaps["0.5 to 1"], gaps["4 to 4.5"], sum(gaps.values())) == (8, 2, 1, 3)
    assert spread([0.5])["bins"] == {"0.5": 1}


def test_neighbours_with_one_mask_are_shown_together():
    assert runs([1, 2, 3], [True, True, False]) == [(True, [1, 2]), (False, [3])]

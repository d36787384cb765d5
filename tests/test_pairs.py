"""`mortice pairs`: answers that depend on seed, prompt and sample alone; which of them pair; a run that was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from test_data_command import call
from tiny_llama import IDS, tiny
from tiny_run import RUN_FILE, configure, run, tiny_run, write_lines
from tiny_tokenizers import tokenizer

from mortice.errors import ConfigError, DataError
from mortice.generation import continue_from, generate_tokens, prefill
from mortice.launch import Notices, train
from mortice.pairing import Answer, Choice, Prompt, Samples, choose, make_pairs, read_prompts, samples_file
from mortice.pretrained import load, random_model
from mortice.protocols import Sampling
from mortice_plugins.formats.preference import Preference
from mortice_plugins.models.qwen3_5 import Qwen35Adapter

EVEN = '{name = "regex", pattern = "^(..)*$"}'
"""Right is an answer of an even number of characters: a third of what the model writes."""
PROMPTS = [{"prompt": f"say {w}: ", "id": i} for i, w in enumerate(("red", "green", "blue", "pink", "grey", "gold"))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model that has learned to answer every prompt with a, ab or abc, each as likely."""
    folder = tmp_path_factory.mktemp("ends")
    file = tiny_run(folder, RUN_FILE.replace('format = "preference"', 'format = "completion"'))
    answers = [{"prompt": p["prompt"], "completion": text} for p in PROMPTS for text in ("a", "ab", "abc")]
    for name in ("train", "valid"):
        write_lines(folder / f"{name}.jsonl", answers)
    outcome = run(file, "train.steps=30", "optimizer.learning_rate=0.01", "schedule.name=constant", loss="sft")
    return folder / "model", outcome.path / "adapter"


@pytest.fixture
def ask(tmp_path, model, capsys):
    """The command on the tiny model: exit code, output, errors."""
    write_lines(tmp_path / "prompts.jsonl", PROMPTS)

    def command(output: str, *arguments: str, reward: str = EVEN, prompts: str = "prompts.jsonl"):
        files = [str(model[0]), str(tmp_path / prompts), str(tmp_path / output)]
        return call(capsys, "pairs", *files, "--reward", reward, "--adapter", str(model[1]), "-n", "6", *arguments)

    return command


def pairs_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_continuations_of_one_prompt_do_not_meet():
    model = tiny().model
    samplings = [Sampling(max_tokens=8, temperature=0.0), *(Sampling(max_tokens=8, seed=s) for s in range(3))]
    alone = [list(generate_tokens(model, IDS, sampling)) for sampling in samplings]
    start = prefill(model, IDS)
    assert [list(continue_from(model, start, sampling)) for sampling in samplings] == alone
    turns = [continue_from(model, start, sampling) for sampling in samplings]
    assert [list(tokens) for tokens in zip(*zip(*turns))] == alone


def test_continuations_of_a_recurrent_model():
    model = random_model(Qwen35Adapter.examples[0], 0).model
    samplings = [Sampling(max_tokens=8, temperature=0.0), *(Sampling(max_tokens=8, seed=s) for s in range(2))]
    prompt = [i % 41 for i in IDS]
    start = prefill(model, prompt)
    turns = [continue_from(model, start, sampling) for sampling in samplings]
    assert [list(tokens) for tokens in zip(*zip(*turns))] == [
        list(generate_tokens(model, prompt, s)) for s in samplings
    ]


@pytest.mark.parametrize("name", ["gemma4_e2b", "qwen3", "minicpm5"])
def test_continuations_of_reference_models(shared, name):
    model = load(shared / "models" / name).model
    samplings = [Sampling(max_tokens=12, temperature=0.0), Sampling(max_tokens=12, seed=1)]
    start = prefill(model, IDS)
    assert [list(continue_from(model, start, s)) for s in samplings] == [
        list(generate_tokens(model, IDS, s)) for s in samplings
    ]


def answer(sample, text: str, reward: float, finish: str = "stop") -> Answer:
    return Answer(sample, text, len(text), finish, reward, {"r": reward})


def chosen(answers, most: int = 9, threshold: float = 1.0) -> list[tuple[object, object]]:
    return [(c.sample, r.sample) for c, r in choose(answers, Choice(threshold, most))]


def test_a_wrong_greedy_answer_is_rejected_first():
    answers = [answer("greedy", "w", 0), answer(0, "x", 0), answer(1, "a", 1), answer(2, "b", 1)]
    assert chosen(answers, 1) == [(1, "greedy")]
    assert chosen(answers) == [(1, "greedy"), (2, 0), (2, "greedy"), (1, 0)]
    assert chosen(list(reversed(answers))) == chosen(answers)
    right = [answer("greedy", "a", 1), answer(0, "x", 0), answer(1, "b", 1)]
    assert chosen(right) == [("greedy", 0), (1, 0)]


def test_equal_texts_count_once_and_cut_answers_are_never_chosen():
    answers = [answer(0, "x", 0), answer(1, "x", 0), answer(2, "a", 1, "length"), answer(3, "b", 1), answer(4, "b", 1)]
    assert chosen(answers) == [(3, 0)]
    assert chosen(answers[:3]) == []
    assert chosen([answer(0, "x", 0, "length"), answer(1, "a", 1)]) == [(1, 0)]


def test_all_right_or_all_wrong_make_no_pair():
    assert chosen([answer(0, "a", 1), answer(1, "b", 2)]) == []
    assert chosen([answer(0, "a", 1), answer(1, "b", 2)], threshold=2.0) == [(1, 0)]
    assert chosen([answer(0, "a", 0), answer(1, "b", 0.5)]) == []


def test_the_command_writes_pairs_that_train_right_away(tmp_path, ask, model):
    code, out, err = ask("made/pairs.jsonl", "--samples", "6", "--max-pairs", "2")
    assert code == 0, err
    found = pairs_of(tmp_path / "made" / "pairs.jsonl")
    assert 2 <= len(found) <= 12
    for pair in found:
        assert (pair["score_chosen"], pair["score_rejected"]) == (1.0, 0.0)
        assert len(pair["chosen"]) % 2 == 0 and len(pair["rejected"]) % 2 == 1
        origin = pair["origin"]
        assert origin["chosen"]["finish_reason"] == "stop"
        assert origin["chosen"]["rewards"] == {"regex": 1.0}
        assert origin["sampling"] == {
            "seed": 0, "samples": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 6, "greedy": True,
        }  # fmt: skip
        assert origin["rewards"]["regex"]["pattern"] == "^(..)*$"
        assert pair["prompt"] in [p["prompt"] for p in PROMPTS]
        assert set(pair) <= Preference().keys
    assert re.search(rf"^pairs +{len(found)} *$", out, re.MULTILINE)
    assert "greedy answers right" in out and "all answers wrong" in out

    file = tiny_run(tmp_path / "made", RUN_FILE)
    data = f"data.train={tmp_path / 'made' / 'pairs.jsonl'}"
    said: list[str] = []
    outcome = train(configure(file, data), Notices(show=said.append))
    assert not [text for text in said if "keys not read" in text]
    assert outcome.steps == 3


def test_an_answer_depends_on_seed_prompt_and_sample_alone(tmp_path, ask):
    def answers(output: str, *arguments: str, **files: str) -> dict:
        code, _, err = ask(output, *arguments, **files)
        assert code == 0, err
        _, *lines = samples_file(tmp_path / output).read_text().splitlines()
        return {(e := json.loads(line))["key"]: [(a["sample"], a["text"]) for a in e["answers"]] for line in lines}

    first = answers("a.jsonl", "--samples", "5")
    write_lines(tmp_path / "reversed.jsonl", [*reversed(PROMPTS)])
    assert answers("b.jsonl", "--samples", "5", prompts="reversed.jsonl") == first
    fewer = answers("c.jsonl", "--samples", "3", "--no-greedy")
    assert {key: [a for a in found if a[0] != "greedy"][:3] for key, found in first.items()} == fewer
    other = answers("d.jsonl", "--samples", "5", "--seed", "1")
    assert other != first
    assert {k: v[0] for k, v in other.items()} == {k: v[0] for k, v in first.items()}  # greedy


def test_records_with_one_prompt_get_answers_of_their_own(tmp_path, ask):
    write_lines(tmp_path / "twice.jsonl", [PROMPTS[0], PROMPTS[0], PROMPTS[0] | {"id": 9}])
    code, _, err = ask("p.jsonl", "--samples", "8", prompts="twice.jsonl")
    assert code == 0, err
    _, *lines = samples_file(tmp_path / "p.jsonl").read_text().splitlines()
    texts = [[a["text"] for a in json.loads(line)["answers"]] for line in lines]
    assert len({json.loads(line)["key"] for line in lines}) == 3
    assert texts[0] != texts[1] != texts[2]
    assert texts[0][0] == texts[1][0]  # the greedy answer


def test_a_killed_run_goes_on_where_it_was(tmp_path, ask, model):
    """The process is killed while it samples; what the same command then writes is what one run writes."""
    code, _, err = ask("whole.jsonl", "--samples", "4")
    assert code == 0, err
    command = [
        sys.executable, "-m", "mortice", "pairs", str(model[0]), str(tmp_path / "prompts.jsonl"),
        str(tmp_path / "killed.jsonl"), "--reward", EVEN, "--adapter", str(model[1]), "-n", "6", "--samples", "4",
    ]  # fmt: skip
    kept = samples_file(tmp_path / "killed.jsonl")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (kept.exists() and kept.read_bytes().count(b"\n") >= 2):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with kept.open("ab") as file:
        file.write(b'{"key": "torn')
    done = kept.read_bytes().count(b"\n") - 1
    (tmp_path / "killed.jsonl").unlink(missing_ok=True)
    assert done >= 1
    code, out, err = ask("killed.jsonl", "--samples", "4")
    assert code == 0, err
    assert re.search(rf"answers from an earlier run +{done} of 6", out)
    assert kept.read_text() == samples_file(tmp_path / "whole.jsonl").read_text()
    assert (tmp_path / "killed.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    assert not [name for name in os.listdir(tmp_path) if "tmp" in name]


def test_other_choices_use_the_same_answers(tmp_path, ask):
    ask("p.jsonl", "--samples", "5")
    one = pairs_of(tmp_path / "p.jsonl")
    kept = samples_file(tmp_path / "p.jsonl").read_text()
    code, out, _ = ask("p.jsonl", "--samples", "5", "--max-pairs", "4", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["reused"] == facts["prompts"] == len(PROMPTS)
    assert facts["pairs"] == len(pairs_of(tmp_path / "p.jsonl")) > len(one)
    assert samples_file(tmp_path / "p.jsonl").read_text() == kept
    assert facts["paired"] + facts["all_right"] + facts["all_wrong"] + facts["only_cut"] == facts["prompts"]


def test_answers_that_were_made_otherwise_are_not_mixed(tmp_path, ask):
    ask("p.jsonl", "--samples", "5")
    before = (tmp_path / "p.jsonl").read_text()
    code, out, err = ask("p.jsonl", "--samples", "5", "--temperature", "0.5")
    assert (code, out) == (2, "")
    assert "'temperature': 1.0" in err and "'temperature': 0.5" in err and "delete it to sample anew" in err
    code, _, err = ask("p.jsonl", "--samples", "5", reward='{name = "regex", pattern = "a"}')
    assert code == 2 and "rewards was" in err
    assert (tmp_path / "p.jsonl").read_text() == before


def test_a_damaged_file_of_answers_is_said(tmp_path):
    path = tmp_path / "p.samples.jsonl"
    path.write_text('{"seed": 0}\nno json\n')
    with pytest.raises(DataError, match=r"p\.samples\.jsonl is damaged .* delete it"), Samples.open(path, {"seed": 0}):
        pass
    path.write_text("")
    with (
        Samples.open(path, {"seed": 0}),
        pytest.raises(ConfigError, match="is in use by another process"),
        Samples.open(path, {"seed": 0}),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "reward", "wrong"),
    [
        (("--temperature", "0"), EVEN, "--temperature 0.0 is out of range"),
        (("--samples", "0"), EVEN, "--samples 0 is out of range"),
        (("--raw", "--template", "x"), EVEN, "have no place in raw text"),
        ((), "regx", "unknown reward 'regx'; did you mean 'regex'?"),
        ((), "regex", "--reward regex: reward.pattern: is required"),
        ((), '{name = "regex", pattern = "("}', "is no regular expression"),
        ((), "{name = regex}", "no inline TOML table"),
        ((), '{pattern = "a"}', "name: required (available: boxed, "),
        ((), "boxed", "prompts.jsonl:1: reward boxed: no 'answer', found 'prompt', 'id'"),
        (("--key", "question"), EVEN, "6 bad of 6 rows\n  prompts.jsonl:1: no 'question', found 'prompt', 'id'"),
    ],
)
def test_mistakes_give_one_message(ask, arguments, reward, wrong):
    code, out, err = ask("p.jsonl", *arguments, reward=reward)
    assert (code, out) == (2, "")
    assert wrong in err
    assert "Traceback" not in err


def test_a_file_that_is_not_ours_stays(tmp_path, ask):
    (tmp_path / "mine.jsonl").write_text("precious")
    code, _, err = ask("mine.jsonl")
    assert code == 2 and "was not made by this command" in err
    code, _, err = ask("prompts.jsonl")
    assert code == 2
    assert (tmp_path / "mine.jsonl").read_text() == "precious"


def test_no_pair_at_all_is_an_error_that_keeps_the_answers(tmp_path, ask):
    code, _, err = ask("p.jsonl", reward='{name = "regex", pattern = "never this"}')
    assert code == 2
    assert "no prompt gave a pair: of 6, 0 had only right answers, 6 only wrong ones" in err
    assert samples_file(tmp_path / "p.jsonl").exists()
    assert not (tmp_path / "p.jsonl").exists()


def test_prompts_as_strings_and_messages(tmp_path):
    turns = [{"role": "user", "content": "hi"}]
    file = tmp_path / "p.jsonl"
    write_lines(file, [{"prompt": "hi"}, {"prompt": turns}, {"prompt": turns, "system": "be kind"}])
    tok = tokenizer()
    strings, messages, system = read_prompts(file, tok)
    assert strings.ids == messages.ids == tuple(tok.render_prompt(turns))
    assert (strings.occurrence, messages.occurrence) == (0, 1)
    assert system.ids == tuple(tok.render_prompt([{"role": "system", "content": "be kind"}, *turns]))
    assert read_prompts(file, tok, raw=True, limit=1)[0].ids == tuple(tok.encode("hi"))
    write_lines(file, [{"prompt": 3}, {"prompt": [{"role": "user"}]}, {"prompt": []}, [1], {"prompt": ""}])
    with pytest.raises(DataError) as error:
        read_prompts(file, tokenizer(None))
    assert "5 bad of 5 rows" in str(error.value)
    assert str(error.value).count("must be a string or a list of messages") == 3
    assert "p.jsonl:5: 'prompt' is empty" in str(error.value)


def test_records_that_a_reward_cannot_score_are_all_named_before_anything_is_sampled(tmp_path, ask):
    write_lines(tmp_path / "some.jsonl", [p | {"answer": 1} for p in PROMPTS[:3]] + PROMPTS[3:])
    code, _, err = ask("p.jsonl", reward="boxed", prompts="some.jsonl")
    assert code == 2 and "some.jsonl: 3 bad of 6 rows\n" in err
    assert re.findall(r"some\.jsonl:(\d): reward boxed: no 'answer'", err) == ["4", "5", "6"]
    assert not samples_file(tmp_path / "p.jsonl").exists()


def test_what_ends_a_run_keeps_what_was_answered(tmp_path):
    prompts = [Prompt(f"f:{i}", {"prompt": str(i)}, str(i), (i,), 0) for i in range(3)]
    asked: list[str] = []

    def ask(prompts):
        for prompt in prompts:
            if prompt.where == "f:1" and len(asked) == 1:
                raise KeyboardInterrupt
            asked.append(prompt.where)
            yield [answer(0, "a", 1), answer(1, "b", 0)]

    with pytest.raises(KeyboardInterrupt):
        make_pairs(prompts, ask, tmp_path / "p.jsonl", Choice(1.0), {"seed": 0})
    assert not (tmp_path / "p.jsonl").exists()
    asked.append("again")
    outcome = make_pairs(prompts, ask, tmp_path / "p.jsonl", Choice(1.0), {"seed": 0})
    assert asked == ["f:0", "again", "f:1", "f:2"]
    assert (outcome.reused, outcome.pairs) == (1, 3)


def test_pairs_keep_system_tools_and_weight_of_their_record(tmp_path):
    record = {"prompt": "q", "system": "s", "weight": 0.5, "id": 3}
    prompt = Prompt("f:1", record, "q", (1,), 0)
    make_pairs(
        [prompt], lambda _: [[answer(0, "a", 1), answer(1, "b", 0)]], tmp_path / "p.jsonl", Choice(1.0), {"seed": 0}
    )
    (found,) = pairs_of(tmp_path / "p.jsonl")
    assert (found["system"], found["weight"], "id" in found) == ("s", 0.5, False)
    assert found["origin"]["seed"] == 0 and found["origin"]["prompt"] == "f:1"

"""IFEval's checkers: cases by hand, and the published evaluation on its own prompts."""

from __future__ import annotations

import importlib
import json
import random
import sys
from importlib import metadata
from types import ModuleType

import pytest

from mortice.errors import ConfigError, DataError
from mortice_plugins.rewards.ifeval import IFEval
from mortice_plugins.rewards.ifeval_checks import CHECKS, followed, followed_loosely, instructions, language, sentences
from mortice_plugins.tasks.ifeval import IFEval as Task

GERMAN = "Das ist ein ganz gewöhnlicher Satz in deutscher Sprache, und noch einer dazu."
CASES = [
    ("keywords:existence", {"keywords": ["Red", "blue"]}, "a red and a Blue one", "red only"),
    ("keywords:frequency", {"keyword": "a", "frequency": 3, "relation": "at least"}, "banana", "ban"),
    ("keywords:frequency", {"keyword": "a", "frequency": 3, "relation": "less than"}, "ban", "banana"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "A Cat."),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 2, "let_relation": "at least"}, "Eve", "even"[:2]),
    ("language:response_language", {"language": "de"}, GERMAN, "This is a plain sentence in English, and another."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo\n***", "one\n***\n***\ntwo"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one, two: three", "one two"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "Dr. Who sat.", "Yes. No."),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
     "one\n\n\"So, two", "so\n\none"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [b c]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP. S. Write.", "Bye. PS"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "p.p.s one more", "P.S. one"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b c*", "*a* and * *"),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
     "SECTION 1 a\nSECTION 2 b", "SECTION 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<< >>\n<title>"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, " say it. It.", "It. Say it."),
    ("startend:end_checker", {"end_phrase": "The End."}, 'Once. "the end."', "The end. Once."),
    ("startend:quotation", {}, '"all of it"', '"some" of it'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     "A BIG-TIME thing", "A Big thing"),
    ("change_case:english_capital", {}, "THIS IS ALL OF THE TEXT IN ENGLISH", "This is not"),
    ("change_case:english_lowercase", {}, "this is all of the text in english", "This is not"),
    ("punctuation:no_comma", {}, "one two; three", "one, two"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES, ids=[c[0] for c in CASES])
def test_each_instruction(name, arguments, good, bad):
    record = {"instruction_id_list": [name], "kwargs": [arguments]}
    assert followed(good, record) == [True] and followed(bad, record) == [False]
    assert followed("  \n", record) == [False]  # nothing is no answer


def test_all_kinds_are_covered():
    assert {c[0] for c in CASES} == set(CHECKS) and len(CHECKS) == 25


def test_loosely():
    record = {"instruction_id_list": ["startend:quotation", "keywords:existence"], "kwargs": [{}, {"keywords": ["x"]}]}
    text = 'Sure, here it is:\n"a quote"\nHope it helps'
    assert followed(text, record) == [False, False]
    assert followed_loosely(text, record) == [True, False]
    assert followed_loosely("*y*\nx", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}) == [True]


def test_sentences():
    text = 'Mr. A. Bee came at 3.5 p.m. today! "Really?" he asked... Yes, e.g. so.\nAnd so on'
    assert len(sentences(text)) == 5, sentences(text)
    assert sentences("") == [] and sentences("no end") == ["no end"]


def test_rewards():
    record = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
    assert IFEval()("no comma", record) == 0.5
    assert IFEval(level="prompt")("no comma", record) == 0.0
    assert IFEval()('first\n"a quote"', record) == 0.5 and IFEval(loose=True)('first\n"a quote"', record) == 1.0
    assert IFEval(level="prompt")('"none"', record) == 1.0


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "needs 'instruction_id_list' and 'kwargs'"),
        ({"instruction_id_list": ["punctuation:no_coma"], "kwargs": [{}]}, "did you mean 'punctuation:no_comma'"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [3]}, "must be an object"),
        ({"instruction_id_list": ["startend:end_checker"], "kwargs": [{}]}, "startend:end_checker: missing 1 required"),
        ({"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": 3, "relation": "most"}]},
         "relation must be"),
    ],
)  # fmt: skip
def test_records_that_cannot_be_checked(record, message):
    with pytest.raises(DataError, match=message):
        followed("text", record)


def test_without_langdetect_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ConfigError, match=r"pip install 'mortice\[eval\]'"):
        language("text")


def test_the_task_counts_prompts_and_instructions(tmp_path):
    rows = [{"prompt": "a", "instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]},
            {"prompt": "b", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}]  # fmt: skip
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Task(file=tmp_path / "f.jsonl")
    first, second = task.problems("test", 0)
    scores = [task.check("no quote", first), task.check("fine", second)]
    means = {name: sum(values) / len(values) for name, values in task.summary(scores).items()}
    assert means == {
        "prompt_strict": 0.5, "prompt_loose": 0.5, "instruction_strict": pytest.approx(2 / 3),
        "instruction_loose": pytest.approx(2 / 3),
    }  # fmt: skip


@pytest.fixture(scope="module")
def published():
    """The evaluation as lm-evaluation-harness keeps it, without the model that it tells sentences apart by."""
    nltk = pytest.importorskip("nltk")
    pytest.importorskip("immutabledict")
    try:
        files = metadata.files("lm-eval") or []
    except metadata.PackageNotFoundError:
        pytest.skip("lm-eval is not installed")
    place = next(f.locate().parent for f in files if str(f) == "lm_eval/tasks/ifeval/utils.py")
    held = dict(sys.modules)
    nltk.data.find = lambda *_: None
    nltk.word_tokenize = nltk.tokenize.NLTKWordTokenizer().tokenize
    for package in ("lm_eval", "lm_eval.tasks", "lm_eval.tasks.ifeval"):  # the packages themselves import the world
        sys.modules[package] = ModuleType(package)
    sys.modules["lm_eval.tasks.ifeval"].__path__ = [str(place)]
    importlib.import_module("lm_eval.tasks.ifeval.utils")
    module = sys.modules["lm_eval.tasks.ifeval.instructions_util"]
    module.count_sentences = lambda text: len(sentences(text))
    yield sys.modules["lm_eval.tasks.ifeval.utils"]
    for name in set(sys.modules) - set(held):
        if name.startswith("lm_eval"):
            del sys.modules[name]


def texts(record: dict, draw: random.Random) -> list[str]:
    """Answers of many shapes, of which some follow some of the instructions."""
    words = draw.choices(["word", "Word", "WORD", "a", "the", "*bold*", "**so**", "[name]", "e.g.", "x,", "end."], k=40)
    plain = " ".join(words)
    own = [str(v) for kwargs in record["kwargs"] for v in kwargs.values() if isinstance(v, str)]
    lists = [w for kwargs in record["kwargs"] for v in kwargs.values() if isinstance(v, list) for w in v]
    n = draw.randint(1, 8)
    return [
        plain, plain.upper(), plain.lower(), f'"{plain}"', f"<<title>>\n{plain}\nP.S. more\nP.P.S even more",
        "\n\n".join([plain] * n), "\n***\n".join([plain] * n), f"{plain}\n******\n{plain} too",
        "\n".join(f"* {w}" for w in words[:n]), "\n".join(f"- {w}" for w in words[:n]),
        "\n".join(f"SECTION {i}\n{plain}" for i in range(n)), '```json\n{"a": 1}\n```', "My answer is maybe.",
        " ".join([*lists, plain, *own]), "\n\n".join([*own, plain]), f"{record['prompt']}\n{plain}",
        " ".join(words * 20),
        GERMAN, "", "\n",
    ]  # fmt: skip


@pytest.mark.oracle
def test_verdicts_equal_the_published_ones(shared, published):
    """On every prompt of IFEval, for twenty answers each, strictly and loosely."""
    rows = [json.loads(line) for line in (shared / "data" / "ifeval.jsonl").read_text("utf-8").splitlines()]
    import langdetect

    langdetect.DetectorFactory.seed = 0
    draw, compared, yes = random.Random(0), 0, 0
    for row in rows[::3]:
        asked = published.InputExample(row["key"], row["instruction_id_list"], row["prompt"], row["kwargs"])
        for text in texts(row, draw):
            strict = published.test_instruction_following_strict(asked, text).follow_instruction_list
            loose = published.test_instruction_following_loose(asked, text).follow_instruction_list
            assert followed(text, row) == strict, (row["instruction_id_list"], row["kwargs"], text)
            assert followed_loosely(text, row) == loose, (row["instruction_id_list"], row["kwargs"], text)
            compared, yes = compared + len(strict), yes + sum(strict)
    assert compared > 5000 and 0.1 < yes / compared < 0.9


def test_all_published_prompts_can_be_checked(shared):
    rows = [json.loads(line) for line in (shared / "data" / "ifeval.jsonl").read_text("utf-8").splitlines()]
    names = {name for row in rows for name, _ in instructions(row)}
    assert names == set(CHECKS)
    for row in rows:
        if "language:response_language" not in row["instruction_id_list"]:
            assert len(followed("An answer, of some length.", row)) == len(row["instruction_id_list"])

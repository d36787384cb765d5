"""Records to token ids: where prompts end, what is scored, what ends an answer."""

from __future__ import annotations

import itertools
import json

import pytest
from tiny_tokenizers import BARE_HISTORY, CHATML, NO_END, NO_SYSTEM, THINKING, TOOLS, text, tokenizer

from mortice.errors import DataError
from mortice_plugins.formats.chat import Chat
from mortice_plugins.formats.completion import CompletionFormat
from mortice_plugins.formats.preference import Preference
from mortice_plugins.formats.text import Text

TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "second"},
]


def scored(tok, group, k: int = 0) -> list[str]:
    """Stretches of scored text of a completion."""
    completion = group.completions[k]
    pairs = itertools.groupby(zip(completion.ids, completion.loss_mask), key=lambda p: p[1])
    return [text(tok, [i for i, _ in stretch]) for kept, stretch in pairs if kept]


def whole(tok, group, k: int = 0) -> str:
    return text(tok, [*group.prompt_of(k), *group.completions[k].ids])


def test_a_preference_record_scores_both_final_turns():
    tok = tokenizer()
    group = Preference()({"prompt": TURNS[:-1], "chosen": "yes", "rejected": "no"}, tok, source="f:1").group
    assert text(tok, group.prompt_ids) == tok.apply_chat_template(TURNS[:-1], add_generation_prompt=True)
    assert [scored(tok, group, k) for k in (0, 1)] == [["yes<|im_end|>"], ["no<|im_end|>"]]
    assert group.pairs == ((0, 1),)
    assert group.one_prompt


def test_preference_conversations_share_what_they_begin_with():
    tok = tokenizer()
    chosen = [*TURNS[:4], {"role": "assistant", "content": "yes"}]
    rejected = [*TURNS[:4], {"role": "assistant", "content": "no"}]
    group = Preference()({"chosen": chosen, "rejected": rejected}, tok, source="f:1").group
    split = Preference()({"prompt": TURNS[:4], "chosen": chosen[4:], "rejected": rejected[4:]}, tok, source="f:1").group
    assert (group.prompt_ids, group.completions) == (split.prompt_ids, split.completions)
    with pytest.raises(DataError, match="share no first message"):
        Preference()({"chosen": chosen, "rejected": rejected[1:]}, tok, source="f:1")


def test_a_prompt_that_both_answers_repeat_is_read_once():
    tok = tokenizer()
    chosen, rejected = conversation("hi", "yes"), conversation("hi", "no")
    group = Preference()({"prompt": "hi", "chosen": chosen, "rejected": rejected}, tok, source="f:1").group
    plain = Preference()({"prompt": "hi", "chosen": "yes", "rejected": "no"}, tok, source="f:1").group
    assert (group.prompt_ids, group.completions) == (plain.prompt_ids, plain.completions)


def test_turns_before_the_final_one_are_read_not_preferred():
    """The sides part before their final turns: each final turn follows its own prompt."""
    tok = tokenizer()
    chosen, rejected = conversation("hi", "one", "go", "yes"), conversation("hi", "two", "go", "no")
    group = Preference()({"chosen": chosen, "rejected": rejected}, tok, source="f:1").group
    assert [scored(tok, group, k) for k in (0, 1)] == [["yes<|im_end|>"], ["no<|im_end|>"]]
    assert not group.one_prompt
    for k, turns in enumerate((chosen, rejected)):
        assert whole(tok, group, k) + "\n" == tok.apply_chat_template(turns)


def test_every_assistant_turn_of_a_chat_is_scored():
    tok = tokenizer()
    group = Chat()({"messages": TURNS}, tok, source="f:1").group
    assert scored(tok, group) == ["first<|im_end|>", "second<|im_end|>"]
    assert text(tok, group.prompt_ids).endswith("<|im_start|>assistant\n")
    assert whole(tok, group) + "\n" == tok.apply_chat_template(TURNS)
    last = Chat(train_on="last")({"messages": TURNS}, tok, source="f:1").group
    assert scored(tok, last) == ["second<|im_end|>"]
    assert whole(tok, last) == whole(tok, group)


def conversation(*contents):
    """User and assistant by turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize("template", [CHATML, THINKING], ids=["chatml", "thinking"])
@pytest.mark.parametrize(
    "turns",
    [("say first", "first", "second two", "second"), ("hi", "e", "start", "im"), ("q", "", "r", "x")],
    ids=["in-the-question", "in-the-end-token", "empty"],
)
def test_an_answer_is_its_own_turn_wherever_its_text_stands_too(template, turns):
    tok = tokenizer(template)
    group = Chat()({"messages": conversation(*turns)}, tok, source="f:1").group
    assert scored(tok, group) == [f"{turns[1]}<|im_end|>", f"{turns[3]}<|im_end|>"]
    assert whole(tok, group) + "\n" == tok.apply_chat_template(conversation(*turns))


def test_an_answer_that_the_template_trims_is_not_sought_in_later_turns():
    tok = tokenizer(CHATML.replace("m['content']", "m['content'] | trim"))
    group = Chat()({"messages": conversation("q", "ok ", "say ok then", "b")}, tok, source="f:1").group
    assert scored(tok, group) == ["ok<|im_end|>", "b<|im_end|>"]


def test_what_a_template_prints_behind_the_end_is_not_learned():
    tok = tokenizer(CHATML + "{% if not add_generation_prompt %}</s>{% endif %}")
    group = Preference()({"prompt": "hi", "chosen": "end", "rejected": "s"}, tok, source="f:1").group
    assert [scored(tok, group, k) for k in (0, 1)] == [["end<|im_end|>"], ["s<|im_end|>"]]


def test_turns_that_a_template_strips_are_refused():
    tok = tokenizer(BARE_HISTORY)
    group = Chat()({"messages": conversation("q", "a", "r", "b")}, tok, source="f:1").group
    assert scored(tok, group) == ["a<|im_end|>", "<think>\n\n</think>\n\nb<|im_end|>"]
    reasoned = conversation("q", "<think>x</think>a", "r", "<think>y</think>b")
    with pytest.raises(DataError, match=r"turn 2 \(assistant\) cannot be found .* train_on = \"last\""):
        Chat()({"messages": reasoned}, tok, source="f:1")
    last = Chat(train_on="last")({"messages": reasoned}, tok, source="f:1").group
    assert scored(tok, last) == ["<think>y</think>b<|im_end|>"]


def test_tool_turns_are_read_and_calls_are_learned():
    tok = tokenizer(TOOLS)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "done"},
    ]
    group = Chat()({"messages": turns}, tok, source="f:1").group
    assert scored(tok, group) == ['<tool_call>{"x": 1}</tool_call><|im_end|>', "done<|im_end|>"]
    single = Chat()({"messages": turns[:2]}, tok, source="f:1").group
    assert scored(tok, single) == ['<tool_call>{"x": 1}</tool_call><|im_end|>']


def test_a_completion_of_several_messages_learns_the_calls_and_not_the_results():
    tok = tokenizer(TOOLS.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}"))
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    answer = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "done"},
    ]
    group = CompletionFormat()({"prompt": "go", "completion": answer}, tok, source="f:1").group
    assert scored(tok, group) == ['<tool_call>{"x": 1}</tool_call><|im_end|>', "done<|im_end|>"]
    single = CompletionFormat()({"prompt": "go", "completion": answer[:1]}, tok, source="f:1").group
    assert scored(tok, single) == ['<tool_call>{"x": 1}</tool_call><|im_end|>']


def test_messages_behind_the_last_assistant_turn_are_left_out():
    tok = tokenizer()
    group = Chat()({"messages": [*TURNS, {"role": "user", "content": "bye"}]}, tok, source="f:1").group
    assert "bye" not in whole(tok, group)
    with pytest.raises(DataError, match="no assistant turn"):
        Chat()({"messages": TURNS[:2]}, tok, source="f:1")


def test_sharegpt_records_are_read():
    tok = tokenizer()
    turns = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "first"}]
    assert scored(tok, Chat()({"conversations": turns}, tok, source="f:1").group) == ["first<|im_end|>"]


def test_the_boundary_where_prompt_and_answer_would_merge():
    """':' and 'y' are one token in the whole text: the model that is given ':' could not write it."""
    tok = tokenizer(None, merges=((":", "y"),))
    assert len(tok.encode("a:yes")) == 4
    group = CompletionFormat()({"prompt": "a:", "completion": "yes"}, tok, source="f:1").group
    assert list(group.prompt_ids) == tok.encode("a:")
    assert whole(tok, group) == "a:yes<|im_end|>"
    assert scored(tok, group) == ["yes<|im_end|>"]
    pair = Preference()({"prompt": "a:", "chosen": "yes", "rejected": "no"}, tok, source="f:1").group
    assert pair.one_prompt


def test_a_chat_keeps_its_boundaries_where_line_breaks_would_merge():
    """Byte-level vocabularies hold two line breaks as one token: the header's and the answer's first."""
    tok = tokenizer(merges=(("Ċ", "Ċ"),))
    group = Chat()({"messages": conversation("q", "\nfoo", "r", "\nbar")}, tok, source="f:1").group
    assert list(group.prompt_ids) == tok.render_prompt(conversation("q"))
    assert scored(tok, group) == ["\nfoo<|im_end|>", "\nbar<|im_end|>"]


def test_a_merge_inside_the_answer_stays():
    tok = tokenizer(None, merges=(("y", "e"),))
    group = CompletionFormat()({"prompt": "a:", "completion": "yes"}, tok, source="f:1").group
    assert len(group.completions[0].ids) == 3  # ye s <end>


def test_a_generation_prompt_that_is_no_prefix_of_the_conversation():
    tok = tokenizer(THINKING)
    group = Preference()({"prompt": "hi", "chosen": "yes", "rejected": "no"}, tok, source="f:1").group
    assert text(tok, group.prompt_ids).endswith("<think>\n\n</think>\n\n")
    assert list(group.prompt_ids) == tok.render_prompt([{"role": "user", "content": "hi"}])
    assert [scored(tok, group, k) for k in (0, 1)] == [["yes<|im_end|>"], ["no<|im_end|>"]]
    chat = Chat()({"messages": TURNS}, tok, source="f:1").group
    assert scored(tok, chat) == ["first<|im_end|>", "second<|im_end|>"]


def test_an_answer_that_repeats_the_prompt_is_the_last_one():
    tok = tokenizer(THINKING)
    group = Preference()({"prompt": "yes", "chosen": "yes", "rejected": "user"}, tok, source="f:1").group
    assert [scored(tok, group, k) for k in (0, 1)] == [["yes<|im_end|>"], ["user<|im_end|>"]]


def test_a_template_without_an_end_gets_the_eos():
    tok = tokenizer(NO_END, eos="</s>")
    group = Preference()({"prompt": "hi", "chosen": "yes", "rejected": "no"}, tok, source="f:1").group
    assert [scored(tok, group, k) for k in (0, 1)] == [["yes</s>"], ["no</s>"]]


def test_case_b09_eos_is_scored_although_it_is_the_pad_token():
    """Masks come from lengths: 3 and 7 answer tokens are 4 and 8 scored ones."""
    tok = tokenizer(None, eos="</s>", pad="</s>")
    for answer in ("abc", "abcdefg"):
        group = CompletionFormat()({"prompt": "q", "completion": answer}, tok, source="f:1").group
        assert sum(group.completions[0].loss_mask) == len(answer) + 1
        assert group.completions[0].ids[-1] == tok.eos_id == tok.pad_id


@pytest.mark.parametrize("template", [None, CHATML, NO_END, THINKING], ids=["raw", "chatml", "no-end", "thinking"])
def test_case_b04_an_empty_answer_scores_its_end(template):
    tok = tokenizer(template)
    group = CompletionFormat()({"prompt": "hi", "completion": ""}, tok, source="f:1").group
    assert group.completions[0].ids == (tok.eos_id,)
    assert group.completions[0].loss_mask == (True,)


def test_system_messages_can_be_kept_merged_or_dropped():
    tok = tokenizer(NO_SYSTEM)
    record = {"prompt": TURNS[:2], "chosen": "yes", "rejected": "no"}
    with pytest.raises(DataError, match="System role not supported"):
        Preference()(record, tok, source="f:1")
    merged = Preference(system="merge")(record, tok, source="f:1").group
    assert "user\nbe kind\n\none<|im_end|>" in text(tok, merged.prompt_ids)
    dropped = Preference(system="drop")(record, tok, source="f:1").group
    assert "be kind" not in text(tok, dropped.prompt_ids)
    own = Chat()({"system": "be brief", "messages": TURNS[1:3]}, tokenizer(), source="f:1").group
    assert "system\nbe brief" in text(tok, own.prompt_ids)


def test_strings_stay_raw_where_the_run_says_so():
    tok = tokenizer(eos="</s>")
    group = CompletionFormat(template="none")({"prompt": "a ", "completion": "b"}, tok, source="f:1").group
    assert whole(tok, group) == "a b</s>"
    assert "<|im_start|>" in whole(
        tok, CompletionFormat()({"prompt": "a ", "completion": "b"}, tok, source="f:1").group
    )


def test_raw_text_is_scored_whole():
    tok = tokenizer(eos="</s>")
    group = Text()({"text": "abc"}, tok, source="f:1").group
    assert (text(tok, group.prompt_ids), scored(tok, group)) == ("a", ["bc</s>"])
    bos = Text()({"text": "abc"}, tokenizer(adds_bos=True, eos="</s>"), source="f:1").group
    assert (text(tok, bos.prompt_ids), scored(tok, bos)) == ("<s>", ["abc</s>"])


def test_a_weight_travels_with_the_record():
    tok = tokenizer()
    record = {"prompt": "a", "chosen": "b", "rejected": "c", "weight": 0.5}
    assert [c.weight for c in Preference()(record, tok, source="f:1").group.completions] == [0.5, 0.5]
    for bad in (True, "1", -1, float("inf")):
        with pytest.raises(DataError, match="'weight' must be a number of 0 or more"):
            Preference()(record | {"weight": bad}, tok, source="f:1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": 3}, "'prompt' must be a string or a list of messages, found the number 3"),
        ({"prompt": None}, "'prompt' must be a string or a list of messages, found null"),
        ({"prompt": [{"role": "usr", "content": "x"}]}, r"prompt\[0\].role is 'usr'"),
        ({"prompt": [{"role": "user"}]}, r"prompt\[0\].content must be text, found null"),
        ({"prompt": ["x"]}, r"prompt\[0\] must be a message, found a string"),
        ({"chosen": [{"role": "user", "content": "a"}]}, r"'chosen' must end with an assistant turn, found \['user'\]"),
        ({"prompt": [{"role": "user", "content": "x", "tool_calls": 3}]}, "tool_calls must be a list of objects"),
        ({"system": 3}, "'system' must be a string, found the number 3"),
        ({"tools": {}}, "'tools' must be a list of objects, found an object"),
    ],
)
def test_malformed_records_say_what_was_found(change, message):
    with pytest.raises(DataError, match=message):
        Preference()({"prompt": "x", "chosen": "a", "rejected": "b"} | change, tokenizer(), source="f:1")


@pytest.mark.parametrize(("file", "form"), [("preference_en", Preference()), ("instructions_en", Chat())])
def test_real_data_comes_back_as_the_template_prints_it(shared, file, form):
    tok = tokenizer()
    for line in (shared / "data" / f"{file}.jsonl").read_text("utf-8").splitlines():
        record = json.loads(line)
        group = form(record, tok, source="f").group
        prompt = record.get("prompt", [])
        for k, key in enumerate(("chosen", "rejected") if "chosen" in record else ("messages",)):
            assert whole(tok, group, k) + "\n" == tok.apply_chat_template([*prompt, *record[key]])
            assert all(stretch.endswith("<|im_end|>") for stretch in scored(tok, group, k))

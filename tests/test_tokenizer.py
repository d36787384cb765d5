"""The tokenizer: special tokens, templates, one BOS, and what templates do with tools."""

from __future__ import annotations

import json

import pytest
from tiny_tokenizers import CHATML, NO_SYSTEM, TOOLS, WITH_BOS, tokenizer

from mortice.errors import CheckpointError, ConfigError, DataError
from mortice.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]


def test_text_comes_back():
    tok = tokenizer()
    for text in ("plain", "😀 and e\u0301", " lead", "tab\tnew\nline", "日本語"):
        assert tok.decode(tok.encode(text)) == text


def test_case_b03_half_a_character_is_named():
    with pytest.raises(DataError, match=r"lone surrogate \('\\ud83d' at character 3\)"):
        tokenizer().encode("ab \ud83d")


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [CHATML, WITH_BOS], ids=["plain", "with-bos"])
def test_case_b08_exactly_one_bos(template, adds_bos):
    """In chat text the template decides; in raw text there is one BOS where the tokenizer adds one."""
    from mortice_plugins.formats.chat import Chat
    from mortice_plugins.formats.completion import CompletionFormat
    from mortice_plugins.formats.preference import Preference
    from mortice_plugins.formats.text import Text

    tok = tokenizer(template, adds_bos=adds_bos)
    assert tok.adds_bos is adds_bos
    prompt = tok.render_prompt(USER)
    chat = Chat()({"messages": [*USER, {"role": "assistant", "content": "yo"}]}, tok, source="x").group
    pair = Preference()({"prompt": USER, "chosen": "yo", "rejected": "no"}, tok, source="x").group
    completion = CompletionFormat()({"prompt": "hi", "completion": "yo"}, tok, source="x").group
    assert chat.prompt_ids == pair.prompt_ids == completion.prompt_ids == tuple(prompt)
    assert prompt.count(tok.bos_id) == (template == WITH_BOS)
    raw = Text()({"text": "hi"}, tok, source="x").group
    assert [*raw.prompt_ids, *raw.completions[0].ids].count(tok.bos_id) == adds_bos
    plain = CompletionFormat(template="none")({"prompt": "hi", "completion": "yo"}, tok, source="x").group
    assert plain.prompt_ids.count(tok.bos_id) == adds_bos


def test_a_bos_in_the_text_is_not_doubled():
    tok = tokenizer(adds_bos=True)
    assert tok.encode("<s>hi", add_special=True).count(tok.bos_id) == 1


def test_case_b11_arguments_are_objects_and_null_is_no_text():
    tok = tokenizer(TOOLS)
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"location": "Zürich"}'}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    schema = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    text = tok.apply_chat_template(messages, tools=schema)
    assert '<tool_call>{"location": "Zürich"}</tool_call>' in text
    assert '\\"' not in text
    assert "None" not in text
    assert '"name": "weather"' in text
    broken = [{**messages[1], "tool_calls": [{"function": {"name": "weather", "arguments": "{"}}]}]
    with pytest.raises(DataError, match="tool call 'weather': arguments are not JSON"):
        tok.apply_chat_template(broken)


def test_case_b11_calls_without_arguments_and_without_a_wrapper():
    silent = {"function": {"name": "now", "arguments": ""}}
    assert "<tool_call>{}</tool_call>" in tokenizer(TOOLS).apply_chat_template(
        [{"role": "assistant", "tool_calls": [silent]}]
    )
    flat = {"name": "weather", "arguments": '{"location": "Zürich"}'}
    tok = tokenizer("{{ messages[0].tool_calls[0].arguments | tojson(separators=(',', ':')) }}")
    assert tok.apply_chat_template([{"role": "assistant", "tool_calls": [flat]}]) == '{"location":"Zürich"}'


def test_case_b11_a_template_that_refuses_the_system_role_says_the_ways_out():
    tok = tokenizer(NO_SYSTEM)
    with pytest.raises(DataError, match=r'System role not supported; set system = "merge" .* or system = "drop"'):
        tok.apply_chat_template([{"role": "system", "content": "be kind"}, *USER])


def test_templates_run_in_a_sandbox():
    with pytest.raises(DataError, match="refuses"):
        tokenizer("{{ ''.__class__.__mro__[1].__subclasses__() }}").apply_chat_template(USER)
    with pytest.raises(DataError, match="refuses"):
        tokenizer("{{ messages.append(1) }}").apply_chat_template(USER)


def test_templates_may_use_what_hugging_face_gives_them():
    template = (
        "{% for m in messages %}{% if loop.index0 > 0 %}{% break %}{% endif %}{{ {'a': 'é'} | tojson }}"
        "{% generation %}{{ m.content }}{% endgeneration %}{{ strftime_now('%Y') | length }}{% endfor %}"
    )
    assert tokenizer(template).apply_chat_template([*USER, *USER]) == '{"a": "é"}hi4'


def test_without_a_template_chat_is_refused():
    with pytest.raises(DataError, match="has no chat template"):
        tokenizer(None).apply_chat_template(USER)


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    tokenizer(None).backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_case_b51_every_declared_end_counts(tmp_path):
    folder = write(
        tmp_path, tokenizer_config__json={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>"},
        generation_config__json={"eos_token_id": [257, 259]},
    )  # fmt: skip
    tok = Tokenizer.load(folder)
    assert tok.eos_ids == (257, 259)
    assert tok.eos_id == 259
    assert (tok.bos_id, tok.pad_id) == (256, None)
    only_config = write(tmp_path / "b", config__json={"eos_token_id": 257})
    assert (Tokenizer.load(only_config).eos_ids, Tokenizer.load(only_config).eos_id) == ((257,), 257)


def test_templates_are_found_where_checkpoints_keep_them(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    one = {"chat_template": "one"}
    ways = {
        "one": {"tokenizer_config__json": one},
        "plain": {"tokenizer_config__json": {"chat_template": named}},
        "file": {"chat_template__jinja": "file", "tokenizer_config__json": one},
        "json": {"chat_template__json": {"chat_template": "json"}},
        None: {},
    }
    for template, files in ways.items():
        found = Tokenizer.load(write(tmp_path / str(template), **files))
        assert (found.template, found.has_template) == (template, template is not None)


def test_damaged_tokenizer_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json not found$"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(
        CheckpointError, match=r"there is tokenizer\.model: load .* with transformers and save it again"
    ):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: "):
        Tokenizer.load(tmp_path)
    folder = write(tmp_path / "x", tokenizer_config__json="{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: "):
        Tokenizer.load(folder)


def test_a_long_text_is_not_cut_by_the_file(tmp_path):
    backend = tokenizer(None).backend
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("a" * 20)) == 20


def test_named_templates_in_files_of_their_own(tmp_path):
    folder = write(tmp_path, chat_template__jinja="plain", tokenizer_config__json={"chat_template": "older"})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    found = Tokenizer.load(folder)
    assert (found.template, dict(found.templates)) == ("plain", {"default": "plain", "tool_use": "tools"})


def test_another_template_and_what_it_is_given(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "think", "template": "{{ enable_thinking }}"}]
    found = Tokenizer.load(write(tmp_path, tokenizer_config__json={"chat_template": named}))
    assert found.using().apply_chat_template(USER) == "plain"
    assert found.using("think", {"enable_thinking": False}).apply_chat_template(USER) == "False"
    (tmp_path / "mine.jinja").write_text("mine")
    assert found.using(str(tmp_path / "mine.jinja")).apply_chat_template(USER) == "mine"
    with pytest.raises(
        ConfigError, match=r"'thunk' is neither of this checkpoint \(default, think\) nor a file; did you mean 'think'"
    ):
        found.using("thunk")


@pytest.mark.parametrize("value", [[{"name": "a"}], 5, ["text"]])
def test_templates_of_another_form_are_refused(tmp_path, value):
    folder = write(tmp_path, tokenizer_config__json={"chat_template": value})
    with pytest.raises(CheckpointError, match="neither text nor a list of names and templates"):
        Tokenizer.load(folder)

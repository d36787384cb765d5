"""Text to token ids and back, with the checkpoint's own tokenizer, chat template and special tokens.

Reads `tokenizer.json`, `tokenizer_config.json`, `generation_config.json`, `config.json` and the chat template
(`chat_template.jinja`, `chat_template.json`, or a key of tokenizer_config). Templates run in a Jinja sandbox.

Beginning of sequence: in chat text the template decides, and nothing is added to what it prints; in raw text there is
exactly one BOS where the tokenizer itself adds one, and none where it does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from attrs import define, evolve, field, frozen

from mortice.errors import CheckpointError, ConfigError, DataError, suggest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Message = Mapping[str, Any]
DEFAULT = "default"


@frozen
class Encoded:
    """Token ids and, for each, where its text begins and ends."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote; templates carry it, mortice finds the turns by itself."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """Hugging Face's `tojson`: unlike Jinja's own it escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@define(eq=False, slots=False)
class Tokenizer:
    """A tokenizer with its template. Made by `Tokenizer.load`."""

    backend: Any
    """A `tokenizers.Tokenizer`."""
    special: Mapping[str, str] = field(factory=dict)
    """`bos_token`, `eos_token`, `pad_token`, `unk_token` as text."""
    eos_ids: tuple[int, ...] = ()
    """Every id that ends a sequence, as the checkpoint declares them."""
    template: str | None = None
    """The one in force."""
    templates: Mapping[str, str] = field(factory=dict)
    """Every template of the checkpoint by name; `default` is taken unless another one is asked for."""
    path: Path | None = None
    variables: Mapping[str, Any] = field(factory=dict)
    """Passed to every rendering of the template (`enable_thinking`, …)."""

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a model folder. Raises CheckpointError for a missing or damaged file."""
        from tokenizers import Tokenizer as Backend

        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.exists():
            others = [
                n for n in ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model") if (folder / n).exists()
            ]
            raise CheckpointError(
                f"{file.absolute()} not found"
                + (f"; there is {others[0]}: load the tokenizer with transformers and save it again" if others else "")
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{file}: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        options = _read(folder / "tokenizer_config.json")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: text for name in names if (text := _text(options.get(name)))}
        declared = _eos_ids(_read(folder / "generation_config.json")) or _eos_ids(_read(folder / "config.json"))
        own = backend.token_to_id(special.get("eos_token", ""))
        eos_ids = tuple(dict.fromkeys([*declared, *([] if own is None else [own])]))
        if "eos_token" not in special and eos_ids:
            special["eos_token"] = backend.id_to_token(eos_ids[0]) or ""
        templates = _templates(folder, options)
        chosen = templates.get(DEFAULT) or next(iter(templates.values()), None)
        return cls(backend, special, eos_ids, chosen, templates, folder)

    def using(self, template: str | None = None, variables: Mapping[str, Any] | None = None) -> Tokenizer:
        """The same with another template, one of `templates` or a `.jinja` file, and variables that it is given.

        Raises ConfigError for a template that is not there.
        """
        chosen = self.template
        if template is not None:
            chosen = self.templates.get(template)
            file = Path(template).expanduser()
            if chosen is None and file.is_file():
                chosen = file.read_text("utf-8")
            if chosen is None:
                have = ", ".join(self.templates) or "none"
                near = suggest(template, self.templates)
                raise ConfigError(f"chat template {template!r} is neither of this checkpoint ({have}) nor a file{near}")
        return evolve(self, template=chosen, variables=dict(self.variables) | dict(variables or {}))

    def _id(self, name: str) -> int | None:
        return self.backend.token_to_id(self.special[name]) if name in self.special else None

    @property
    def bos_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The one that is appended where no template ends an answer."""
        own = self._id("eos_token")
        return own if own is not None else (self.eos_ids[0] if self.eos_ids else None)

    @property
    def pad_id(self) -> int | None:
        return self._id("pad_token")

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Every id that is no text: special tokens, and all that end a sequence."""
        added = self.backend.get_added_tokens_decoder().items()
        return frozenset(i for i, token in added if token.special) | frozenset(self.eos_ids)

    @cached_property
    def adds_bos(self) -> bool:
        """Whether the tokenizer itself begins a text with BOS."""
        return self.bos_id is not None and list(self.backend.encode("a").ids[:1]) == [self.bos_id]

    @property
    def has_template(self) -> bool:
        return self.template is not None

    def differences(self, other: Tokenizer) -> str:
        """How many tokens have another id in another tokenizer, with one of them; empty where all ids mean the same."""
        own, theirs = (t.backend.get_vocab(with_added_tokens=True) for t in (self, other))
        differing = sorted(token for token in {**own, **theirs} if own.get(token) != theirs.get(token))
        if not differing:
            return ""
        here, there = (ids.get(differing[0], "unknown") for ids in (own, theirs))
        return f"{len(differing)} tokens differ: {differing[0]!r} is {here} here and {there} there"

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of raw text; with `add_special`, one BOS in front where the tokenizer adds one.

        Raises DataError for text that is no Unicode (a lone surrogate).
        """
        ids = list(self.encode_offsets(text).ids)
        if add_special and self.adds_bos and ids[:1] != [self.bos_id]:
            assert self.bos_id is not None
            ids.insert(0, self.bos_id)
        return ids

    def encode_offsets(self, text: str) -> Encoded:
        """Token ids without any that the tokenizer would add, and the span of text of each."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"text holds a lone surrogate ({text[error.start]!a} at character {error.start}): half of a character"
            ) from error
        found = self.backend.encode(text, add_special_tokens=False)
        return Encoded(tuple(found.ids), tuple(found.offsets))

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """A conversation as the model reads it.

        Tool calls whose `arguments` are JSON text are given to the template as objects, and a content of null as an
        empty string. Raises DataError with the template's own message where it refuses the conversation.
        """
        if self.template is None:
            raise DataError("this checkpoint has no chat template; give prompt and completion as plain strings")
        prepared = [_prepared(message) for message in messages]
        try:
            return self._compiled.render(
                messages=prepared, tools=list(tools) if tools else None, add_generation_prompt=add_generation_prompt,
                **self._special_variables, **self.variables,
            )  # fmt: skip
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise DataError(_refusal(error, messages)) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        assert self.template is not None
        try:
            return _environment().from_string(self.template)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{self.path}: the chat template cannot be read: {error}") from error

    @cached_property
    def _special_variables(self) -> dict[str, str]:
        return {"bos_token": "", "eos_token": ""} | dict(self.special)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of a conversation up to where the model answers: the same in training, sampling and `generate`."""
        return list(
            self.encode_offsets(self.apply_chat_template(messages, tools=tools, add_generation_prompt=True)).ids
        )


def _prepared(message: Message) -> dict[str, Any]:
    out = dict(message)
    if out.get("content") is None:
        out["content"] = ""
    if out.get("tool_calls"):
        out["tool_calls"] = [_call(call) for call in out["tool_calls"]]
    return out


def _call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAI's records hold a call's arguments as JSON text; templates want the object."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"])}
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        return {**call, "arguments": json.loads(call["arguments"] or "{}")}
    except ValueError as error:
        raise DataError(f"tool call {call.get('name')!r}: arguments are not JSON: {error}") from error


def _refusal(error: Exception, messages: Sequence[Message]) -> str:
    text = f"the chat template refuses this conversation: {error}"
    if any(message.get("role") == "system" for message in messages) and "system" in str(error).lower():
        text += '; set system = "merge" in [data] (into the first user turn) or system = "drop"'
    return text


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token


def _eos_ids(config: Mapping[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _templates(folder: Path, options: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, as transformers finds them: files of their own (`chat_template.jinja`, and named ones in
    `additional_chat_templates`) before the keys in chat_template.json and tokenizer_config.json."""
    files = {DEFAULT: folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found = {name: file.read_text("utf-8") for name, file in files.items() if file.is_file()}
    if found:
        return found
    value = _read(folder / "chat_template.json").get("chat_template") or options.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{folder}: chat_template is neither text nor a list of names and templates") from error

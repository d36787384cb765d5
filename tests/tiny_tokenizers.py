"""Byte-level tokenizers with chat templates, small enough to read."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from mortice.tokenizer import Tokenizer

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
THINKING = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
"""The prompt opens with an empty think block that the conversation does not show."""
BARE_HISTORY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last and '</think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The last turn shows a think block, turns before it do not."""
NO_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""No token ends a turn."""
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function']['arguments'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(
    template: str | None = CHATML, *, merges: tuple[tuple[str, str], ...] = (), adds_bos: bool = False,
    eos: str = "<|im_end|>", eos_ids: tuple[str, ...] = (), pad: str | None = None,
) -> Tokenizer:  # fmt: skip
    """Bytes as tokens, with merges where a test wants them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, *("".join(m) for m in merges)])}
    backend = Backend(models.BPE(vocab, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    if adds_bos:
        bos = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
    special = {"bos_token": "<s>", "eos_token": eos, **({"pad_token": pad} if pad else {})}
    ids = tuple(backend.token_to_id(t) for t in (eos, *eos_ids))
    return Tokenizer(backend, special, ids, template)


def text(tokenizer: Tokenizer, ids) -> str:
    return tokenizer.decode(ids)

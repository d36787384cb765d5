"""Complete runs on a tiny model: a folder with model, tokenizer, data and run file, and plugins of a test's own."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
from tiny_llama import checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mortice.config import RunConfig, load_config
from mortice.hookspecs import HOOKS, hookimpl
from mortice.launch import train
from mortice.trainer import Outcome

WORDS = ["red", "green", "blue", "pink", "grey", "gold", "black", "white", "brown", "teal"]
RUN_FILE = """
[model]
path = "model"

[data]
format = "preference"
train = "train.jsonl"
valid = "valid.jsonl"
max_length = 64

[loss]
name = "orpo"

[adapter]
rank = 4

[optimizer]
learning_rate = 1e-2

[train]
steps = 3
batch_size = 4
"""


def write_tokenizer(folder: Path) -> None:
    """Bytes, and `<s>`, `</s>`, `<pad>` behind them: 259 ids, no template, no BOS of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<pad>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})
    )


def pairs(words: list[str]) -> list[dict[str, str]]:
    return [{"prompt": f"say {w}: ", "chosen": f"{w}!", "rejected": f"not {w}"} for w in words]


def write_lines(file: Path, records: list[Any]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def tiny_run(folder: Path, run_file: str = RUN_FILE) -> Path:
    """The run file of a folder that has everything: 10 pairs to train on and 3 held out."""
    checkpoint(folder / "model", vocab_size=272)
    write_tokenizer(folder / "model")
    write_lines(folder / "train.jsonl", pairs(WORDS))
    write_lines(folder / "valid.jsonl", pairs(["lime", "navy", "plum"]))
    (folder / "run.toml").write_text(run_file)
    return folder / "run.toml"


def plugin(kind: str, name: str, cls: type, **observers: Any) -> Any:
    """An entry point of a distribution `test-plugins` that registers one class."""
    module = ModuleType(name)

    @hookimpl
    def register_it(register):
        register(name, cls)

    setattr(module, HOOKS[kind], register_it)
    for hook, function in observers.items():
        setattr(module, hook, hookimpl(function))
    dist = SimpleNamespace(name="test-plugins", version="1")
    return SimpleNamespace(name=name, value=name, dist=dist, load=lambda: module)


def configure(file: Path, *settings: str, plugins: list[Any] | None = None, **strategies: str) -> RunConfig:
    points = [*metadata.entry_points(group="mortice"), *(plugins or [])]
    return load_config(file, settings=settings, strategies=strategies, entry_points=points)


def run(file: Path, *settings: str, plugins: list[Any] | None = None, **strategies: str) -> Outcome:
    return train(configure(file, *settings, plugins=plugins, **strategies))


def metrics(outcome: Outcome) -> list[dict[str, Any]]:
    """Lines of training steps."""
    lines = map(json.loads, (outcome.path / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def validations(outcome: Outcome) -> list[dict[str, Any]]:
    lines = map(json.loads, (outcome.path / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "valid/loss" in line]


def adapter(path: Path) -> dict[str, mx.array]:
    return mx.load(str(path / "adapters.safetensors"))


def same(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return set(a) == set(b) and all(mx.array_equal(a[name], b[name]) for name in a)


def apart(a: dict[str, mx.array], b: dict[str, mx.array]) -> float:
    return max(mx.abs(a[name] - b[name]).max().item() for name in a)

"""Prompt-heavy pairs out of a preference file, chosen by their lengths in tokens alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from mortice.batch import Completion, Group
from mortice.data import load_groups
from mortice.tables import DataOptions
from mortice.tokenizer import Tokenizer

PROMPT = (500, 1000)
"""Tokens of a prompt, both ends included."""
QUICK_PROMPT = (100, 200)
ANSWER = 100
"""Tokens that the longer answer should be near."""


@frozen
class Pair:
    """A pair in token ids, as both sides read it."""

    id: str
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def answer(self) -> list[int]:
        """What supervised fine-tuning learns: the answer whose length is nearest to `ANSWER`."""
        return min(self.chosen, self.rejected, key=lambda ids: abs(len(ids) - ANSWER))

    def group(self, objective: str) -> Group:
        """What mortice trains on: the pair, or for `sft` the one answer."""
        if objective == "sft":
            return Group(self.id, self.prompt, [Completion(self.answer)])
        return Group(self.id, self.prompt, [Completion(self.chosen), Completion(self.rejected)], ((0, 1),))

    def lengths(self) -> dict[str, Any]:
        return {
            "pair": self.id, "prompt": len(self.prompt), "chosen": len(self.chosen), "rejected": len(self.rejected),
            "learned by sft": len(self.answer),
        }  # fmt: skip


def select(groups: Iterable[Group], count: int, prompt: tuple[int, int] = PROMPT) -> list[Pair]:
    """The `count` pairs with prompts of `prompt` tokens whose longer answer is nearest to `ANSWER` tokens.

    Ties go by the order of the file. Raises ValueError where there are fewer.
    """
    low, high = prompt
    fit = [g for g in groups if g.pairs and g.one_prompt and low <= len(g.prompt_ids) <= high]
    fit.sort(key=lambda g: abs(max(len(c.ids) for c in g.completions) - ANSWER))
    if len(fit) < count:
        raise ValueError(f"{count} pairs asked for, {len(fit)} have prompts of {low} to {high} tokens")
    return [_pair(group) for group in fit[:count]]


def _pair(group: Group) -> Pair:
    chosen, rejected = group.pairs[0]
    answers = [list(group.completions[k].ids) for k in (chosen, rejected)]
    return Pair(group.id, list(group.prompt_ids), *answers)


def select_from(file: Path, model: Path, count: int, prompt: tuple[int, int] = PROMPT) -> list[Pair]:
    """`select` from a preference file, tokenized as mortice trains on it, nothing cut."""
    from benchmarks.losses import plugins

    form = plugins().get("data", "preference").load()()
    options = DataOptions(format="preference", max_length=10**9)
    groups, _ = load_groups(file, form, Tokenizer.load(model), options, name="preference")
    return select(groups, count, prompt)


def write(pairs: Sequence[Pair], file: Path) -> None:
    file.write_text(json.dumps([asdict(pair) | {"answer": pair.answer} for pair in pairs]))


def read(file: Path) -> list[Pair]:
    return [Pair(p["id"], p["prompt"], p["chosen"], p["rejected"]) for p in json.loads(file.read_text())]

"""GRPO learns: the run of examples/grpo-arithmetic, shorter. What it comes to in full is in docs/grpo.md."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "grpo-arithmetic" / "run.py"


def test_no_held_out_sum_is_trained_on(tmp_path):
    example = runpy.run_path(str(EXAMPLE))
    example["prepare"](tmp_path)
    parts = []
    for name in ("held_out.jsonl", "sft.jsonl", "grpo.jsonl"):
        prompts = [json.loads(line)["prompt"] for line in (tmp_path / name).read_text().splitlines()]
        parts.append({tuple(sorted(prompt.rstrip("=").split("+"))) for prompt in prompts})
    assert sum(map(len, parts)) == len(set.union(*parts)) == 90 * 91 // 2


@pytest.mark.slow
def test_rewards_alone_teach_to_add(tmp_path):
    """A fifth of the steps: half of what is missing at the start is learned, and the form stays."""
    example = runpy.run_path(str(EXAMPLE))
    example["learn_to_add"].__globals__["STEPS"] = 60
    example["prepare"](tmp_path)
    example["learn_the_form"](tmp_path, 0)
    example["learn_to_add"](tmp_path, 0)
    first, *_, last = example["held_out"](tmp_path, 0)
    most = example["MOST"]
    assert most - last["valid/reward"] < 0.5 * (most - first["valid/reward"])
    assert last["valid/reward/regex"] > 0.99

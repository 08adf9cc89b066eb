"""Adapters: what is served is what mlx-lm's own adapted model answers."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_cb.config import EngineConfig, ModelConfig
from mlx_cb.engine.core import EngineCore
from mlx_cb.errors import ModelNotFound, UnsupportedModel
from mlx_cb.model import loader
from mlx_cb.model.loader import load
from tests import tiny

LORA = {"rank": 4, "scale": 10.0, "dropout": 0.0}
TOKENS = mx.array([[1, 2, 3, 4]])


def write_adapter(folder: Path, kind: str, model: nn.Module) -> None:
    """Train nothing: random changes, saved as mlx_lm.lora saves them, and put into `model`."""
    model.freeze()
    linear_to_lora_layers(model, 2, LORA, use_dora=kind == "dora")
    changes = {}
    for name, array in tree_flatten(model.trainable_parameters()):
        noise = mx.random.normal(array.shape) * 0.1
        changes[name] = array + noise
    model.load_weights(list(changes.items()), strict=False)
    folder.mkdir()
    settings = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": LORA}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    mx.save_safetensors(str(folder / "adapters.safetensors"), changes)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapted_model_equals_mlx_lm(kind: str, tmp_path: Path) -> None:
    folder = tiny.save(tiny.llama_model(), tmp_path / "model")
    model = tiny.llama_model()
    plain = np.array(model(TOKENS))
    write_adapter(tmp_path / "adapter", kind, model)
    expected = np.array(model(TOKENS))
    assert np.abs(expected - plain).max() > 0.1
    loaded = load(ModelConfig(model=str(folder), adapter=str(tmp_path / "adapter")))
    np.testing.assert_allclose(np.array(loaded.model(TOKENS)), expected, atol=1e-3)
    assert not [name for name, _ in tree_flatten(loaded.model.parameters()) if "lora" in name]


def test_what_is_no_adapter_or_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = tiny.save(tiny.llama_model(), tmp_path / "model")
    with pytest.raises(ModelNotFound, match=r"has no adapter_config\.json"):
        load(ModelConfig(model=str(folder), adapter=str(tmp_path)))
    other = tiny.llama_model(hidden_size=96)
    write_adapter(tmp_path / "adapter", "lora", other)
    with pytest.raises(UnsupportedModel, match="does not fit the model"):
        load(ModelConfig(model=str(folder), adapter=str(tmp_path / "adapter")))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_on_quantized_weights_stays_beside_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Mac, where weights keep their bits: the change is computed in every step."""

    def quantized() -> nn.Module:
        model = tiny.llama_model(hidden_size=64, intermediate_size=128, num_attention_heads=4)
        nn.quantize(model, group_size=32, bits=4)
        return model

    folder = tiny.save(quantized(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization": {"group_size": 32, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    model = quantized()
    write_adapter(tmp_path / "adapter", kind, model)
    monkeypatch.setattr(loader, "_compute_dtype", lambda *_: None)
    adapter = str(tmp_path / "adapter")
    core = EngineCore.load(
        EngineConfig(model=ModelConfig(model=str(folder), adapter=adapter, max_model_len=256))
    )
    assert core.loaded.quantization == "4-bit group 32"
    assert [name for name, _ in tree_flatten(core.loaded.model.parameters()) if "lora" in name]
    expected = np.array(model(TOKENS))
    np.testing.assert_allclose(np.array(core.loaded.model(TOKENS)), expected, atol=1e-3)
    prompts = {"a": [1, 2, 3, 4, 5], "b": [9, 8, 7]}
    for name, prompt in prompts.items():
        core.add(name, prompt, tiny.greedy(8))
    collected = tiny.run(core)
    for name, prompt in prompts.items():
        tiny.same_tokens(model, prompt, collected.token_ids[name], tiny.solo(model, prompt, 8))


def test_weights_that_were_trained_in_full_replace_the_old_ones(tmp_path: Path) -> None:
    folder = tiny.save(tiny.llama_model(), tmp_path / "model")
    model = tiny.llama_model(seed=5)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"fine_tune_type": "full", "num_layers": 2, "lora_parameters": LORA}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(adapter / "adapters.safetensors"), weights)
    loaded = load(ModelConfig(model=str(folder), adapter=str(adapter)))
    np.testing.assert_array_equal(np.array(loaded.model(TOKENS)), np.array(model(TOKENS)))

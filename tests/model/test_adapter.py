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

from mlx_cb.config import ModelConfig
from mlx_cb.errors import ModelNotFound, UnsupportedModel
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

"""Weights of every kind that MLX has: what is loaded computes what was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_cb.config import ModelConfig
from mlx_cb.model.loader import load
from tests import tiny

TOKENS = mx.array([[1, 2, 3, 4, 5]])
RECIPES: dict[str, dict[str, Any]] = {
    "2 bits": {"group_size": 32, "bits": 2},
    "3 bits": {"group_size": 64, "bits": 3},
    "4 bits": {"group_size": 32, "bits": 4},
    "5 bits": {"group_size": 64, "bits": 5},
    "6 bits": {"group_size": 32, "bits": 6},
    "8 bits": {"group_size": 64, "bits": 8},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}


def small_llama(**changes: object) -> llama.Model:
    return tiny.llama_model(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, head_dim=16, **changes
    )


def save_quantized(model: llama.Model, folder: Path, quantization: dict[str, Any]) -> Path:
    tiny.save(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": quantization}))
    return folder


def check_equal(folder: Path, model: nn.Module) -> None:
    loaded = load(ModelConfig(model=str(folder)))
    np.testing.assert_allclose(
        np.array(loaded.model(TOKENS)), np.array(model(TOKENS)), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("name", RECIPES)
def test_one_kind_for_all_layers(name: str, tmp_path: Path) -> None:
    model = small_llama()
    nn.quantize(model, **RECIPES[name])
    check_equal(save_quantized(model, tmp_path / "m", RECIPES[name]), model)


def test_a_mixed_recipe_layer_by_layer(tmp_path: Path) -> None:
    model = small_llama()
    recipe = {
        "model.layers.0.self_attn.v_proj": {"group_size": 32, "bits": 8},
        "model.layers.1.mlp.down_proj": {"group_size": 64, "bits": 6},
        "lm_head": False,
    }

    def predicate(path: str, module: nn.Module) -> bool | dict[str, int]:
        return hasattr(module, "to_quantized") and recipe.get(path, True)

    nn.quantize(model, group_size=32, bits=4, class_predicate=predicate)
    quantization = {"group_size": 32, "bits": 4, **recipe}
    check_equal(save_quantized(model, tmp_path / "m", quantization), model)


def test_tied_embeddings(tmp_path: Path) -> None:
    model = small_llama(tie_word_embeddings=True)
    nn.quantize(model, group_size=32, bits=4)
    check_equal(save_quantized(model, tmp_path / "m", {"group_size": 32, "bits": 4}), model)


def test_sharded_files(tmp_path: Path) -> None:
    model = small_llama()
    folder = tiny.save(model, tmp_path / "m")
    weights = dict(tree_flatten(model.parameters()))
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    index = {}
    for number, half in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in half})
        index |= dict.fromkeys(half, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    check_equal(folder, model)

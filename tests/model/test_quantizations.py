"""Weights of every kind that MLX has: what is loaded computes what was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.models import llama

from mlx_cb.config import EngineConfig, ModelConfig
from mlx_cb.engine.core import EngineCore
from mlx_cb.errors import UnsupportedModel
from mlx_cb.model import loader
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


@pytest.fixture(params=["expanded", "kept"])
def weights_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Expanded, as on a CPU with room, or kept as they are, as on a Mac."""
    if request.param == "kept":
        monkeypatch.setattr(loader, "_compute_dtype", lambda *_: None)
    return request.param


@pytest.mark.parametrize("name", RECIPES)
def test_one_kind_for_all_layers(name: str, tmp_path: Path, weights_are: str) -> None:
    model = small_llama()
    nn.quantize(model, **RECIPES[name])
    folder = save_quantized(model, tmp_path / "m", RECIPES[name])
    check_equal(folder, model)
    loaded = load(ModelConfig(model=str(folder)))
    assert (loaded.quantization is not None) == (weights_are == "kept")


@pytest.mark.parametrize("name", ["3 bits", "4 bits", "mxfp4", "nvfp4"])
def test_quantized_weights_give_the_same_tokens_in_company(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the engine, with the weights as a Mac computes with them."""
    monkeypatch.setattr(loader, "_compute_dtype", lambda *_: None)
    model = small_llama()
    nn.quantize(model, **RECIPES[name])
    folder = save_quantized(model, tmp_path / "m", RECIPES[name])
    core = EngineCore.load(EngineConfig(model=ModelConfig(model=str(folder))))
    prompts = {letter: [ord(letter), *range(n)] for n, letter in enumerate("abc", start=4)}
    for letter, prompt in prompts.items():
        core.add(letter, prompt, tiny.greedy(10))
    collected = tiny.run(core)
    for letter, prompt in prompts.items():
        tiny.same_tokens(model, prompt, collected.token_ids[letter], tiny.solo(model, prompt, 10))


def test_trained_scales_and_biases_are_taken_as_they_are(tmp_path: Path, weights_are: str) -> None:
    """DWQ trains scales and biases after rounding; the codes then are no rounding of anything."""
    model = small_llama()
    nn.quantize(model, group_size=64, bits=4)
    mx.random.seed(3)
    model.update(
        tree_map_with_path(
            lambda path, array: (
                array * (1 + 0.1 * mx.random.normal(array.shape))
                if path.endswith(("scales", "biases"))
                else array
            ),
            model.parameters(),
        )
    )
    check_equal(save_quantized(model, tmp_path / "m", {"group_size": 64, "bits": 4}), model)


AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each of eight neighbours in a word


def awq_pack(codes: np.ndarray) -> np.ndarray:
    """(rows, columns) of 4-bit codes as AutoAWQ packs them: eight columns in a word."""
    eights = codes.reshape(codes.shape[0], -1, 8).astype(np.uint32)
    words = sum(eights[..., i] << np.uint32(4 * place) for i, place in enumerate(AWQ_ORDER))
    return np.asarray(words, dtype=np.uint32)


def test_a_checkpoint_made_by_autoawq(tmp_path: Path, weights_are: str) -> None:
    """`qweight`, `qzeros` and `scales` transposed and packed in AutoAWQ's order."""
    model = small_llama()
    folder = tiny.save(model, tmp_path / "m")
    rng = np.random.default_rng(0)
    weights: dict[str, mx.array] = {}
    for name, array in tree_flatten(model.parameters()):
        if not name.endswith("proj.weight"):
            weights[name] = array
            continue
        outputs, inputs = array.shape
        codes = rng.integers(0, 16, (inputs, outputs))
        zeros = rng.integers(0, 16, (inputs // 64, outputs))
        scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float32)
        values = (codes - np.repeat(zeros, 64, axis=0)) * np.repeat(scales, 64, axis=0)
        stem = name.removesuffix(".weight")
        weights[f"{stem}.qweight"] = mx.array(awq_pack(codes))
        weights[f"{stem}.qzeros"] = mx.array(awq_pack(zeros))
        weights[f"{stem}.scales"] = mx.array(scales)
        model.update(tree_unflatten([(name, mx.array(values.T.astype(np.float32)))]))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    check_equal(folder, model)
    loaded = load(ModelConfig(model=str(folder)))
    assert (loaded.quantization == "4-bit group 64") == (weights_are == "kept")


@pytest.mark.parametrize(
    ("quantization", "word"),
    [
        ({"quant_method": "awq", "bits": 8, "group_size": 64}, "bits=8"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "float-quantized"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8"),
    ],
)
def test_a_quantization_that_mlx_has_not_is_named(
    quantization: dict[str, Any], word: str, tmp_path: Path
) -> None:
    folder = tiny.save(small_llama(), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=word):
        load(ModelConfig(model=str(folder)))


def test_a_mixed_recipe_layer_by_layer(tmp_path: Path, weights_are: str) -> None:
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


def test_tied_embeddings(tmp_path: Path, weights_are: str) -> None:
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

"""Embedding checkpoints: vectors equal the pooled states of mlx-lm's own trunk, in any company."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_cb.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_cb.engine.core import EngineCore
from mlx_cb.errors import InvalidRequest, UnsupportedModel
from mlx_cb.model.pooling import pooling_of
from mlx_cb.sampling_params import SamplingParams
from tests import tiny

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
TEXTS = [[1, 2, 3], [4] * 70, [5], list(range(10, 60)), [1, 2, 3], list(range(10, 61))]


def write(folder: Path, pooling: dict[str, Any], *more: dict[str, Any]) -> Path:
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps([TRANSFORMER, POOLING, *more]))
    return folder


def embed(folder: Path, texts: list[list[int]], **settings: Any) -> list[np.ndarray]:
    """Vectors from an engine that gets all texts at once and few rows a step."""
    config = EngineConfig(
        model=ModelConfig(model=str(folder), **settings),
        cache=CacheConfig(block_size=8, kv_memory=1 << 22),
        scheduler=SchedulerConfig(max_num_batched_tokens=32),
        attention="reference",
    )
    core = EngineCore.load(config)
    wants_all = 0 if core.loaded.pooling == "mean" else None
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=wants_all)
    for number, text in enumerate(texts):
        core.add(str(number), text, params)
    collected = tiny.run(core)
    assert not any(collected.token_ids.values())
    return [
        np.frombuffer(collected.outputs[str(number)][-1].embedding or b"", dtype="<f4")
        for number in range(len(texts))
    ]


def states(model: Any, text: list[int]) -> np.ndarray:
    return np.array(model.model(mx.array([text]))[0])


POOL: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda rows: rows.mean(axis=0),
    "last": lambda rows: rows[-1],
}
CONFIGS = {"mean": {"pooling_mode_mean_tokens": True}, "last": {"pooling_mode_lasttoken": True}}


@pytest.mark.parametrize("way", ["mean", "last"])
@pytest.mark.parametrize("is_bare", [False, True], ids=["whole", "trunk only"])
def test_vectors_are_the_pooled_states(way: str, is_bare: bool, tmp_path: Path) -> None:
    model = tiny.llama_model(tie_word_embeddings=is_bare)
    folder = write(tiny.save(model, tmp_path / "m"), CONFIGS[way])
    if is_bare:  # as AutoModel saves it: without `model.`, without a head
        weights = dict(tree_flatten(model.model.parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    for text, vector in zip(TEXTS, embed(folder, TEXTS), strict=True):
        wanted = POOL[way](states(model, text))
        assert np.allclose(vector, wanted / np.linalg.norm(wanted), atol=1e-5)


def test_a_flag_makes_any_model_embed(tmp_path: Path) -> None:
    model = tiny.llama_model()
    folder = tiny.save(model, tmp_path / "m")
    assert pooling_of(folder, "auto") is None
    (vector,) = embed(folder, [[7, 8, 9]], embeddings="mean")
    wanted = states(model, [7, 8, 9]).mean(axis=0)
    assert np.allclose(vector, wanted / np.linalg.norm(wanted), atol=1e-5)


def test_what_the_files_say(tmp_path: Path) -> None:
    ways = {
        "mean": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
        "last": {"pooling_mode": "lasttoken", "include_prompt": True},
    }
    for way, config in ways.items():
        assert pooling_of(write(tmp_path / way, config), "auto") == way
    for name, config in (
        ("cls", {"pooling_mode_cls_token": True}),
        ("both", {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}),
    ):
        folder = write(tmp_path / name, config)
        with pytest.raises(UnsupportedModel, match="pools by"):
            pooling_of(folder, "auto")
        assert pooling_of(folder, "last") == "last"
    dense = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
    with pytest.raises(UnsupportedModel, match="Dense"):
        pooling_of(write(tmp_path / "dense", ways["mean"], dense), "auto")
    both_ways = write(tmp_path / "both ways", ways["mean"])
    (both_ways / "config.json").write_text('{"use_bidirectional_attention": true}')
    with pytest.raises(UnsupportedModel, match="both ways"):
        pooling_of(both_ways, "auto")


def test_an_embedding_model_generates_nothing(tmp_path: Path) -> None:
    folder = write(tiny.save(tiny.llama_model(), tmp_path / "m"), CONFIGS["last"])
    core = EngineCore.load(EngineConfig(model=ModelConfig(model=str(folder))))
    assert (core.info().pooling, core.info().hidden_size) == ("last", 48)
    with pytest.raises(InvalidRequest, match="generates no text"):
        core.add("a", [1, 2], tiny.greedy(3))

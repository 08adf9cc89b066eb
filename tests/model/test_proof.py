"""The proof at load: layouts that would be wrong are found by computing, not only by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_cb.config import EngineConfig, ModelConfig
from mlx_cb.engine.core import EngineCore
from mlx_cb.errors import UnsupportedModel
from mlx_cb.model import probe
from mlx_cb.model.cache_spec import Layout
from mlx_cb.model.proof import prove
from tests import tiny
from tests.families.build import build


def test_a_layout_that_runs_and_is_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """afm7 takes positions from the shape of the keys; the table knows, and is not asked here."""
    family = "afm7"
    monkeypatch.setattr(probe, "SERIAL_ONLY", {})
    model = build(family)
    assert probe.probe(model, family).layout is not Layout.SERIAL, "a trial alone is not enough"
    with caplog.at_level(logging.WARNING):
        assert prove(model, family, mx.float32).layout is Layout.SERIAL
    assert f"{family} is not run in a layout that differs" in caplog.text


class Moody(tiny.llama.Model):
    """Adds to its logits how often it was called."""

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        Moody.calls += 1
        logits = super().__call__(*args, **kwargs)
        return logits * mx.random.normal(logits.shape[-1:], key=mx.random.key(Moody.calls))


def test_a_model_that_no_layout_gives_is_refused() -> None:
    model = tiny.llama_model()
    model.__class__ = Moody
    with pytest.raises(UnsupportedModel, match=r"moody is not served: no layout .*packed: like"):
        prove(model, "moody", mx.float32)


def test_logits_that_are_not_numbers_are_refused() -> None:
    model = tiny.llama_model()
    model.model.norm.weight = model.model.norm.weight * float("nan")
    with pytest.raises(UnsupportedModel, match="likeness nan"):
        prove(model, "llama", mx.float32)


def test_logits_that_are_all_alike_are_no_fault() -> None:
    model = tiny.llama_model()
    model.model.norm.weight = model.model.norm.weight * 0
    assert prove(model, "llama", mx.float32).layout is Layout.PACKED


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_load_proves_its_layout(dtype: str, tmp_path: Path) -> None:
    folder = tiny.save(tiny.llama_model(), tmp_path / "m")
    core = EngineCore.load(EngineConfig(model=ModelConfig(model=str(folder), dtype=dtype)))
    assert core.cache_spec.layout is Layout.PACKED

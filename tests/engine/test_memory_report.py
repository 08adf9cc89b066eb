"""`--explain-memory`: the plan without loading, and a refusal with exit code 4."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_cb.cli import main
from mlx_cb.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_cb.engine.core import EngineCore
from mlx_cb.engine.memory_report import explain_memory, size
from mlx_cb.errors import OutOfMemory
from mlx_cb.model import loader
from tests import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny.llama_model(head_dim=32, max_position_embeddings=4096)
    return tiny.save(model, tmp_path / "model")


def config(folder: Path, kv_memory: int | None, kv_dtype: str = "auto") -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(str(folder)),
        cache=CacheConfig(kv_memory=kv_memory, kv_dtype=kv_dtype),
        scheduler=SchedulerConfig(max_num_seqs=8),
    )


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_plan_is_what_the_engine_then_has(folder: Path, kv_dtype: str) -> None:
    given = config(folder, 2**23, kv_dtype)
    report = explain_memory(given)
    assert report.refusal is None
    core = EngineCore.load(given)
    text = "\n".join(report.lines)
    assert f"{core.scheduler.kv_cache.pool.capacity:,} of 16 tokens" in text
    assert size(core.loaded.weights_bytes) in text
    assert size(core.cache_spec.bytes_per_token) in text
    users = min(8, core.scheduler.kv_cache.pool.capacity // (2048 // 16))
    assert f"users at 2,048       {users}" in text
    assert "users at 8,192       the model ends at 4096" in text


def test_nothing_is_loaded(tmp_path: Path) -> None:
    model = tiny.llama_model(intermediate_size=8192)
    folder = tiny.save(model, tmp_path / "model")
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    report = explain_memory(config(folder, 2**23))
    assert report.refusal is None
    assert "9.2 MiB" in report.lines[2]
    assert mx.get_peak_memory() - before < 2**20


def test_what_holds_no_request_ends_with_4(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_CB_CONFIG", "/dev/null/none")
    assert main(["serve", str(folder), "--explain-memory", "--kv-memory", "16MB"]) == 0
    shown = capsys.readouterr()
    assert "weights" in shown.out
    assert shown.err == ""
    assert main(["serve", str(folder), "--explain-memory", "--kv-memory", "9KB"]) == 4
    shown = capsys.readouterr()
    assert "weights" in shown.out, "what is known is shown all the same"
    assert "one request needs two blocks" in shown.err
    assert main(["serve", str(folder), "--explain-memory", "--kv-dtype", "int4"]) == 0
    assert "as int4" in capsys.readouterr().out
    assert main(["serve", str(folder / "nothing"), "--explain-memory"]) == 3


def test_weights_that_do_not_fit_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr(loader.psutil, "virtual_memory", lambda: Memory)
    report = explain_memory(config(folder, 2**23))
    assert isinstance(report.refusal, OutOfMemory)
    assert "1000" not in report.refusal.message
    assert "of memory are available" in report.refusal.message
    with pytest.raises(OutOfMemory, match="smaller or more quantized"):
        EngineCore.load(config(folder, 2**23))

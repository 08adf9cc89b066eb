"""Which steps are best made of whole tiles."""

import pytest

from mlx_cb.bench.sim.cost import BLAS_ROWS
from mlx_cb.model import matmul_tiles
from mlx_cb.model.matmul_tiles import CPU_TILE, tile_of, tile_rows


def test_the_generation_decides():
    assert [tile_of(f"applegpu_g{n}s") for n in (13, 15, 16, 17, 18)] == [32, 32, 32, 64, 64]
    assert tile_of("unknown") == 32


def dense(config: dict[str, object]) -> int:
    return tile_rows(config, is_quantized=False)


def test_only_dense_models_have_tiles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(matmul_tiles, "runs_on_metal", lambda: True)
    monkeypatch.setattr(matmul_tiles, "gpu_architecture", lambda: "applegpu_g16s")
    assert dense({"hidden_size": 64}) == 32
    assert tile_rows({"hidden_size": 64}, is_quantized=True) == 32
    assert dense({"num_experts": 128}) == 1
    assert dense({"num_local_experts": 1}) == 32
    assert dense({"n_routed_experts": None}) == 32


def test_on_a_cpu_only_plain_weights_have_tiles():
    assert dense({"hidden_size": 64}) == CPU_TILE == BLAS_ROWS
    assert tile_rows({"hidden_size": 64}, is_quantized=True) == 1
    assert dense({"num_experts": 128}) == 1

"""Which steps are best made of whole tiles."""

import pytest

from mlx_cb.model import matmul_tiles
from mlx_cb.model.matmul_tiles import tile_of, tile_rows


def test_the_generation_decides():
    assert [tile_of(f"applegpu_g{n}s") for n in (13, 15, 16, 17, 18)] == [32, 32, 32, 64, 64]
    assert tile_of("unknown") == 32


def test_only_dense_models_on_a_gpu_have_tiles(monkeypatch: pytest.MonkeyPatch):
    assert tile_rows({"hidden_size": 64}) == 1
    monkeypatch.setattr(matmul_tiles, "runs_on_metal", lambda: True)
    monkeypatch.setattr(matmul_tiles, "gpu_architecture", lambda: "applegpu_g16s")
    assert tile_rows({"hidden_size": 64}) == 32
    assert tile_rows({"num_experts": 128}) == 1
    assert tile_rows({"num_local_experts": 1}) == 32
    assert tile_rows({"n_routed_experts": None}) == 32

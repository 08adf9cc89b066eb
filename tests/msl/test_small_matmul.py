"""Quantized layers on qmm_small (emulated) give what MLX gives, for few rows and only for those."""

from __future__ import annotations

import logging

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_cb.attention.kernels import KernelCall
from mlx_cb.model.small_matmul import bind_small_matmul

from .emulator import emulate


class TwoLayers(nn.Module):
    """A linear layer with bias, one without, one that is not quantized."""

    def __init__(self) -> None:
        super().__init__()
        mx.random.seed(0)
        self.first = nn.QuantizedLinear.from_linear(nn.Linear(256, 64, bias=True), 32, 4)
        self.second = nn.QuantizedLinear.from_linear(nn.Linear(64, 32, bias=False), 64, 8)
        self.third = nn.Linear(32, 8)

    def __call__(self, x: mx.array) -> mx.array:
        return self.third(self.second(self.first(x)))


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (5, 1), (1, 8), (9, 1)])
def test_bound_layers_agree_with_mlx(shape: tuple[int, int]) -> None:
    seen: list[str] = []

    def launch(call: KernelCall) -> list[mx.array]:
        seen.append(call.kernel.name)
        return emulate(call)

    model = TwoLayers()
    x = mx.array(np.random.default_rng(0).standard_normal((*shape, 256)).astype(np.float32))
    expected = np.array(model(x))
    names = sorted(name for name, _ in nn.utils.tree_flatten(model.parameters()))
    assert bind_small_matmul(model, 8, launch) == 2
    assert sorted(name for name, _ in nn.utils.tree_flatten(model.parameters())) == names
    seen.clear()
    assert np.abs(np.array(model(x)) - expected).max() < 1e-4
    few = 2 <= shape[0] * shape[1] <= 8
    assert seen == (["qmm_small"] * 2 if few else [])


def test_nothing_is_bound_where_mlx_is_better() -> None:
    model = TwoLayers()
    assert bind_small_matmul(model, 0, emulate) == 0
    assert type(model.first) is nn.QuantizedLinear


def test_a_wrong_kernel_is_not_bound(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(call: KernelCall) -> list[mx.array]:
        return [emulate(call)[0] * 1.01]

    def broken(call: KernelCall) -> list[mx.array]:
        raise RuntimeError("Unable to build metal library")

    for launch in (wrong, broken):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert bind_small_matmul(TwoLayers(), 8, launch) == 0
        assert len(caplog.records) == 2
        assert "qmm_small is switched off" in caplog.text

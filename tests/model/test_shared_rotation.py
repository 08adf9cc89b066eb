"""Rotary layers that share a step's angles give the bits of mx.fast.rope."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_cb.model.shared_rotation import share_rotation


def rotations(layer, x, offset):
    return np.array(layer(x, offset=offset))


@given(
    rows=st.integers(1, 9),
    half=st.integers(1, 48),
    rest=st.sampled_from([0, 2, 16]),
    base=st.sampled_from([10000.0, 500000.0, 1e6, 10000]),
    scale=st.sampled_from([1.0, 0.5, 0.125]),
    seed=st.integers(0, 99),
)
def test_every_bit_is_that_of_mlx(rows, half, rest, base, scale, seed):
    layers = [nn.RoPE(2 * half, base=base, scale=scale) for _ in range(2)]
    plain = nn.RoPE(2 * half, base=base, scale=scale)
    model = nn.Module()
    model.layers = layers
    assert share_rotation(model) == 2
    random = np.random.default_rng(seed)
    positions = mx.array(random.integers(0, 100_000, rows).astype(np.int32))
    for layer, heads in zip(layers, (3, 1), strict=True):
        x = mx.array(random.normal(size=(rows, heads, 1, 2 * half + rest)).astype(np.float32))
        assert np.array_equal(rotations(layer, x, positions), rotations(plain, x, positions))


def test_other_positions_are_other_angles():
    layer = nn.RoPE(8)
    plain = nn.RoPE(8)
    share_rotation(layer)
    x = mx.random.normal((2, 1, 1, 8))
    for positions in ([3, 4], [5, 6], [3, 4]):
        offset = mx.array(positions)
        assert np.array_equal(rotations(layer, x, offset), rotations(plain, x, offset))


@pytest.mark.parametrize(
    ("layer", "shape", "offset"),
    [
        (nn.RoPE(8, traditional=True), (2, 1, 1, 8), mx.array([3, 4])),
        (nn.RoPE(8), (1, 2, 5, 8), 7),
        (nn.RoPE(8), (1, 2, 5, 8), mx.array([7])),
    ],
)
def test_all_else_goes_the_way_it_went(layer, shape, offset):
    plain = nn.RoPE(8, traditional=layer.traditional)
    share_rotation(layer)
    x = mx.random.normal(shape)
    assert np.array_equal(rotations(layer, x, offset), rotations(plain, x, offset))

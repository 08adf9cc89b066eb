"""Blocks come into being a few layers at a time, before they are needed, and keep their content."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_cb.attention.addresses import Slots
from mlx_cb.attention.kv_storage import MIN_GROWTH, KVLayerSpec, KVStorage

LAYERS = 30


def storage(window=None):
    return KVStorage([KVLayerSpec(1, 2, 2, mx.float32, window)] * LAYERS, 4)


def sizes(kept):
    return [layer.num_blocks for layer in kept.layers]


def test_no_step_waits_for_all_layers_to_grow():
    kept = storage()
    kept.ensure(MIN_GROWTH, 5000)
    grown = []
    for num_blocks in range(MIN_GROWTH // 2, 1500, 4):
        before = sizes(kept)
        kept.ensure(num_blocks, 5000)
        assert min(sizes(kept)) >= num_blocks
        assert kept.num_blocks == min(sizes(kept))
        grown.append(sum(old != new for old, new in zip(before, sizes(kept), strict=True)))
    assert sum(grown) >= 5 * LAYERS
    assert max(grown) <= LAYERS // 3  # and later, of more blocks, fewer
    assert max(grown[-200:]) <= 3


def test_what_comes_all_at_once_is_there_at_once():
    kept = storage()
    kept.ensure(3000, 5000)
    assert min(sizes(kept)) >= 3000


@pytest.mark.parametrize("most", [100, 200, 301])
def test_there_are_never_more_than_may_be(most):
    kept = storage()
    for num_blocks in range(1, most + 1):
        kept.ensure(num_blocks, most)
        assert num_blocks <= min(sizes(kept)) <= max(sizes(kept)) <= most
    kept.ensure(most, most)
    assert sizes(kept) == [most] * LAYERS


def test_growing_halfway_loses_nothing_and_a_rest_makes_it_even():
    kept = storage()
    kept.ensure(MIN_GROWTH, 5000)
    slots = Slots(mx.array([3, 100]), mx.array([1, 2]))
    for number, layer in enumerate(kept.layers):
        rows = mx.full((2, 1, 2), number + 1.0)
        layer.write(rows, rows, slots)
    kept.ensure(MIN_GROWTH - 10, 5000)
    assert len(set(sizes(kept))) == 2
    kept.trim(20)
    assert sizes(kept) == [8 * (20 + MIN_GROWTH) // 7] * LAYERS
    for number, layer in enumerate(kept.layers):
        (keys,) = layer.keys.arrays
        assert keys[3, 0, 1].tolist() == [number + 1.0] * 2
        assert keys[100, 0, 2].tolist() == [number + 1.0] * 2
    kept.trim(0)
    assert sizes(kept) == [0] * LAYERS


def test_layers_that_all_have_a_window_need_no_blocks():
    kept = storage(window=8)
    kept.ensure(50, 5000)
    assert kept.num_blocks == 50
    assert sizes(kept) == [0] * LAYERS

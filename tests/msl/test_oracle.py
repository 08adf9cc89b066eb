"""The float64 oracle against MLX's own operations and against brute force."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_cb.attention.kernel_cases import dequantized, quantize_reference
from mlx_cb.attention.oracle import Mask, attend, dequantize, lowest_kept, unpack


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_attend_is_mlx_attention(rows: int, sinks: bool) -> None:
    rng = np.random.default_rng(rows)
    heads, kv_heads, n, dim = 6, 2, 12, 64
    q = rng.standard_normal((rows, heads, dim)).astype(np.float32)
    k, v = (rng.standard_normal((n, kv_heads, dim)).astype(np.float32) for _ in range(2))
    s = rng.standard_normal(heads).astype(np.float32) if sinks else None
    batched = [mx.array(a.swapaxes(0, 1)[None]) for a in (q, k, v)]
    expected = mx.fast.scaled_dot_product_attention(
        *batched, scale=0.3, mask="causal", sinks=None if s is None else mx.array(s)
    )
    got = attend(q, k, v, Mask(0.3), s)
    assert np.abs(got - np.array(expected)[0].swapaxes(0, 1)).max() < 1e-5


def test_window_and_softcap_by_hand() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.standard_normal((1, 1, 4)),
        rng.standard_normal((6, 1, 4)),
        rng.standard_normal((6, 1, 4)),
    )
    scores = 2.0 * np.tanh((k[3:, 0] @ q[0, 0]) * 0.7 / 2.0)
    weights = np.exp(scores) / np.exp(scores).sum()
    got = attend(q, k, v, Mask(0.7, window=3, softcap=2.0))
    assert np.allclose(got[0, 0], weights @ v[3:, 0], atol=1e-12)


def test_no_context_is_zero() -> None:
    empty = np.zeros((0, 1, 4))
    assert not attend(np.ones((1, 1, 4)), empty, empty, Mask(1.0)).any()


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantize_is_mlx_format(bits: int) -> None:
    w = mx.array(np.random.default_rng(0).standard_normal((5, 128)).astype(np.float32))
    q, scales, biases = mx.quantize(w, group_size=32, bits=bits)
    expected = np.array(mx.dequantize(q, scales, biases, group_size=32, bits=bits))
    got = dequantize(unpack(np.array(q), bits), np.array(scales), np.array(biases), 32)
    assert np.allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_pool_is_near_its_source(bits: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, 64)).astype(np.float32)
    rows = quantize_reference(x, bits)
    spread = x.reshape(3, 2, 2, 32)
    step = np.abs(spread).max(-1) / 127 if bits == 8 else (spread.max(-1) - spread.min(-1)) / 15
    assert (
        np.abs(dequantized(rows) - x) <= np.repeat(step, 32, -1).reshape(x.shape) * 0.52 + 2e-3
    ).all()
    if bits == 4:  # MLX reads our 4-bit format as its own affine one
        wide = mx.dequantize(
            rows.codes,
            rows.scale.astype(mx.float32),
            rows.bias.astype(mx.float32),
            group_size=32,
            bits=4,
        )
        assert np.allclose(np.array(wide), dequantized(rows), atol=1e-5)


@pytest.mark.parametrize(
    ("k", "p", "min_p"), [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.7, 0.0), (5, 0.7, 0.0), (0, 1.0, 0.2)]
)
def test_lowest_kept_by_brute_force(k: int, p: float, min_p: float) -> None:
    x = np.random.default_rng(5).standard_normal(12) * 2
    order = sorted(range(12), key=lambda i: -x[i])
    kept = order[:k] if k else order
    mass = np.exp(x)
    total, chosen, seen = mass[kept].sum(), [], 0.0
    for i in kept:
        if p < 1.0 and seen >= p * total:
            break
        chosen.append(i)
        seen += mass[i]
    chosen = [i for i in chosen if mass[i] >= min_p * mass.max()]
    cut, _ = lowest_kept(x, k, p, min_p)
    assert sorted(np.flatnonzero(x >= cut - 1e-12)) == sorted(chosen)

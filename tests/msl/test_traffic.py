"""Bytes moved, counted in check mode: the part of a kernel's speed that can be known without a Mac.

`unique_read` counts an address once per simdgroup between two simdgroup operations (what coalescing
does), so it is what would reach the caches.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_cb.attention.kernel_cases import AttentionCase, MlaCase, Problem
from mlx_cb.attention.tuning import Tuning
from mlx_cb.model.metal_ops import qmm_small_call

from .checks import launcher
from .emulator import Report, emulate_report


def reports_of(problem: Problem) -> list[Report]:
    reports: list[Report] = []
    problem.run(launcher(reports, check=True))
    assert [f for report in reports for f in report.findings] == []
    return reports


def kv_read(report: Report) -> int:
    names = ("k", "v", "k_scale", "v_scale", "k_bias", "v_bias")
    return sum(report.unique_read[name] for name in names)


GROUPS = [1, 2, 3, 4, 5, 6, 7, 8, 16]


@pytest.mark.parametrize("group", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dim", [64, 128])
def test_decode_reads_each_key_once(group: int, dim: int) -> None:
    _assert_reads_once(
        AttentionCase(dim=dim, value_dim=dim, group=group, kv_heads=2, contexts=(70, 33))
    )


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    "options",
    [
        {"dim": 128, "value_dim": 128},
        {"dim": 192, "value_dim": 128},
        {"dim": 64, "value_dim": 64},
        {"dim": 96, "value_dim": 96},
        {"dim": 112, "value_dim": 112},
        {"dim": 256, "value_dim": 256},
        {"dim": 512, "value_dim": 512},
        {"dim": 80, "value_dim": 80, "rows": 2},
        {"dim": 128, "value_dim": 128, "tuning": Tuning(partition=16)},
    ],
    ids=str,
)
def test_decode_reads_each_key_once_for_every_group(group: int, options: dict) -> None:
    _assert_reads_once(AttentionCase(group=group, contexts=(50,), **options))


def _assert_reads_once(case: AttentionCase) -> None:
    report = reports_of(case.build())[0]
    needed = sum(case.contexts) * case.kv_heads * (case.dim + case.value_dim) * case.dtype.size
    assert needed <= kv_read(report) <= 1.1 * needed


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_quantized_pools_are_read_in_their_size(kv: str) -> None:
    case = AttentionCase(kv=kv, dim=128, value_dim=128, group=4, contexts=(64,))
    report = reports_of(case.build())[0]
    codes = {"int8": 256, "int4": 128}[kv] * 64
    parameters = {"int8": 2, "int4": 4}[kv] * 8 * 64
    assert report.unique_read["k"] + report.unique_read["v"] <= 1.1 * codes
    assert kv_read(report) <= 1.1 * (codes + parameters)


def test_decode_reads_only_the_window() -> None:
    case = AttentionCase(group=2, contexts=(200,), window=20)
    report = reports_of(case.build())[0]
    assert kv_read(report) <= 1.1 * 20 * 128 * 2


def test_decode_costs_one_simd_sum_per_head_and_key() -> None:
    case = AttentionCase(group=4, contexts=(128,))
    report = reports_of(case.build())[0]
    assert report.simd_ops == 4 * 128
    assert report.barriers == 2 * 4  # only the final exchange, twice per head
    assert report.threadgroup_bytes <= 16384


def test_prefill_skips_tiles_left_of_the_window() -> None:
    """The work of a windowed chunk does not grow with the context before the window."""

    def work(context: int) -> tuple[int, int]:
        case = AttentionCase(chunks=(32,), contexts=(context,), window=24)
        report = reports_of(case.build())[0]
        return report.mma_ops, kv_read(report)

    assert work(64) == work(512)
    full = reports_of(AttentionCase(chunks=(32,), contexts=(512,)).build())[0]
    assert work(512)[1] < kv_read(full) / 5


def test_prefill_skips_tiles_right_of_the_diagonal() -> None:
    """A first chunk of 64 rows: the first 32 rows read half of the keys."""
    case = AttentionCase(chunks=(64,), contexts=(64,))
    report = reports_of(case.build())[0]
    assert kv_read(report) == (32 + 64) * 128 * 2


@pytest.mark.slow
def test_mla_reads_the_latent_once_per_sixteen_heads() -> None:
    report = reports_of(MlaCase(heads=16, contexts=(64,)).build())[0]
    assert report.unique_read["latent"] <= 1.1 * 64 * 576 * 2
    report = reports_of(MlaCase(heads=32, contexts=(64,)).build())[0]
    assert report.unique_read["latent"] <= 1.1 * 2 * 64 * 576 * 2


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_qmm_small_reads_the_weights_once(rows: int) -> None:
    weights = mx.array(np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32))
    w, scales, biases = mx.quantize(weights, group_size=64, bits=4)
    call = qmm_small_call(mx.zeros((rows, 512)), w, scales, biases, 64, 4)
    _, report = emulate_report(call, check=True)
    assert report.findings == []
    assert w.nbytes <= report.unique_read["w"] <= 1.1 * w.nbytes
    parameters = scales.nbytes + biases.nbytes
    assert report.unique_read["scales"] + report.unique_read["biases"] <= 1.1 * parameters

"""Every kernel against float64 over a pairwise matrix of its variants and the awkward lengths."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_cb.attention.kernel_cases import AttentionCase, MlaCase, QuantizeCase
from mlx_cb.attention.kernels import kernel_names, load_kernel
from mlx_cb.attention.oracle import dequantize, unpack
from mlx_cb.attention.tuning import Tuning
from mlx_cb.model.metal_ops import qmm_small, qmm_small_call

from .checks import assert_checked, assert_clean_text, assert_correct, launcher
from .emulator import Report, Schedule
from .matrix import Row, pairwise

FLOATS = [mx.float16, mx.bfloat16, mx.float32]
DIMS = [(d, d) for d in (64, 80, 96, 112, 128, 256, 512)] + [(192, 128)]
CONTEXTS = [(1, 15), (16, 17, 0), (33, 2), (511,), (512, 3), (513,)]


def _quantizable(row: Row) -> bool:
    return row["kv"] == "same" or all(d % 32 == 0 for d in row["dims"])


def _decode_case(row: Row) -> AttentionCase:
    dim, value_dim = row["dims"]
    contexts = tuple(max(n, row["rows"]) if n else 0 for n in row["contexts"])
    return AttentionCase(
        dtype=row["dtype"],
        kv=row["kv"],
        dim=dim,
        value_dim=value_dim,
        block_size=row["block_size"],
        group=row["group"],
        kv_heads=row["kv_heads"],
        contexts=contexts,
        rows=row["rows"],
        window=row["window"],
        softcap=row["softcap"],
        sinks=row["sinks"],
        tuning=Tuning(partition=row["partition"]),
    )


DECODE = [
    _decode_case(row)
    for row in pairwise(
        {
            "dims": DIMS,
            "group": [1, 2, 3, 4, 5, 6, 7, 8, 16],
            "dtype": FLOATS,
            "kv": ["same", "int8", "int4"],
            "contexts": CONTEXTS,
            "block_size": [16, 32, 64],
            "rows": [1, 2],
            "window": [None, 1, 24],
            "softcap": [None, 5.0],
            "sinks": [False, True],
            "partition": [512, 64],
            "kv_heads": [1, 2],
        },
        _quantizable,
    )
]


def _prefill_allowed(row: Row) -> bool:
    too_big = row["dims"][0] == 512 and row["dtype"] == mx.float32
    return _quantizable(row) and not too_big


def _prefill_case(row: Row) -> AttentionCase:
    chunks, contexts = row["lengths"]
    return AttentionCase(
        dtype=row["dtype"],
        kv=row["kv"],
        dim=row["dims"][0],
        value_dim=row["dims"][1],
        block_size=row["block_size"],
        group=row["group"],
        contexts=contexts,
        chunks=chunks,
        window=row["window"],
        softcap=row["softcap"],
        sinks=row["sinks"],
        tuning=Tuning(prefill_rows=row["rows"]),
    )


PREFILL = [
    _prefill_case(row)
    for row in pairwise(
        {
            "dims": DIMS,
            "lengths": [
                ((1, 15), (1, 15)),
                ((16, 17), (40, 17)),
                ((33, 2), (33, 50)),
                ((8,), (513,)),
                ((70,), (70,)),
                ((31, 1, 9), (511, 512, 16)),
            ],
            "dtype": FLOATS,
            "kv": ["same", "int8", "int4"],
            "group": [1, 2, 3],
            "block_size": [16, 32, 64],
            "window": [None, 1, 24],
            "softcap": [None, 5.0],
            "sinks": [False, True],
            "rows": [8, 16, 32],
        },
        _prefill_allowed,
    )
]

QUICK = [
    AttentionCase(contexts=(1, 17, 0, 100), group=3, kv_heads=2),
    AttentionCase(
        dtype=mx.bfloat16,
        kv="int4",
        dim=128,
        value_dim=128,
        group=8,
        rows=2,
        contexts=(70, 2),
        window=24,
        softcap=5.0,
        sinks=True,
        tuning=Tuning(partition=16),
    ),
    AttentionCase(
        dtype=mx.float32,
        kv="int8",
        dim=192,
        value_dim=128,
        group=5,
        contexts=(40, 65),
        block_size=32,
        tuning=Tuning(partition=32),
    ),
    AttentionCase(dtype=mx.float16, chunks=(1, 20, 40), contexts=(30, 20, 100), group=2),
    AttentionCase(
        dtype=mx.float32,
        kv="int8",
        dim=96,
        value_dim=96,
        chunks=(33,),
        contexts=(70,),
        window=24,
        softcap=5.0,
        sinks=True,
    ),
    AttentionCase(contexts=(100, 40), sharpness=64.0, tuning=Tuning(partition=32)),
    AttentionCase(contexts=(100,), chunks=(40,), sharpness=64.0),
    AttentionCase(dtype=mx.float32, kv="float16", contexts=(40,), dim=128, value_dim=128, group=8),
    AttentionCase(dtype=mx.float16, kv="bfloat16", contexts=(40,), chunks=(9,)),
    QuantizeCase(bits=8),
    QuantizeCase(bits=4, dtype=mx.bfloat16),
    MlaCase(heads=20, contexts=(40, 3), tuning=Tuning(partition=16)),
]


def _names(cases: list) -> list[str]:
    return [case.name for case in cases]


@pytest.mark.parametrize("case", QUICK, ids=_names(QUICK))
def test_quick(case: AttentionCase | QuantizeCase | MlaCase) -> None:
    problem = case.build()
    for call in problem.calls[:1]:
        assert_clean_text(call)
    assert_correct(problem)
    assert_checked(problem)


@pytest.mark.slow
@pytest.mark.parametrize("case", DECODE, ids=_names(DECODE))
def test_decode_matrix(case: AttentionCase) -> None:
    problem = case.build(1)
    assert_clean_text(problem.calls[0])
    assert_correct(problem)


@pytest.mark.slow
@pytest.mark.parametrize("case", PREFILL, ids=_names(PREFILL))
def test_prefill_matrix(case: AttentionCase) -> None:
    problem = case.build(1)
    assert_clean_text(problem.calls[0])
    assert_correct(problem)


@pytest.mark.slow
@pytest.mark.parametrize("case", DECODE + PREFILL, ids=_names(DECODE + PREFILL))
def test_matrix_in_check_mode(case: AttentionCase) -> None:
    assert_checked(case.build(2))


LONG = [
    AttentionCase(
        dtype=row["dtype"],
        kv=row["kv"],
        dim=row["dims"][0],
        value_dim=row["dims"][1],
        group=row["group"],
        contexts=(4097,),
        sinks=row["sinks"],
    )
    for row in pairwise(
        {
            "dims": DIMS,
            "dtype": FLOATS,
            "kv": ["same", "int8", "int4"],
            "group": [1, 2],
            "sinks": [False, True],
        },
        _quantizable,
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG, ids=_names(LONG))
def test_long_context(case: AttentionCase) -> None:
    """4097 tokens: nine partitions, the last of one token."""
    problem = case.build()
    assert len(problem.calls) == 2
    assert_correct(problem)
    assert_checked(problem)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_long_context_of_a_chunk(dtype: mx.Dtype) -> None:
    problem = AttentionCase(dtype=dtype, contexts=(4097,), chunks=(9,), sinks=True).build()
    assert_correct(problem)
    assert_checked(problem)


MLA = [
    MlaCase(
        dtype=dtype, heads=heads, contexts=contexts, block_size=size, tuning=Tuning(partition=part)
    )
    for dtype, heads, contexts, size, part in [
        (mx.float16, 16, (1, 15, 16, 17, 0), 16, 512),
        (mx.bfloat16, 20, (100, 3), 32, 32),
        (mx.float32, 4, (33,), 64, 16),
        (mx.float16, 128, (40,), 16, 512),
        (mx.float32, 16, (513,), 16, 512),
        (mx.float16, 16, (511, 4097), 16, 512),
    ]
]


@pytest.mark.slow
@pytest.mark.parametrize("case", MLA, ids=_names(MLA))
def test_mla(case: MlaCase) -> None:
    problem = case.build(1)
    assert_clean_text(problem.calls[0])
    assert_correct(problem)
    assert_checked(problem)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize(bits: int, dtype: mx.Dtype) -> None:
    problem = QuantizeCase(dtype, bits, (3, 1, 96)).build(1)
    assert_clean_text(problem.calls[0])
    assert_correct(problem)
    assert_checked(problem)


@pytest.mark.parametrize("name", kernel_names())
def test_every_kernel_is_small_enough(name: str) -> None:
    kernel = load_kernel(name)
    assert len(kernel.source) + len(kernel.header) <= 8192
    assert len(kernel.inputs) + len(kernel.outputs) <= 31


# ---- qmm_small ---------------------------------------------------------------------------------


def _weights(rng: np.random.Generator, n: int, k: int, group: int, bits: int, dtype: mx.Dtype):
    w = mx.array(rng.standard_normal((n, k)).astype(np.float32)).astype(dtype)
    return mx.quantize(w, group_size=group, bits=bits)


def _qmm_error(m: int, k: int, n: int, bits: int, group: int, dtype: mx.Dtype, check: bool) -> None:
    rng = np.random.default_rng(m)
    w, scales, biases = _weights(rng, n, k, group, bits, dtype)
    x = mx.array(rng.standard_normal((m, k)).astype(np.float32)).astype(dtype)
    wide = [np.array(a.astype(mx.float32)).astype(np.float64) for a in (x, scales, biases)]
    expected = wide[0] @ dequantize(unpack(np.array(w), bits), wide[1], wide[2], group).T
    assert_clean_text(qmm_small_call(x, w, scales, biases, group, bits))
    bits_seen = []
    for schedule in Schedule:
        reports: list[Report] = []
        launch = launcher(reports, schedule, check=check and schedule is Schedule.RANDOM)
        got = np.array(qmm_small(x, w, scales, biases, group, bits, launch).astype(mx.float32))
        assert reports[0].findings == []
        error = np.abs(got - expected).max() / np.abs(expected).max()
        assert error <= {mx.float16: 2e-3, mx.bfloat16: 2e-2, mx.float32: 1e-5}[dtype]
        bits_seen.append(got)
    assert np.array_equal(bits_seen[0], bits_seen[1])
    assert np.array_equal(bits_seen[0], bits_seen[2])


def test_qmm_small_quick() -> None:
    _qmm_error(5, 320, 70, 4, 64, mx.float16, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "k", "n", "bits", "group", "dtype"),
    [
        tuple(row.values())
        for row in pairwise(
            {
                "m": [1, 2, 3, 4, 7, 8, 9, 16],
                "k": [128, 384, 1024],
                "n": [9, 33, 64],
                "bits": [4, 8],
                "group": [32, 64, 128],
                "dtype": FLOATS,
            },
            lambda row: row["k"] % row["group"] == 0,
        )
    ],
)
def test_qmm_small(m: int, k: int, n: int, bits: int, group: int, dtype: mx.Dtype) -> None:
    _qmm_error(m, k, n, bits, group, dtype, check=True)


def test_qmm_small_refuses_what_it_cannot_do() -> None:
    w, scales, biases = _weights(np.random.default_rng(0), 8, 128, 64, 4, mx.float16)
    for rows, group, bits in ((17, 64, 4), (2, 16, 4), (2, 64, 2)):
        with pytest.raises(ValueError, match="qmm_small"):
            qmm_small_call(mx.zeros((rows, 128), mx.float16), w, scales, biases, group, bits)

"""The bench itself: every kind of fault is found, each on the smallest kernel that has it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_cb.attention.kernels import Kernel, KernelCall, strip_comments

from .capture import capture, write_kernel
from .emulator import KernelFaultError, Schedule, emulate, emulate_report
from .lint import lint, lint_text
from .matrix import pairwise
from .rewrite import parse_parameters, threadgroup_arrays

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def toy(body: str, threads: int = 64, group: int = 64, out: int = 64) -> KernelCall:
    """One float input `x` of 64 elements, one float output of `out`."""
    kernel = Kernel("toy", ("x",), ("out",), body + "\n", "")
    x = mx.array(np.arange(64, dtype=np.float32))
    return KernelCall(
        kernel,
        (x,),
        (("T", mx.float32), ("N", 64)),
        (threads, 1, 1),
        (group, 1, 1),
        ((out,),),
        (mx.float32,),
    )


INDEX = "int i = thread_position_in_threadgroup.x; "
SHARED = "threadgroup float s[N]; " + INDEX

FAULTS = {
    "race between simdgroups": (
        SHARED + f"s[i] = 0.0f; {BARRIER} s[63 - i] = x[i]; out[i] = s[i];",
        "race: threadgroup memory",
    ),
    "race inside a simdgroup": (
        SHARED + "s[i] = x[i]; out[i] = s[i ^ 1];",
        "race: threadgroup memory",
    ),
    "two threads write one output": (
        INDEX + "out[i / 2] = 1.0f; out[32 + i / 2] = 1.0f;",
        "race: buffer 1",
    ),
    "two threadgroups write one output": (
        "out[thread_position_in_threadgroup.x] = x[0];",
        "race: buffer 1",
    ),
    "uninitialised threadgroup memory": (SHARED + "out[i] = s[i];", "uninitialised read"),
    "output read before it is written": (
        INDEX + "out[i] = out[i] + 1.0f;",
        "uninitialised read: buffer 1",
    ),
    "input past the end": (INDEX + "out[i] = x[i + 1];", "out of bounds: buffer 0 byte 256 of 256"),
    "input before the start": (INDEX + "out[i] = x[i - 1];", "out of bounds: buffer 0 byte -4"),
    "output past the end": (
        INDEX + "out[i + 1] = x[i]; if (i == 0) { out[0] = 0.0f; }",
        "out of bounds: buffer 1",
    ),
    "threadgroup array too small": (
        "threadgroup float s[32]; threadgroup float other[64]; "
        + INDEX
        + "other[i] = 0.0f; s[i] = x[i]; "
        + BARRIER
        + " out[i] = s[i] + other[i];",
        "array index out of bounds",
    ),
    "barrier in a divergent branch": (
        INDEX + f"if (i < 16) {{ {BARRIER} }} out[i] = x[i];",
        "divergence",
    ),
    "barrier in one simdgroup": (
        INDEX + f"if (i < 32) {{ {BARRIER} }} out[i] = x[i];",
        "divergence: threadgroup_barrier reached by 1 of 2",
    ),
    "return before the barrier": (
        INDEX + f"if (i == 5) {{ return; }} {BARRIER} out[i] = x[i];",
        "divergence",
    ),
    "simd_sum in a divergent branch": (
        INDEX + "out[i] = i % 32 < 3 ? simd_sum(x[i]) : simd_max(x[i]);",
        "divergence",
    ),
    "too much threadgroup memory": (
        "threadgroup float s[8193]; " + INDEX + "s[i] = x[i]; out[i] = s[i];",
        "threadgroup memory: 32772 bytes",
    ),
    "integer overflow": (
        INDEX + "int big = 2147483647 - int(x[0]); out[i] = x[i] + float(big + i);",
        "integer overflow in +",
    ),
    "misaligned load": (
        INDEX + "out[i] = *(const device float*)((const device char*)x + 1 + i);",
        "misaligned",
    ),
    "shift by the width": (INDEX + "out[i] = float(1u << (32 + i));", "shift by too much"),
    "barrier of the wrong memory": (
        SHARED + "s[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); out[i] = s[63 - i];",
        "race",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str) -> None:
    body, expected = FAULTS[name]
    threads = 128 if name == "two threadgroups write one output" else 64
    _, report = emulate_report(toy(body, threads), check=True)
    assert any(expected in finding for finding in report.findings), report.findings


def test_clean_kernel_has_no_findings() -> None:
    body = SHARED + f"s[i] = x[i]; {BARRIER} out[i] = s[63 - i] + simd_sum(x[i]);"
    for schedule in Schedule:
        outputs, report = emulate_report(toy(body), schedule=schedule, check=True)
        assert report.findings == []
        sums = np.repeat([np.arange(32).sum(), np.arange(32, 64).sum()], 32)
        assert np.array_equal(np.array(outputs[0]), np.arange(64)[::-1] + sums)
        assert (report.barriers, report.simd_ops, report.threadgroup_bytes) == (1, 2, 256)
        assert report.read["x"] == 2 * 256


def test_fast_mode_finds_by_poison_guard_pages_and_order() -> None:
    """Without instrumentation: NaN memory, faults at the guard page, and schedule dependence."""
    outputs, _ = emulate_report(toy(SHARED + "out[i] = s[i];"))
    assert np.isnan(np.array(outputs[0])).all()
    outputs, _ = emulate_report(toy(INDEX + "if (i != 7) { out[i] = x[i]; }"))
    assert np.isnan(np.array(outputs[0])).nonzero()[0].tolist() == [7]
    outputs, _ = emulate_report(toy("float y; " + INDEX + "if (i > 0) { y = 1.0f; } out[i] = y;"))
    assert np.isnan(np.array(outputs[0])[0])  # a private variable nobody set
    with pytest.raises(KernelFaultError, match="out of bounds: buffer 0"):
        emulate(toy(INDEX + "out[i] = x[i + 64];"))
    racy = toy(SHARED + f"s[i] = 0.0f; {BARRIER} s[63 - i] = x[i]; out[i] = s[i];")
    answers = [np.array(emulate_report(racy, schedule=s)[0][0]) for s in list(Schedule)[:2]]
    assert not np.array_equal(*answers)


@pytest.mark.parametrize(("threads", "group"), [(64, 48), (2048, 2048)])
def test_bad_launches_are_refused(threads: int, group: int) -> None:
    with pytest.raises(KernelFaultError, match=r"not a multiple|threadgroup of"):
        emulate(toy(INDEX + "out[0] = 1.0f;", threads, group))


def test_many_threadgroups_and_attributes() -> None:
    body = (
        "out[thread_position_in_grid.x] = float(threadgroup_position_in_grid.x * 1000 + "
        "simdgroup_index_in_threadgroup * 100 + thread_index_in_simdgroup) + "
        "float(simdgroups_per_threadgroup) * 0.5f;"
    )
    outputs = emulate(toy(body, 256, 64, 256))
    t = np.arange(256)
    assert np.array_equal(np.array(outputs[0]), t // 64 * 1000 + t % 64 // 32 * 100 + t % 32 + 1.0)


# ---- capture -----------------------------------------------------------------------------------


def test_capture_is_what_we_think_mlx_writes() -> None:
    kernel = Kernel(
        "two",
        ("a", "b", "c"),
        ("out", "more"),
        "uint i = thread_position_in_grid.x; out[i] = T(a[i] + b[0] + c); more[i] = a_shape[0];\n",
        "inline float unused(float x) { return x; }\n",
    )
    call = KernelCall(
        kernel,
        (mx.zeros((9,), mx.float16), mx.zeros((3,), mx.int32), mx.array(1.0)),
        (("T", mx.bfloat16), ("D", 7), ("B", True)),
        (32, 1, 1),
        (32, 1, 1),
        ((32,), (32,)),
        (mx.bfloat16, mx.int32),
    )
    text = capture(call)
    assert text == write_kernel(call)
    assert "const device float16_t* a [[buffer(0)]]" in text
    assert "const constant int32_t* b" in text
    assert "const constant float& c" in text


def test_metal_refuses_to_run_here() -> None:
    """What the whole bench stands on: without Metal only tracing is allowed."""
    from mlx_cb.attention.kernels import launch_metal

    if mx.metal.is_available():
        pytest.skip("this machine has Metal")
    with pytest.raises(RuntimeError, match="Metal"):
        mx.eval(launch_metal(toy("out[0] = 1.0f;")))


def test_rewrites() -> None:
    text = "threadgroup float a[N];\n  threadgroup T b[2][M + 1];\nthreadgroup_barrier(x);"
    seen = threadgroup_arrays(text, "<{type} {name} {dims}>")
    assert seen == "<float a [N]>\n  <T b [2][M + 1]>\nthreadgroup_barrier(x);"
    parameters = parse_parameters(capture(toy("out[0] = x[thread_position_in_grid.x];")), _name())
    assert [p.name for p in parameters] == ["x", "out", "thread_position_in_grid"]
    assert strip_comments("a; // b\n/* c\n d */ e;\n\n") == "a;\n e;\n"


def _name() -> str:
    return capture(toy("out[0] = x[thread_position_in_grid.x];")).split("void ")[1].split("(")[0]


# ---- lint --------------------------------------------------------------------------------------

REFUSED = {
    "device pointer to constant": "device float* p = out; const constant float* q = p;",
    "unqualified pointer": "float* p = out; p[0] = 1.0f;",
    "lost const": "device float* p = x; out[0] = p[0];",
    "write to an input": "x[0] = 1.0f;",
    "threadgroup to device": "threadgroup float s[4]; device float* p = s; out[0] = p[0];",
    "thread to threadgroup": "float s[4]; threadgroup float* p = s; out[0] = p[0];",
    "double": "double d = 1; out[0] = float(d);",
    "ambiguous max": "int a = 1; uint b = 2; out[0] = float(max(a, b));",
    "new": "float* p = new float[4]; out[0] = p[0];",
    "std": "out[0] = std::max(1.0f, x[0]);",
    "variable length array": "int n = int(x[0]); float a[n]; out[0] = a[0];",
    "unknown function": "out[0] = exp3(x[0]);",
    "unsuffixed literal": "out[0] = x[0] * 1.5;",
    "lambda": "auto f = [&](float y) { return y; }; out[0] = f(x[0]);",
    "static variable": "static int n = 0; out[0] = float(n);",
    "goto": "again: if (x[0] > 1.0f) { goto again; } out[0] = 1.0f;",
    "functional cast to T": "out[0] = T(x[0]);",
    "throw": "if (x[0] > 1.0f) { throw 1; } out[0] = 1.0f;",
    "struct with methods": "struct S { int v; int get() { return v; } }; S s; out[0] = float(s.v);",
}


@pytest.mark.parametrize("name", REFUSED)
def test_lint_refuses(name: str) -> None:
    assert lint(capture(toy(REFUSED[name]))) != []


def test_lint_refuses_implicit_bfloat() -> None:
    kernel = Kernel("toy", ("x",), ("out",), "float y = float(x[0]); out[0] = y;\n", "")
    call = KernelCall(
        kernel,
        (mx.zeros((8,), mx.bfloat16),),
        (("T", mx.bfloat16),),
        (32, 1, 1),
        (32, 1, 1),
        ((8,),),
        (mx.bfloat16,),
    )
    assert lint(capture(call)) != []


def test_lint_accepts_what_metal_accepts() -> None:
    body = (
        "threadgroup T s[N]; const device float* p = x + 1; uint i = thread_index_in_simdgroup; "
        "s[i] = static_cast<T>(p[i] * 0.5f); threadgroup_barrier(mem_flags::mem_threadgroup); "
        "out[i] = fast::exp2(float(s[i])) + simd_sum(1.0f) + float(max(1, int(i)));"
    )
    assert lint(capture(toy(body))) == []
    assert lint_text("a = 1.0f; b = x.y; c = v[1].z; d = 3.0e-5f;") == []


def test_pairwise_covers_every_allowed_pair() -> None:
    parameters = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False], "d": [0, 1, 2, 3]}
    rows = pairwise(parameters, lambda row: not (row["a"] == 1 and row["d"] == 0))
    seen = {(r["a"], r["d"]) for r in rows}
    assert seen == {(a, d) for a in (1, 2, 3) for d in range(4)} - {(1, 0)}
    assert {(r["b"], r["d"]) for r in rows} == {(b, d) for b in "xy" for d in range(4)}
    assert len(rows) < 20

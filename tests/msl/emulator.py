"""Runs captured Metal kernels on the CPU and reports what they did wrong and how much they moved.

Owns: turning mx.arrays into guarded memory and back, compiled kernels, the ctypes side of runtime/.
`emulate` is a launcher (mlx_cb.attention.kernels): give it where the product gives launch_metal.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache

import mlx.core as mx
import numpy as np

from mlx_cb.attention.kernels import KernelCall

from .capture import capture
from .rewrite import executable
from .toolchain import compile_kernel, load_runtime

MAX_BUFFERS = 31


class Schedule(IntEnum):
    """The order in which threads, simdgroups and threadgroups run."""

    FORWARD = 0
    REVERSE = 1
    RANDOM = 2


class KernelFaultError(AssertionError):
    """The kernel did something that Metal leaves undefined."""


class _Report(ctypes.Structure):
    _fields_ = (
        ("findings", ctypes.c_int32),
        ("aborted", ctypes.c_int32),
        ("text", (ctypes.c_char * 240) * 32),
        *(
            (name, ctypes.c_int64)
            for name in ("simd_ops", "mma_ops", "barriers", "threadgroups", "threadgroup_bytes")
        ),
        *((name, ctypes.c_int64 * MAX_BUFFERS) for name in ("read", "written", "unique_read")),
    )


class _Dispatch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("bytes", ctypes.POINTER(ctypes.c_int64)),
        ("writable", ctypes.POINTER(ctypes.c_int32)),
        ("count", ctypes.c_int32),
        ("schedule", ctypes.c_int32),
        ("check", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
    )


@dataclass
class Report:
    """What one dispatch did.

    The dicts are in bytes by buffer name; they count only in check mode. `unique_read` counts an
    address once per simdgroup and round between two simdgroup operations, as coalescing would.
    """

    findings: list[str]
    simd_ops: int
    mma_ops: int
    barriers: int
    threadgroups: int
    threadgroup_bytes: int
    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    unique_read: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Buffer:
    """Raw contents of a kernel argument; `fill` None means a writable output of `bytes`."""

    name: str
    contents: np.ndarray | None
    bytes: int


@cache
def _entry(text: str, check: bool, flags: tuple[str, ...]) -> int:
    load_runtime()
    library = ctypes.CDLL(str(compile_kernel(text, check, flags)))
    _libraries.append(library)
    return ctypes.cast(library.msl_entry, ctypes.c_void_p).value or 0


_libraries: list[ctypes.CDLL] = []


def run_text(
    text: str,
    buffers: Sequence[Buffer],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    *,
    schedule: Schedule = Schedule.FORWARD,
    check: bool = False,
    seed: int = 1,
    flags: tuple[str, ...] = (),
) -> tuple[list[np.ndarray], Report]:
    """Run a C++ translation unit from rewrite.executable.

    Returns:
        The outputs' bytes (uint8, one array per buffer without contents) and the report.
    """
    runtime = load_runtime()
    runtime.msl_allocate.restype = ctypes.c_void_p
    runtime.msl_allocate.argtypes = [ctypes.c_int64]
    runtime.msl_free.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    entry = _entry(text, check, flags)
    count = len(buffers)
    pointers = (ctypes.c_void_p * count)()
    sizes = (ctypes.c_int64 * count)(*(b.bytes for b in buffers))
    writable = (ctypes.c_int32 * count)(*(b.contents is None for b in buffers))
    raw = _Report()
    try:
        for i, b in enumerate(buffers):
            pointers[i] = runtime.msl_allocate(b.bytes)
            if b.contents is None:
                ctypes.memset(pointers[i], 0xFF, b.bytes)  # NaN in every float format
            else:
                ctypes.memmove(pointers[i], b.contents.ctypes.data, b.bytes)
        dispatch = _Dispatch(
            entry,
            pointers,
            sizes,
            writable,
            count,
            int(schedule),
            int(check),
            seed,
            (ctypes.c_uint32 * 3)(*grid),
            (ctypes.c_uint32 * 3)(*threadgroup),
        )
        runtime.msl_dispatch(ctypes.byref(dispatch), ctypes.byref(raw))
        outputs = [
            np.frombuffer(ctypes.string_at(pointers[i], b.bytes), np.uint8)
            for i, b in enumerate(buffers)
            if b.contents is None
        ]
    finally:
        for i, b in enumerate(buffers):
            if pointers[i]:
                runtime.msl_free(pointers[i], b.bytes)
    return outputs, _read_report(raw, [b.name for b in buffers])


def _read_report(raw: _Report, names: list[str]) -> Report:
    shown = min(raw.findings, 32)
    findings = [raw.text[i].value.decode() for i in range(shown)]
    if raw.findings > shown:
        findings.append(f"... and {raw.findings - shown} more")
    return Report(
        findings,
        raw.simd_ops,
        raw.mma_ops,
        raw.barriers,
        raw.threadgroups,
        raw.threadgroup_bytes,
        *(
            dict(zip(names, list(getattr(raw, field)), strict=False))
            for field in ("read", "written", "unique_read")
        ),
    )


_WIDTH_VIEWS = {mx.bfloat16: mx.uint16}


def array_bytes(array: mx.array) -> np.ndarray:
    """A contiguous uint8 copy of an array's elements."""
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.frombuffer(np.ascontiguousarray(np.array(plain)).tobytes(), np.uint8)


def bytes_array(raw: np.ndarray, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """The inverse of array_bytes."""
    if dtype == mx.bfloat16:
        return mx.array(raw.view(np.uint16).reshape(shape)).view(mx.bfloat16)
    name = str(dtype).removeprefix("mlx.core.")
    return mx.array(raw.view(np.dtype(name)).reshape(shape))


def emulate_report(
    call: KernelCall,
    *,
    schedule: Schedule = Schedule.FORWARD,
    check: bool = False,
    seed: int = 1,
    text: str | None = None,
) -> tuple[list[mx.array], Report]:
    """Run a call on the CPU. `text` replaces the captured text (a mutant).

    Shape, strides and ndim arguments, which MLX adds when a body names them, are refused: our
    kernels take row-contiguous arrays and never need them.
    """
    source = text or capture(call)
    buffers = [
        Buffer(name, array_bytes(a), a.nbytes)
        for name, a in zip(call.kernel.inputs, call.inputs, strict=True)
    ]
    for name, shape, dtype in zip(
        call.kernel.outputs, call.output_shapes, call.output_dtypes, strict=True
    ):
        buffers.append(Buffer(name, None, int(np.prod(shape)) * dtype.size))
    raw, report = run_text(
        executable(source),
        buffers,
        call.grid,
        call.threadgroup,
        schedule=schedule,
        check=check,
        seed=seed,
    )
    outputs = [
        bytes_array(r, shape, dtype)
        for r, shape, dtype in zip(raw, call.output_shapes, call.output_dtypes, strict=True)
    ]
    return outputs, report


def emulate(call: KernelCall) -> list[mx.array]:
    """The launcher: run the call now, raise KernelFaultError on any finding."""
    outputs, report = emulate_report(call)
    if report.findings:
        raise KernelFaultError(f"{call.kernel.name}: " + "; ".join(report.findings))
    return outputs

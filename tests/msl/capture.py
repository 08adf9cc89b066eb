"""The MSL text that MLX would compile on a Mac, taken from the product's own call.

`mx.fast.metal_kernel` refuses to run without Metal but may be traced by `mx.export_function`; with
verbose=True it then prints the whole generated kernel to the process's stdout (mlx PR #3650).
`write_kernel` builds the same text independently, from the rules of mlx's
backend/common/metal_kernel.cpp, so that a change in MLX shows as a difference.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from pathlib import Path

import mlx.core as mx

from mlx_cb.attention.kernels import MIN_ELEMENTS, KernelCall, launch_metal

# name in the text -> Metal type, in the order MLX writes them
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}
TYPE_NAMES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.int8: "int8_t",
    mx.uint8: "uint8_t",
    mx.int16: "int16_t",
    mx.uint16: "uint16_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.int64: "int64_t",
}
_texts: dict[tuple, str] = {}


def capture(call: KernelCall) -> str:
    """The generated kernel, without MLX's own prefix (mlx/backend/metal/kernels/utils.h)."""
    key = _signature_key(call)
    if key not in _texts:
        _texts[key] = _trace(call)
    return _texts[key]


def _signature_key(call: KernelCall) -> tuple:
    arrays = tuple((a.dtype, a.size < MIN_ELEMENTS, a.ndim == 0) for a in call.inputs)
    template = tuple((name, str(value)) for name, value in call.template)
    return (call.kernel, arrays, template, call.output_dtypes)


def _trace(call: KernelCall) -> str:
    def traced(*arrays: mx.array) -> list[mx.array]:
        return launch_metal(
            KernelCall(
                call.kernel,
                arrays,
                call.template,
                call.grid,
                call.threadgroup,
                call.output_shapes,
                call.output_dtypes,
            ),
            verbose=True,
        )

    libc = ctypes.CDLL(None)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as sink:
        sys.stdout.flush()
        libc.fflush(None)
        saved = os.dup(1)
        os.dup2(sink.fileno(), 1)
        try:
            mx.export_function(str(Path(folder) / "f.mlxfn"), traced, *call.inputs)
        finally:
            libc.fflush(None)
            os.dup2(saved, 1)
            os.close(saved)
        sink.seek(0)
        printed = sink.read().decode()
    found = re.search(r"```\n(.*)```", printed, flags=re.S)
    if found is None:
        raise RuntimeError(f"MLX printed no kernel while tracing; it printed {printed[:200]!r}")
    return found.group(1)


def write_kernel(call: KernelCall) -> str:
    """The same text from our own reading of MLX's rules; compared with `capture` in the tests."""
    kernel = call.kernel
    values = [_template_value(value) for _, value in call.template]
    name = _kernel_name(call, values)
    lines = []
    for text, array in zip(kernel.inputs, call.inputs, strict=True):
        space = "constant" if array.size < MIN_ELEMENTS else "device"
        mark = "&" if array.ndim == 0 else "*"
        lines.append(f"const {space} {TYPE_NAMES[array.dtype]}{mark} {text}")
        for suffix, kind in (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&")):
            if array.ndim and f"{text}_{suffix}" in kernel.source:
                lines.append(f"const constant {kind} {text}_{suffix}")
    for text, dtype in zip(kernel.outputs, call.output_dtypes, strict=True):
        lines.append(f"device {TYPE_NAMES[dtype]}* {text}")
    lines = [f"  {line} [[buffer({i})]]" for i, line in enumerate(lines)]
    used = [(a, kind) for a, kind in ATTRIBUTES.items() if a in kernel.source]
    lines += [f"  {kind} {a} [[{a}]]" for a, kind in used]
    kinds = {mx.Dtype: "typename", bool: "bool", int: "int"}
    parameters = ", ".join(f"{kinds[type(value)]} {key}" for key, value in call.template)
    shown = ", ".join(values)
    return (
        f"{kernel.header}template <{parameters}>\n[[kernel]] void {name}(\n"
        + ",\n".join(lines)
        + f') {{\n{kernel.source}\n}}\n\ntemplate [[host_name("{name}")]] [[kernel]] '
        f"decltype({name}<{shown}>) {name}<{shown}>;\n\n"
    )


def _template_value(value: object) -> str:
    return TYPE_NAMES[value] if isinstance(value, mx.Dtype) else str(int(value))  # type: ignore[call-overload]


def _kernel_name(call: KernelCall, values: list[str]) -> str:
    """custom_kernel_<name>_<template values>_<input kinds>_<output types>."""
    parts = ["custom_kernel_" + call.kernel.name + "_"]
    parts += [re.sub(r"[^A-Za-z0-9_]", "", v) for v in values]
    for array in call.inputs:
        space = "s" if array.ndim == 0 else "c" if array.size < MIN_ELEMENTS else ""
        parts.append(TYPE_NAMES[array.dtype] + space)
    parts += [TYPE_NAMES[dtype] for dtype in call.output_dtypes]
    return "_".join(parts)

"""Checks the kernels where they will run: against float64, and that writes are in place.

Owns: which vectors make up a self-test and what a result says. The launcher is given, so the same
code runs over the emulator in tests. Knows nothing about the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import mlx.core as mx

from mlx_cb.attention.addresses import Slots
from mlx_cb.attention.kernel_cases import AttentionCase, MlaCase, Problem, QuantizeCase
from mlx_cb.attention.kernels import Launcher
from mlx_cb.attention.kv_storage import KVLayer, KVLayerSpec
from mlx_cb.attention.tuning import Tuning
from mlx_cb.model.metal_cases import QmmCase, SampleCase


class Case(Protocol):
    """Any of the vectors."""

    @property
    def name(self) -> str:
        """Kernel and variant."""

    def build(self, seed: int = 0) -> Problem:
        """The problem with its answer."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check. `status` is ok, failed or not checked; `detail` says why or how well."""

    name: str
    status: str
    detail: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def kernel_cases(tuning: Tuning) -> Iterator[Case]:
    """Every kernel in the variants that models use: about 110."""
    types = (mx.float16, mx.bfloat16)
    split = replace(tuning, partition=64)
    shapes = [
        (64, 64, 8),
        (64, 64, 3),
        (80, 80, 1),
        (96, 96, 1),
        (112, 112, 2),
        (128, 128, 4),
        (128, 128, 5),
        (128, 128, 8),
        (192, 128, 1),
        (256, 256, 2),
        (256, 256, 16),
        (512, 512, 8),
    ]
    for dtype in types:
        for dim, value_dim, group in shapes:
            case = AttentionCase(
                dtype=dtype, dim=dim, value_dim=value_dim, group=group, kv_heads=2, tuning=tuning
            )
            yield replace(case, contexts=(1, 15, 16, 17, 300))
            yield replace(case, contexts=(513, 65), tuning=split, sinks=True)
            yield replace(case, contexts=(1, 70, 300), chunks=(1, 33, 40))
            if dim % 32 == 0:
                for kv in ("int8", "int4"):
                    yield replace(case, contexts=(40, 130), kv=kv)
        window = AttentionCase(
            dtype=dtype, dim=128, value_dim=128, group=4, window=100, softcap=30.0, tuning=tuning
        )
        yield replace(window, contexts=(300, 40), rows=2)
        yield replace(window, contexts=(300, 40), chunks=(64, 9))
        for heads in (16, 128):
            yield MlaCase(dtype=dtype, heads=heads, contexts=(1, 200), tuning=split)
        for bits in (8, 4):
            yield QuantizeCase(dtype=dtype, bits=bits, shape=(17, 4, 128))
            for rows in (1, 2, 5, 8, 16):
                yield QmmCase(rows, 1024, 256, bits, 64, dtype)
    for vocabulary in (1000, 151_936):
        yield SampleCase(vocabulary)


def check_case(case: Case, launch: Launcher) -> CheckResult:
    """Run one vector; a compilation error is a failed check, not an exception."""
    problem = case.build()
    try:
        answer = problem.run(launch)
        mx.eval(answer)
    except (RuntimeError, ValueError) as error:
        return CheckResult(problem.name, "failed", f"{type(error).__name__}: {str(error)[:2000]}")
    size = problem.error(answer)
    status = "ok" if size <= problem.tolerance else "failed"
    return CheckResult(problem.name, status, f"error {size:.1e}, {problem.tolerance:.0e} allowed")


def check_writes_in_place(pool_bytes: int = 1 << 27) -> CheckResult:
    """Writing rows must not copy the pool: the peak stays flat."""
    name = "KV writes in place"
    spec = KVLayerSpec(8, 128, 128, mx.float16, None)
    layer = KVLayer(spec, 16)
    layer.resize(pool_bytes // (16 * spec.bytes_per_token))
    rows = mx.ones((32, 8, 128), mx.float16)
    blocks, offsets = mx.arange(32), mx.zeros((32,), mx.int32)
    slots = Slots(blocks, offsets)
    mx.eval(rows, slots.index(8))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(4):
        layer.write(rows, rows, slots)
        mx.eval(layer.arrays())
    extra = mx.get_peak_memory() - before
    status = "ok" if extra < pool_bytes // 16 else "failed"
    return CheckResult(
        name, status, f"{extra >> 20} MiB extra for a pool of {pool_bytes >> 20} MiB"
    )

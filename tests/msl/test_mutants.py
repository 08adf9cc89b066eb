"""The bench kills every seeded bug, and does not kill the kernels as they are (test_kernels)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlx_cb.attention.kernel_cases import AttentionCase, MlaCase, Problem, QuantizeCase
from mlx_cb.attention.kernels import KernelCall, kernel_names, load_kernel
from mlx_cb.attention.tuning import Tuning
from mlx_cb.model.metal_cases import QmmCase, SampleCase

from .emulator import Schedule, emulate_report
from .mutants import MUTANTS, Mutant

_SPLIT = Tuning(partition=16)
_DECODE = [
    AttentionCase(contexts=(1, 17, 0, 70), group=3, kv_heads=2),
    AttentionCase(
        dim=128,
        value_dim=128,
        group=5,
        kv_heads=2,
        rows=2,
        contexts=(40, 26),
        window=25,
        softcap=3.0,
        sinks=True,
    ),
    AttentionCase(
        contexts=(40, 16, 33),
        group=2,
        kv_heads=2,
        rows=2,
        sinks=True,
        window=30,
        tuning=_SPLIT,
    ),
    AttentionCase(contexts=(40, 3), group=2, tuning=_SPLIT),
    AttentionCase(contexts=(40, 3), window=9),
    AttentionCase(contexts=(70,), sharpness=64.0),
]
_PREFILL = [
    AttentionCase(contexts=(40, 20), chunks=(35, 9), group=2, kv_heads=2, sinks=True),
    AttentionCase(contexts=(60, 20), chunks=(35, 9), window=11, sinks=True, group=2),
    AttentionCase(contexts=(20,), chunks=(9,), dim=512, value_dim=512),
]


@cache
def problems(kernel: str) -> list[Problem]:
    """Small problems that reach every branch of a kernel."""
    if kernel == "qmm_small":
        return [
            QmmCase(rows, 320, 45, bits, 32, mx.float32).build() for rows, bits in ((3, 4), (9, 8))
        ]
    if kernel == "sample_rows":
        return [SampleCase(300).build()]
    cases: dict[str, list] = {
        "paged_decode": _DECODE,
        "paged_decode_merge": _DECODE[2:],
        "paged_prefill": _PREFILL,
        "mla_decode": [MlaCase(heads=20, contexts=(40, 3), tuning=_SPLIT), MlaCase(heads=4)],
        "kv_quantize": [
            QuantizeCase(bits=8, shape=(3, 1, 96)),
            QuantizeCase(bits=4, shape=(3, 1, 96)),
        ],
    }
    return [case.build() for case in cases[kernel]]


def _kill(mutant: Mutant | None, kernel: str) -> str | None:
    """How the bench noticed, or None. Without a mutant: the kernel as it is."""
    for check in (False, True):
        for problem in problems(kernel):
            answers = []
            for schedule in (Schedule.FORWARD, Schedule.REVERSE):
                found: list[str] = []
                answer = problem.run(_mutating(mutant, found, schedule, check))
                if found:
                    return found[0]
                if not problem.error(answer) <= problem.tolerance / 2:
                    return f"error {problem.error(answer):.1e} on {problem.name}"
                answers.append(np.array(answer.astype(mx.float32)))
            if not np.array_equal(*answers):
                return "the bits depend on the order of execution"
    return None


def _mutating(
    mutant: Mutant | None, found: list[str], schedule: Schedule, check: bool
) -> Callable[[KernelCall], list[mx.array]]:
    def launch(call: KernelCall) -> list[mx.array]:
        if mutant is not None and call.kernel.name == mutant.kernel:
            kernel = replace(call.kernel, source=mutant.apply(call.kernel.source))
            call = replace(call, kernel=kernel)
        outputs, report = emulate_report(call, schedule=schedule, check=check)
        found.extend(report.findings)
        return outputs

    return launch


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.kernel}: {m.label}" for m in MUTANTS])
def test_mutant_is_killed(mutant: Mutant) -> None:
    assert _kill(mutant, mutant.kernel) is not None


@pytest.mark.slow
@pytest.mark.parametrize("kernel", kernel_names())
def test_kernel_itself_lives(kernel: str) -> None:
    assert _kill(None, kernel) is None


@pytest.mark.parametrize(
    "mutant", MUTANTS[::12], ids=[f"{m.kernel}: {m.label}" for m in MUTANTS[::12]]
)
def test_some_mutants_quickly(mutant: Mutant) -> None:
    assert _kill(mutant, mutant.kernel) is not None


def test_every_kernel_has_mutants() -> None:
    counts = Counter(m.kernel for m in MUTANTS)
    assert set(counts) == set(kernel_names())
    assert min(counts.values()) >= 5
    assert len(MUTANTS) >= 40
    for mutant in MUTANTS:
        assert mutant.apply(load_kernel(mutant.kernel).source)

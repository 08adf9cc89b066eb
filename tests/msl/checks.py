"""What every kernel must pass in the bench: lint, error, schedules, check mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlx_cb.attention.kernel_cases import Problem
from mlx_cb.attention.kernels import MIN_ELEMENTS, KernelCall

from .capture import capture, write_kernel
from .emulator import Report, Schedule, emulate_report
from .lint import lint


def launcher(
    reports: list[Report], schedule: Schedule = Schedule.FORWARD, check: bool = False, seed: int = 1
) -> Callable[[KernelCall], list[mx.array]]:
    """A launcher that keeps the reports."""

    def launch(call: KernelCall) -> list[mx.array]:
        outputs, report = emulate_report(call, schedule=schedule, check=check, seed=seed)
        reports.append(report)
        return outputs

    return launch


def assert_clean_text(call: KernelCall) -> None:
    """The text passes the lint at both metadata sizes, and MLX writes it as we think it does."""
    assert [a.size for a in call.inputs if a.size < MIN_ELEMENTS] == []
    for sized in (call, with_small_metadata(call)):
        text = capture(sized)
        assert text == write_kernel(sized)
        assert lint(text) == []


def assert_correct(problem: Problem) -> None:
    """Right within tolerance, nothing found, and the same bits in three orders of execution."""
    answers = []
    for schedule, seed in ((Schedule.FORWARD, 1), (Schedule.REVERSE, 1), (Schedule.RANDOM, 5)):
        reports: list[Report] = []
        answer = problem.run(launcher(reports, schedule, seed=seed))
        assert [f for report in reports for f in report.findings] == [], problem.name
        assert problem.error(answer) <= problem.tolerance, problem.name
        answers.append(np.array(answer.astype(mx.float32)))
    assert np.array_equal(answers[0], answers[1]), problem.name
    assert np.array_equal(answers[0], answers[2]), problem.name


def assert_checked(problem: Problem) -> list[Report]:
    """Nothing found in check mode. Returns the dispatches' reports."""
    reports: list[Report] = []
    answer = problem.run(launcher(reports, Schedule.RANDOM, check=True, seed=9))
    assert [f for report in reports for f in report.findings] == [], problem.name
    assert problem.error(answer) <= problem.tolerance, problem.name
    return reports


METADATA = {
    "block_tables",
    "context_lens",
    "query_starts",
    "work",
    "dims",
    "scalars",
    "sinks",
    "top_k",
    "top_p",
    "min_p",
}


def with_small_metadata(call: KernelCall) -> KernelCall:
    """The call without padding: metadata cut to 3 elements, so `constant` pointers."""
    cut = tuple(
        a[:3] if name in METADATA else a
        for name, a in zip(call.kernel.inputs, call.inputs, strict=True)
    )
    return replace(call, inputs=cut)

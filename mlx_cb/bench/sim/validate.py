"""Holds the simulator against real runs (goal G22) and remembers the result.

Reads reports of `mlx-cb bench`. Knows nothing about how servers are started.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from mlx_cb.bench.metrics import look_up
from mlx_cb.bench.report import Report
from mlx_cb.bench.sim.engines import ENGINES, Engine, engine, simulate
from mlx_cb.bench.sim.fit import Measured
from mlx_cb.bench.sim.measured import Description, our_steps
from mlx_cb.bench.sim.probe import Probe
from mlx_cb.bench.sim.substrate import Substrate
from mlx_cb.bench.sim.users import OneUser
from mlx_cb.bench.stats import median
from mlx_cb.bench.workloads.base import Workload, make
from mlx_cb.errors import InvalidRequest

STEP_TOLERANCE = 0.10
TAIL_TOLERANCE = 0.25
TAILS = ("ttft.p95", "itl.p99")
DRAWS = 9  # simulations with other noise; the median of what they say is the prediction
SHOWN = ("ttft.p50", "output_tok_s", "goodput")  # compared without a tolerance

RECORD = Path(__file__).with_name("validation.json")

_FLAGS = {
    "--scheduler": "policy",
    "--max-num-seqs": "max_num_seqs",
    "--itl-target-ms": "itl_target_ms",
    "--max-queue-wait-s": "max_queue_wait_s",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--prefill-step-size": "prefill_step_size",
    "--prompt-concurrency": "prompt_concurrency",
    "--decode-concurrency": "decode_concurrency",
}
_PEER = "mlx_cb.bench.peer_launcher"


class Check(msgspec.Struct, frozen=True):
    """One figure, predicted and measured.

    Attributes:
        error: |predicted - measured| / measured; for step time, of the median of each kind of
            step (see `kind_of`), averaged over the steps: a step's own noise is not the model's.
        tolerance: None for a figure that is only shown.
    """

    run: str
    server: str
    figure: str
    measured: float
    predicted: float
    error: float
    tolerance: float | None = None

    @property
    def is_within(self) -> bool:
        """False beyond the tolerance."""
        return self.tolerance is None or self.error <= self.tolerance


class Validation(msgspec.Struct, frozen=True):
    """The outcome of a validation, as it is kept beside the simulator."""

    date: str
    machine: str
    fitted_on: str
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Every figure with a tolerance is within it, and there was one of each kind."""
        kinds = {check.figure for check in self.checks if check.tolerance is not None}
        return kinds == {"step time", *TAILS} and all(c.is_within for c in self.checks)

    def summary(self) -> str:
        """One line for people."""
        worst = {
            figure: max((c.error for c in self.checks if c.figure == figure), default=None)
            for figure in ("step time", *TAILS)
        }
        errors = ", ".join(
            f"{figure} within {error:.0%}" for figure, error in worst.items() if error is not None
        )
        verdict = "passed" if self.passed else "FELL SHORT"
        return f"checked against real runs on {self.machine}, {self.date}: {errors}; {verdict}"


def validate(report: Report, description: Description, *, skip: Sequence[str] = ()) -> Validation:
    """Simulate every run of the report and compare. `skip` names the runs it was fitted on.

    Steps come from the report's `journals` (see `here`), ours also from its last rounds. Where the
    report has `paces`, the machine is simulated as it was around the run.

    Raises InvalidRequest when the report holds no run that can be simulated.
    """
    checks: list[Check] = []
    warmed_by = (Probe(),) if "paces" in report else ()
    journals = msgspec.convert(report.get("journals", {}), dict[str, list[Measured]])
    for run in report["runs"]:
        if "workload" not in run or run["name"] in skip:
            continue
        ours, peer = report.get("paces", {}).get(run["name"], (1.0, 1.0))
        substrate = description.at_pace(ours, peer).substrate()
        for label, server in run["servers"].items():
            chosen = engine_of(label, server.get("command", []))
            if chosen is None:
                continue
            given = journals.get(f"{run['name']}/{label}")
            checks += _steps_check(run, label, server, given, substrate)
            checks += _figure_checks(run, label, server, chosen, substrate, warmed_by)
    if not checks:
        raise InvalidRequest("the report holds no workload on a server that can be simulated")
    machine = str(report["environment"].get("processor", "this machine"))
    date = str(report.get("created", time.strftime("%Y-%m-%d")))[:10]
    return Validation(date, machine, description.made, checks)


def engine_of(label: str, command: Sequence[str]) -> Engine | None:
    """The engine that simulates a server started with this command; None for an unknown one."""
    if _PEER in command:
        name = "P"
    elif "mlx_cb" in command and "serve" in command:
        name = "ours"
    else:
        return None
    settings = []
    for flag, value in pairwise(command):
        if flag in _FLAGS and value != "auto" and hasattr(ENGINES[name], _FLAGS[flag]):
            settings.append(f"{_FLAGS[flag]}={value}")
    found = engine(f"{name}:{','.join(settings)}")
    return Engine(label, found.settings)


def _steps_check(
    run: Mapping[str, Any],
    label: str,
    server: Mapping[str, Any],
    given: Sequence[Measured] | None,
    substrate: Substrate,
) -> list[Check]:
    """Predicted against measured seconds, step by step, of the shapes that really ran."""
    is_peer = _PEER in server.get("command", [])
    steps = given if given is not None else our_steps(server["last_round"]["steps"])
    if not steps:
        return []
    cost = substrate.peer if is_peer else substrate.ours
    predicted = [sum(cost.seconds(shape) for shape in step.shapes) for step in steps]
    pairs = [(p, step.seconds) for p, step in zip(predicted, steps, strict=True)]
    kinds: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for step, pair in zip(steps, pairs, strict=True):
        kinds[kind_of(step)].append(pair)
    own = [kinds[kind_of(step)] for step in steps]
    errors = {
        "step time": _mean([_error(_middle_pair(kind)) for kind in own]),
        "step, each": _mean([_error(pair) for pair in pairs]),
        "step, noise": _mean([_noise(pair, k) for pair, k in zip(pairs, own, strict=True)]),
    }
    foreseen, measured = _mean_pair(pairs)
    return [
        Check(
            *(run["name"], label, figure, measured, foreseen, error),
            STEP_TOLERANCE if figure == "step time" else None,
        )
        for figure, error in errors.items()
    ]


def kind_of(step: Measured) -> tuple[object, ...]:
    """Steps of one kind have as many passes, chunks or none, rows within half an octave, and move
    keys and values or do not: their times differ by what the machine does beside them."""
    rows = sum(shape.rows for shape in step.shapes)
    return (
        int(2 * math.log2(max(rows, 1))),
        len(step.shapes),
        any(shape.chunks for shape in step.shapes),
        any(shape.copied for shape in step.shapes),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_pair(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    predicted, measured = zip(*pairs, strict=True)
    return _mean(predicted), _mean(measured)


def _middle_pair(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    predicted, measured = zip(*pairs, strict=True)
    return median(predicted), median(measured)


def _error(pair: tuple[float, float]) -> float:
    predicted, measured = pair
    return abs(predicted - measured) / measured


def _noise(pair: tuple[float, float], kind: Sequence[tuple[float, float]]) -> float:
    """How far a step is from its prediction, beyond how far its kind is."""
    predicted, measured = pair
    usual_predicted, usual_measured = _middle_pair(kind)
    return abs(measured / predicted * usual_predicted / usual_measured - 1)


def _figure_checks(
    run: Mapping[str, Any],
    label: str,
    server: Mapping[str, Any],
    chosen: Engine,
    substrate: Substrate,
    warmed_by: Sequence[Workload],
) -> list[Check]:
    workload = make(run["workload"], run["parameters"])
    if "--keys" not in server.get("command", []):
        workload = OneUser(workload)
    drawn = [
        simulate(
            run["name"],
            workload,
            chosen,
            substrate,
            seed=run["seed"],
            rounds=run["rounds"],
            noise=1000 * draw,
            warmed_by=warmed_by,
        ).figures
        for draw in range(DRAWS)
    ]
    checks = []
    for figure in (*TAILS, *SHOWN):
        measured = look_up(server["figures"], figure)
        found = [look_up(figures, figure) for figures in drawn]
        values = [value for value in found if value is not None]
        if measured is None or not values:
            continue
        predicted = median(values)
        error = abs(predicted - measured) / measured if measured else abs(predicted)
        tolerance = TAIL_TOLERANCE if figure in TAILS else None
        checks.append(Check(run["name"], label, figure, measured, predicted, error, tolerance))
    return checks


def keep(validation: Validation, path: Path = RECORD) -> None:
    """Remember it; it is printed under every simulated figure."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(validation), indent=1) + b"\n")


def last_validation(path: Path = RECORD) -> Validation | None:
    """The one that is kept, if any."""
    if not path.is_file():
        return None
    return msgspec.json.decode(path.read_bytes(), type=Validation)

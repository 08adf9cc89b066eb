"""Reports and tables of simulated figures. Nothing leaves here without the word "simulated".

The label is in every name that a figure stands under, so that whatever shows the report shows it
too, and `table` refuses an entry that has lost it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from mlx_cb.bench.plots import seconds_text
from mlx_cb.bench.report import figure_of
from mlx_cb.bench.sim.engines import Outcome
from mlx_cb.bench.sim.goals import Goal
from mlx_cb.bench.sim.sizing import Advice
from mlx_cb.bench.sim.substrate import Substrate
from mlx_cb.bench.sim.validate import Validation, last_validation
from mlx_cb.bench.table import ROWS, Row, figure_text
from mlx_cb.bench.workloads.base import Workload

LABEL = "simulated"
FORMAT = "mlx-cb-sim/1"

_ROWS = [
    *ROWS,
    Row("calls refused", "refused", ""),
    Row("Retry-After, median error", "retry_after_error.p50", "%"),
    Row("predicted wait, median error", "wait_error.p50", "%"),
]


class UnlabelledError(ValueError):
    """A simulated figure was about to be shown as if it had been measured."""


def new_report() -> dict[str, Any]:
    """A report without runs. It holds no date: equal seeds give equal reports."""
    return {"format": FORMAT, "figures": LABEL, "validation": provenance(), "runs": []}


def provenance() -> str:
    """How far simulated figures can be trusted, in a line."""
    validation = last_validation()
    if validation is None:
        return f"{LABEL}; never checked against real runs"
    return f"{LABEL}; the simulator was {validation.summary()}"


def entry(
    name: str,
    workload: Workload,
    substrate: Substrate,
    outcomes: Sequence[Outcome],
    *,
    seed: int,
    rounds: int,
) -> dict[str, Any]:
    """One workload on its simulated servers, as it goes into `runs`."""
    return {
        "name": f"{name} on {substrate.name} ({LABEL})",
        "workload": workload.name,
        "parameters": workload.parameters(),
        "seed": seed,
        "rounds": rounds,
        "servers": {
            f"{outcome.label} ({LABEL})": {
                "figures": outcome.figures,
                "by_round": outcome.rounds,
            }
            for outcome in outcomes
        },
    }


def check_label(run: dict[str, Any]) -> None:
    """Raises UnlabelledError when a name has lost the label."""
    for name in (run["name"], *run["servers"]):
        if LABEL not in name:
            raise UnlabelledError(f"{name!r} does not say that its figures are {LABEL}")


def table(run: dict[str, Any]) -> Table:
    """A row per figure, a column per server; below it, how far it can be trusted."""
    check_label(run)
    labels = list(run["servers"])
    shown = Table(title=run["name"], title_justify="left", caption=provenance())
    shown.add_column("")
    for label in labels:
        shown.add_column(label, justify="right")
    for row in _ROWS:
        values = [figure_of(run, label, row.metric) for label in labels]
        if any(value is not None for value in values):
            shown.add_row(row.name, *(figure_text(row.unit, value) for value in values))
    failures = [run["servers"][label]["figures"].get("failures") or {} for label in labels]
    if any(failures):
        texts = (", ".join(f"{n} {kind}" for kind, n in own.items()) for own in failures)
        shown.add_row("failures", *texts)
    return shown


def validation_table(validation: Validation) -> Table:
    """Predicted beside measured, figure by figure."""
    shown = Table(title=f"Simulator against real runs on {validation.machine}")
    for column in ("run", "server", "figure", "measured", f"{LABEL}", "error", "allowed", ""):
        shown.add_column(
            column, justify="left" if column in ("run", "server", "figure") else "right"
        )
    for check in validation.checks:
        unit = {"output_tok_s": "", "goodput": "%"}.get(check.figure, "s")
        allowed = "–" if check.tolerance is None else f"{check.tolerance:.0%}"
        verdict = "" if check.tolerance is None else "ok" if check.is_within else "BEYOND"
        shown.add_row(
            *(check.run, check.server, check.figure),
            *(figure_text(unit, value) for value in (check.measured, check.predicted)),
            *(f"{check.error:.0%}", allowed, verdict),
            style="" if check.is_within else "red",
        )
    return shown


def goals_table(goals: Sequence[Goal], machine: str) -> Table:
    """What came out beside what had to."""
    shown = Table(title=f"Goals on {machine} ({LABEL})", title_justify="left", caption=provenance())
    for column in ("goal", "what", LABEL, "of", "goal is", ""):
        shown.add_column(column, justify="right" if column in (LABEL, "goal is") else "left")
    for goal in goals:
        sign = "≥" if goal.is_minimum else "≤"
        verdict = "met" if goal.is_met else "FALLS SHORT"
        cells = (f"{goal.value:.3g}", goal.of, f"{sign} {goal.threshold:.3g}", verdict)
        shown.add_row(goal.goal, goal.what, *cells, style="" if goal.is_met else "red")
    return shown


def advice_table(advice: Sequence[Advice], machine: str) -> Table:
    """Settings by number of people."""
    shown = Table(
        title=f"Settings for people at work at once on {machine} ({LABEL})",
        title_justify="left",
        caption=provenance(),
    )
    for column in (
        *("people", "--max-num-seqs", "--itl-target-ms", "good calls", "first token p95"),
        *("gap p99", "tokens/s", "wait p99", "good one at a time", ""),
    ):
        shown.add_column(column, justify="right")
    for one in advice:
        shown.add_row(
            *(str(one.people), str(one.max_num_seqs), f"{one.itl_target_ms:g}"),
            *(f"{one.goodput:.0%}", seconds_text(one.ttft_p95), seconds_text(one.itl_p99)),
            *(f"{one.output_tok_s:.0f}", seconds_text(one.wait_s), f"{one.one_at_a_time:.0%}"),
            "" if one.is_enough else "too many people",
        )
    return shown

"""Carries a measurement through: starts and warms servers, puts workloads on them, fills a report.

Owns the order of things and the verdict on whether the machine was quiet enough. Knows nothing
about terminals; progress is told to whoever asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlx_cb.bench import environment, report
from mlx_cb.bench.compare import Conditions, Progress, compare, warm
from mlx_cb.bench.gates import Gate, judge_all
from mlx_cb.bench.report import Report
from mlx_cb.bench.servers import Cores, RunningServer, ServerSpec
from mlx_cb.bench.workloads.base import Workload
from mlx_cb.errors import MlxCbError

LOAD_LIMIT = 2.0
FOREIGN_LIMIT = 0.5


class MachineTooBusyError(MlxCbError):
    """Other work on this machine would decide the figures."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How strictly the machine's state is taken, and which cores are used."""

    allow_load: bool = False
    pin: str = "auto"

    def check_before(self) -> float:
        """Load average before anything is started. Raises MachineTooBusyError above the limit."""
        average = os.getloadavg()[0]
        if average > LOAD_LIMIT and not self.allow_load:
            raise MachineTooBusyError(
                f"load average is {average:.2f}, above {LOAD_LIMIT:g}: figures measured now would "
                "not be these servers'. Wait, or give --allow-load to measure without a conclusion"
            )
        return average


def _silent(label: str, record: object) -> None:
    """Progress that nobody watches."""


@dataclass(slots=True)
class Fleet:
    """The servers that are up, by spec; started once, warmed once."""

    cores: Cores
    conditions: Conditions
    running: dict[ServerSpec, RunningServer] = field(default_factory=dict)

    async def bring_up(self, specs: Sequence[ServerSpec]) -> list[RunningServer]:
        """The servers of these specs, in order, ready and warm; all others are stopped.

        A server that idles beside the measured ones would still hold memory and time slices.
        """
        for spec in [spec for spec in self.running if spec not in specs]:
            self.running.pop(spec).stop()
        for spec in specs:
            if spec not in self.running:
                server = RunningServer(spec, self.cores)
                self.running[spec] = server
                await server.ready()
                await warm(server, self.conditions)
        return [self.running[spec] for spec in specs]

    def stop(self) -> None:
        """Stop everything that was started here."""
        for server in self.running.values():
            server.stop()
        self.running.clear()


@dataclass(frozen=True, slots=True)
class Assignment:
    """One workload and the servers it goes to."""

    name: str
    workload: Workload
    specs: tuple[ServerSpec, ...]


async def measure_load(
    assignments: Iterable[Assignment],
    conditions: Conditions,
    policy: Policy,
    model: tuple[str, Path | None] = ("unknown", None),
    progress: Progress = _silent,
) -> Report:
    """Run each assignment and return the report with its verdict, not yet judged by gates.

    `model` is its name and, where it is on this machine, its folder.
    """
    average = policy.check_before()
    cores = Cores.choose(policy.pin)
    name, folder = model
    facts = {name: environment.model_facts(folder)} if folder else {}
    result = report.new_report(environment.machine(), facts)
    fleet = Fleet(cores, conditions)
    cores.pin_client()
    try:
        for assignment in assignments:
            servers = await fleet.bring_up(assignment.specs)
            comparison = await compare(
                assignment.name, assignment.workload, servers, conditions, progress
            )
            result["runs"].append(report.comparison_entry(comparison, name))
    finally:
        fleet.stop()
    conclude(result, average, policy)
    return result


def conclude(result: Report, average_before: float, policy: Policy) -> None:
    """Write down whether the machine was quiet enough for the figures to mean anything."""
    foreign = [
        load["foreign_cores"]
        for run in result["runs"]
        for server in run["servers"].values()
        for load in server.get("loads", [])
        if load["foreign_cores"] is not None
    ]
    worst = max(foreign, default=None)
    quiet = average_before <= LOAD_LIMIT and (worst is None or worst <= FOREIGN_LIMIT)
    text = f"Load average before: {average_before:.2f} (limit {LOAD_LIMIT:g})."
    if worst is not None:
        text += f" Other work kept up to {worst:.2f} cores busy (limit {FOREIGN_LIMIT:g})."
    if not quiet:
        text += " Too busy: no conclusion can be drawn from these figures."
        text += " They were asked for with --allow-load." if policy.allow_load else ""
    result["verdict"] = {
        "load_before": average_before,
        "foreign_cores": worst,
        "quiet": quiet,
        "concluded": quiet or policy.allow_load,
        "text": text,
    }


def apply_gates(result: Report, gates: tuple[Gate, ...]) -> bool:
    """Judge the gates by the report's figures, write them into it; True when all pass."""
    results = judge_all(gates, report.measured(result))
    result["gates"] = [report.gate_entry(judged, result) for judged in results]
    return all(judged.passed for judged in results)

"""Measures this machine for the simulator: a probe to fit the cost of passes on, and other loads.

Starts our server and mlx_lm.server on the same fp32 weights, as `bench compare` does. What the
probe measures is never what the simulator is judged by. A shared machine is not equally fast for a
quarter of an hour, nor always for a minute: a short probe runs before and behind each pass of a
load, and the load is predicted for the machine as it was around it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from mlx_cb.bench import environment, report
from mlx_cb.bench.calls import Run
from mlx_cb.bench.compare import Comparison, Conditions, compare
from mlx_cb.bench.exchange import get_json_bytes
from mlx_cb.bench.measuring import Fleet, Policy, conclude
from mlx_cb.bench.peer_launcher import JOURNAL
from mlx_cb.bench.prompts import TokenizerWords
from mlx_cb.bench.report import Report
from mlx_cb.bench.servers import Cores, Kind, RunningServer, ServerSpec
from mlx_cb.bench.sim.fit import Measured
from mlx_cb.bench.sim.measured import content_of, describe, our_steps, peer_steps
from mlx_cb.bench.sim.probe import SHORT, Probe
from mlx_cb.bench.workloads.base import make

LABELS = ("ours", "P")
MEASURED_ROUNDS = 3  # of each load: a minute in which the machine is slow is not the middle one

#: Conversations at a rate that both can hold: the queue of who cannot grows as long as the load
#: lasts, and its tails hang on which prompts happen to share a pass.
LOADS: tuple[tuple[str, dict[str, object]], ...] = (
    ("churn", {"streams": 12, "calls": 48}),
    ("poisson", {"rate": 0.4, "calls": 24, "scale": 16}),
    ("hog", {"hog_calls": 10, "hog_prompt": 256, "hog_output": 16, "victims": 4}),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the caller decides. `announce` hears what is measured next; `keep` gets the report
    after each part, so that what was measured before an interruption is not lost."""

    policy: Policy = field(default_factory=Policy)
    seed: int = 1
    rounds: int = MEASURED_ROUNDS
    loads: Sequence[tuple[str, Mapping[str, object]]] = LOADS
    announce: Callable[[str], None] = lambda what: None
    keep: Callable[[Report], None] = lambda report: None


async def measure_here(name: str, folder: Path, settings: Settings) -> Report:
    """Put a probe, each load, and the probe again on both servers. `folder` holds fp32 weights.

    The report has, beside what all reports have, the `description` of this machine that was fitted
    on the probes, the `paces` of both servers around each load, and the `journals` of all measured
    steps by run and server.
    """
    average = settings.policy.check_before()
    cores = Cores.choose(settings.policy.pin)
    conditions = Conditions(TokenizerWords(folder), settings.rounds, settings.seed)
    result = report.new_report(environment.machine(), {name: environment.model_facts(folder)})
    result["journals"] = {}
    with tempfile.TemporaryDirectory() as scratch:
        journal = Path(scratch) / "peer.jsonl"
        specs = [
            ServerSpec(LABELS[0], Kind.MLX_CB, str(folder)),
            ServerSpec(LABELS[1], Kind.MLX_LM, str(folder), (JOURNAL, str(journal))),
        ]
        fleet = Fleet(cores, conditions)
        cores.pin_client()
        try:
            servers = await fleet.bring_up(specs)
            probes = Probes(conditions, journal)
            settings.announce("probe")
            for server in servers:
                await probes.run(server, Probe())
            for load, parameters in settings.loads:
                settings.announce(load)
                workload, before = make(load, parameters), probes.counts()
                compared = await compare(
                    load, workload, servers, conditions, around=probes.run_short
                )
                probes.loads[load] = (before, probes.counts())
                result["journals"] |= _journals(compared, journal)
                result["runs"].append(report.comparison_entry(compared, name))
                await _describe(name, result, probes, servers[0])
                settings.keep(result)
            settings.announce("probe again")
            for server in servers:
                await probes.run(server, Probe())
            await _describe(name, result, probes, servers[0])
        finally:
            fleet.stop()
    conclude(result, average, settings.policy)
    settings.keep(result)
    return result


class Probes:
    """What the probes measured, by server.

    Attributes:
        steps: those of each probe.
        calls: the single prompts of all probes.
        loads: how many probes there were before a load and behind it.
    """

    def __init__(self, conditions: Conditions, journal: Path) -> None:
        self.steps: dict[str, list[list[Measured]]] = {label: [] for label in LABELS}
        self.calls: dict[str, list[dict[str, float]]] = {label: [] for label in LABELS}
        self.loads: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
        self._conditions = replace(conditions, rounds=1)
        self._journal = journal

    def counts(self) -> dict[str, int]:
        """Probes so far."""
        return {label: len(steps) for label, steps in self.steps.items()}

    async def run_short(self, server: RunningServer) -> None:
        """Enough to tell the pace of the machine."""
        await self.run(server, SHORT)

    async def run(self, server: RunningServer, workload: Probe) -> None:
        """Measure once more."""
        label = server.spec.label
        name = f"probe {len(self.steps[label])}"
        compared = await compare(name, workload, [server], self._conditions)
        run = compared.outcomes[label].runs[0]
        self.steps[label].append(_steps_of(label, run, self._journal))
        self.calls[label] += _alone(run)

    def paces(self, load: str, found: Mapping[str, Sequence[float]]) -> list[float]:
        """Mean pace of each server in the probes around a load, of those of all probes."""
        before, behind = self.loads[load]
        return [
            sum(found[label][before[label] : behind[label]]) / (behind[label] - before[label])
            for label in LABELS
        ]


def _steps_of(label: str, run: Run, journal: Path) -> list[Measured]:
    if label == LABELS[0]:
        return our_steps(run.steps)
    ended = run.began + max(record.ended_s for record in run.records)
    return peer_steps(journal, run.began, ended)


def _journals(compared: Comparison, journal: Path) -> dict[str, Any]:
    """Steps of all rounds, ours and the peer's, as plain data."""
    found = {
        f"{compared.name}/{label}": [
            step for run in outcome.runs for step in _steps_of(label, run, journal)
        ]
        for label, outcome in compared.outcomes.items()
    }
    steps: dict[str, Any] = msgspec.to_builtins(found)
    return steps


async def _describe(name: str, result: Report, probes: Probes, server: RunningServer) -> None:
    """Put the probes' journals and what they say of this machine into the result."""
    answer = await get_json_bytes(server.endpoint, "/status")
    status: dict[str, Any] = msgspec.json.decode(answer.body)
    engine = status.get("engine", status)
    ours, peer = ((probes.steps[label], probes.calls[label]) for label in LABELS)
    processor = result["environment"]["processor"]
    description, paces = describe(
        f"{name} fp32 on {processor}",
        f"fitted on the probes of {result['created'][:10]}",
        (ours, peer),
        num_blocks=int(engine["blocks"]["capacity"]),
        max_tokens=int(engine["model_info"]["max_model_len"]),
    )
    by_label = dict(zip(LABELS, paces, strict=True))
    result["description"] = content_of(description)
    result["paces"] = {load: probes.paces(load, by_label) for load in probes.loads}
    result["journals"] |= {
        f"probe {number}/{label}": msgspec.to_builtins(steps)
        for label in LABELS
        for number, steps in enumerate(probes.steps[label])
    }


def _alone(run: Run) -> list[dict[str, float]]:
    """When the single prompts were sent and heard, on the machine's clock."""
    return [
        {"sent": run.began + record.sent_s, "first": run.began + record.chunk_times_s[0]}
        for record in run.records
        if record.call.group == "alone" and record.chunk_times_s
    ]

"""All measurements of a gates file in one run: which servers, which model, in which order.

Loads go through `compare`; what no load can measure (start-up, a client that goes away, host cost
inside the engine) is measured here or by `host.py` in a process of its own. Judges nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mlx_cb.bench import environment, report
from mlx_cb.bench.compare import Conditions, Progress, compare, merge
from mlx_cb.bench.disconnect import steps_for_the_gone
from mlx_cb.bench.endurance import endure
from mlx_cb.bench.gates import GateFile, RunEntry, ServerEntry
from mlx_cb.bench.keyring import Keyring, make_keyring
from mlx_cb.bench.measuring import Fleet, Policy, conclude
from mlx_cb.bench.metrics import Figures
from mlx_cb.bench.prompts import TokenizerWords
from mlx_cb.bench.report import Report
from mlx_cb.bench.restart import warm_restart
from mlx_cb.bench.servers import Cores, Kind, RunningServer, ServerSpec
from mlx_cb.bench.workloads.base import make
from mlx_cb.errors import InvalidRequest, MlxCbError


@dataclass(frozen=True, slots=True)
class Models:
    """Folders of the three forms a run may ask for."""

    float32: Path
    quantized: Path
    tiny: Path

    def folder(self, form: str) -> Path:
        """Raises InvalidRequest for an unknown form."""
        if form not in ("float32", "quantized", "tiny"):
            raise InvalidRequest(f"no model form {form!r}; there are: float32, quantized, tiny")
        return {"float32": self.float32, "quantized": self.quantized, "tiny": self.tiny}[form]


@dataclass(frozen=True, slots=True)
class SuiteSettings:
    """What the caller decides.

    Attributes:
        only: names of runs to take; empty takes all.
        rounds: instead of the file's own number.
        announce: hears the name of each run before it begins, with its place and the total.
        keep: gets the report after every run, so that a suite that is cut short is not lost.
    """

    policy: Policy = field(default_factory=Policy)
    seed: int = 1
    only: frozenset[str] = frozenset()
    rounds: int | None = None
    progress: Progress = lambda label, record: None
    announce: Callable[[str, int, int], None] = lambda name, number, total: None
    keep: Callable[[Report], None] = lambda report: None


def chosen_runs(file: GateFile, only: frozenset[str]) -> list[RunEntry]:
    """The file's runs, or those of the given names. Raises InvalidRequest for an unknown name."""
    unknown = only - {run.name for run in file.run}
    if unknown:
        raise InvalidRequest(f"no run named {', '.join(sorted(unknown))} in the gates file")
    return [run for run in file.run if not only or run.name in only]


async def run_suite(file: GateFile, models: Models, settings: SuiteSettings) -> Report:
    """Measure everything, one thing at a time.

    Raises MachineTooBusyError before anything is started.
    """
    average = settings.policy.check_before()
    runs = chosen_runs(file, settings.only)
    forms = dict.fromkeys(run.model for run in runs)
    facts = {form: environment.model_facts(models.folder(form)) for form in forms}
    result = report.new_report(environment.machine(), facts)
    suite = _Suite(file, models, settings)
    suite.cores.pin_client()
    try:
        for number, run in enumerate(runs):
            settings.announce(run.name, number + 1, len(runs))
            began = time.monotonic()
            entry = await suite.measure(run)
            result["runs"].append(entry | {"seconds": time.monotonic() - began})
            settings.keep(result)
    finally:
        suite.fleet.stop()
        suite.folder.cleanup()
    conclude(result, average, settings.policy)
    return result


class _Suite:
    """The servers of a suite while it runs; one fleet per model form."""

    def __init__(self, file: GateFile, models: Models, settings: SuiteSettings) -> None:
        self.file = file
        self.models = models
        self.settings = settings
        self.cores = Cores.choose(settings.policy.pin)
        self.words = TokenizerWords(models.float32)
        self.keyrings: dict[tuple[str, ...], Keyring] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="mlx-cb-bench-")
        self.fleet = Fleet(self.cores, Conditions(self.words))

    async def measure(self, run: RunEntry) -> dict[str, Any]:
        measures = {
            "load": self.load,
            "startup": self.startup,
            "restart": self.restart,
            "disconnect": self.disconnect,
            "endurance": self.endurance,
            "host": self.host,
        }
        if run.measures not in measures:
            raise InvalidRequest(f"{run.name}: no measurement {run.measures!r}")
        return await measures[run.measures](run)

    def specs(self, run: RunEntry) -> list[ServerSpec]:
        folder = str(self.models.folder(run.model))
        specs: list[ServerSpec] = []
        for label in run.servers:
            entry = self.file.server.get(label)
            if entry is None:
                raise InvalidRequest(f"{run.name}: no server {label!r} in the gates file")
            kind = Kind(entry.kind)
            model = None if kind is Kind.URL else folder
            flags, key = self.flags(entry), None
            if run.users and kind is Kind.MLX_CB:
                keyring = self.keyring(run)
                flags, key = (*flags, "--keys", str(keyring.path)), keyring.admin
            specs.append(ServerSpec(label, kind, model, flags, entry.url, key))
        return specs

    def flags(self, entry: ServerEntry) -> tuple[str, ...]:
        """The entry's flags, with a folder of this suite's own: what an earlier suite has left on
        a disk would be found again."""
        return tuple(flag.replace("{folder}", self.folder.name) for flag in entry.flags)

    def keyring(self, run: RunEntry) -> Keyring:
        """The keys of the run's users; runs with the same users share them, and their servers."""
        if run.users not in self.keyrings:
            self.keyrings[run.users] = make_keyring(Path(self.folder.name), run.users)
        return self.keyrings[run.users]

    def conditions(self, run: RunEntry) -> Conditions:
        rounds = self.settings.rounds or run.rounds
        fields = tuple(run.fields.items())
        keys = self.keyring(run).users if run.users else {}
        return Conditions(
            self.words, rounds=rounds, seed=self.settings.seed, fields=fields, keys=keys
        )

    async def load(self, run: RunEntry) -> dict[str, Any]:
        servers = await self.fleet.bring_up(self.specs(run))
        workload = make(run.workload, run.parameters)
        comparison = await compare(
            run.name, workload, servers, self.conditions(run), self.settings.progress
        )
        return report.comparison_entry(comparison, run.model)

    async def startup(self, run: RunEntry) -> dict[str, Any]:
        """Start each server alone, in turn, and time its first token."""
        self.fleet.stop()  # nothing else may run beside a start
        rounds: dict[str, list[Figures]] = {label: [] for label in run.servers}
        for _ in range(self.settings.rounds or run.rounds):
            for spec in self.specs(run):
                server = RunningServer(spec, self.cores)
                try:
                    rounds[spec.label].append(dataclasses.asdict(await server.ready()))
                finally:
                    server.stop()
        figures = {label: merge(times) for label, times in rounds.items()}
        return report.direct_entry(run.name, run.model, figures)

    async def restart(self, run: RunEntry) -> dict[str, Any]:
        """Each server alone, started twice over one SSD folder; medians over the rounds."""
        self.fleet.stop()
        figures = {}
        for spec in self.specs(run):
            rounds = [
                await warm_restart(spec, self.cores, self.conditions(run), self.settings.seed + n)
                for n in range(self.settings.rounds or run.rounds)
            ]
            figures[spec.label] = merge(rounds)
        return report.direct_entry(run.name, run.model, figures)

    async def disconnect(self, run: RunEntry) -> dict[str, Any]:
        """Median over the rounds of the steps a server still runs for a client that has gone."""
        servers = await self.fleet.bring_up(self.specs(run))
        figures = {}
        for server in servers:
            rounds = [
                await steps_for_the_gone(server, self.conditions(run), seed)
                for seed in range(self.settings.rounds or run.rounds)
            ]
            figures[server.spec.label] = merge(rounds)
        return report.direct_entry(run.name, run.model, figures)

    async def endurance(self, run: RunEntry) -> dict[str, Any]:
        """Each server alone, under churn for the run's `minutes`."""
        minutes = float(run.parameters.get("minutes", 20))
        figures = {}
        for spec in self.specs(run):
            (server,) = await self.fleet.bring_up([spec])
            figures[spec.label] = await endure(server, self.conditions(run), minutes)
        return report.direct_entry(run.name, run.model, figures)

    async def host(self, run: RunEntry) -> dict[str, Any]:
        """Run `host.py` alone: in a fresh process, and with no server up."""
        self.fleet.stop()
        command = [sys.executable, "-m", "mlx_cb.bench.host", str(self.models.folder(run.model))]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise MlxCbError(f"the host measurement failed: {done.stderr.strip()[-1500:]}")
        figures = msgspec.json.decode(done.stdout)
        return report.direct_entry(run.name, run.model, {"ours": figures})

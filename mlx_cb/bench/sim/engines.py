"""The servers that can be simulated, by name, and how one is put under a load."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mlx_cb.bench.calls import Run
from mlx_cb.bench.compare import merge, plan_seed
from mlx_cb.bench.metrics import Figures, measure
from mlx_cb.bench.sim.client import Client, SimServer
from mlx_cb.bench.sim.clock import VirtualClock
from mlx_cb.bench.sim.ours import OurServer
from mlx_cb.bench.sim.peer import TUNED, PeerServer, PeerSettings
from mlx_cb.bench.sim.substrate import Substrate
from mlx_cb.bench.workloads.base import Workload
from mlx_cb.bench.workloads.closed import Steady
from mlx_cb.config import SchedulerConfig
from mlx_cb.errors import InvalidRequest
from mlx_cb.standing import Standing


@dataclass(frozen=True, slots=True)
class Engine:
    """A server to simulate: `settings` is what it is started with, `standings` who has which."""

    label: str
    settings: SchedulerConfig | PeerSettings
    standings: Mapping[str, Standing] = field(default_factory=dict)

    def start(self, clock: VirtualClock, substrate: Substrate, seed: int) -> OurServer | PeerServer:
        """A fresh server under this clock."""
        if isinstance(self.settings, PeerSettings):
            return PeerServer(clock, substrate, self.settings, seed=seed)
        return OurServer(clock, substrate, self.settings, standings=self.standings, seed=seed)


ENGINES: dict[str, SchedulerConfig | PeerSettings] = {
    "ours": SchedulerConfig(),
    "fcfs": SchedulerConfig(policy="fcfs"),
    "static": SchedulerConfig(policy="static"),
    "one": SchedulerConfig(max_num_seqs=1),
    "P": PeerSettings(),
    "T": TUNED,
}


def engine(text: str) -> Engine:
    """`ours`, or `ours:max_num_seqs=16,itl_target_ms=50`: a name of ENGINES and settings.

    Raises InvalidRequest for an unknown name, setting or value.
    """
    name, _, rest = text.partition(":")
    if name not in ENGINES:
        raise InvalidRequest(f"no engine {name!r}; there are: {', '.join(ENGINES)}")
    settings = ENGINES[name]
    kinds = {field.name: type(getattr(settings, field.name)) for field in fields(settings)}
    values: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, found, value = pair.partition("=")
        if not found or key not in kinds:
            raise InvalidRequest(f"{name} has no setting {pair!r}; it has: {', '.join(kinds)}")
        try:
            values[key] = (int if kinds[key] is type(None) else kinds[key])(value)
        except ValueError as error:
            raise InvalidRequest(f"{name}: {key} cannot be {value!r}") from error
    return Engine(text, replace(settings, **values))


@dataclass(slots=True)
class Outcome:
    """All rounds of one simulated server under one workload."""

    label: str
    server: OurServer | PeerServer
    runs: list[Run] = field(default_factory=list)
    rounds: list[Figures] = field(default_factory=list)

    @property
    def figures(self) -> Figures:
        """Medians over the rounds."""
        return merge(self.rounds)


def simulate(
    name: str,
    workload: Workload,
    chosen: Engine,
    substrate: Substrate,
    *,
    seed: int = 1,
    rounds: int = 1,
    noise: int = 0,
    warmed_by: Sequence[Workload] = (),
) -> Outcome:
    """Put the workload on a fresh, warmed server, `rounds` times over, as `compare` does.

    The plans are those that `compare` would draw up for a run of this name. Another `noise` gives
    the passes other times around their means. What the server has run before matters: its cost
    model learns from it.
    """
    clock = VirtualClock()
    server = chosen.start(clock, substrate, seed + noise)
    outcome = Outcome(chosen.label, server)
    with _alone(seed):
        number = 0
        usual = (Steady(streams=streams, prompt=32, output=4) for streams in (1, 4))
        for turn, load in enumerate((*usual, *warmed_by), 1):
            run = _drive(clock, server, load, -turn, number)
            number += len(run.records)
        for turn in range(rounds):
            run = _drive(clock, server, workload, plan_seed(name, seed, turn), number)
            number += len(run.records)
            outcome.runs.append(run)
            outcome.rounds.append(measure(run, workload.slo) | workload.figures(run))
        if isinstance(server, OurServer):
            outcome.rounds[-1] |= server.waits.figures()
    return outcome


def _drive(
    clock: VirtualClock, server: SimServer, workload: Workload, seed: int, first: int
) -> Run:
    client = Client(clock, server, workload.plan(seed), first)
    clock.run()
    if client.num_open:
        raise RuntimeError(f"{client.num_open} simulated calls never ended")
    return client.run


@contextmanager
def _alone(seed: int) -> Iterator[None]:
    """Fix the admission control's jitter, which comes from the module-wide random numbers, and
    keep the control loop's log to itself: it is for people with a server before them."""
    state, log = random.getstate(), logging.getLogger("mlx_cb.control")
    level = log.level
    random.seed(seed)
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
        random.setstate(state)

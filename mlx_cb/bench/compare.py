"""Puts the same load on several servers in turn, A/B/A/B, and takes medians over the rounds.

Owns interleaving and the aggregation over rounds. Knows nothing about thresholds, or how servers
are started.
"""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mlx_cb.bench.calls import CallRecord, Run, Scalar
from mlx_cb.bench.environment import Load, LoadWatch
from mlx_cb.bench.exchange import get_json_bytes
from mlx_cb.bench.generator import Target, drive
from mlx_cb.bench.metrics import Figures, measure
from mlx_cb.bench.prompts import WordSource
from mlx_cb.bench.servers import RunningServer
from mlx_cb.bench.stats import median
from mlx_cb.bench.wire import Api
from mlx_cb.bench.workloads.base import Workload
from mlx_cb.bench.workloads.closed import Steady

STEPS = 4096
_STEP_FIELDS = (
    *("step", "started", "seconds", "predicted_seconds"),
    *("rows_decode", "rows_prefill", "context_sum", "num_waiting", "blocks_used"),
)


@dataclass(frozen=True, slots=True)
class Conditions:
    """How every server of a comparison is spoken to.

    Attributes:
        rounds: passes per server; figures are medians over them.
        seed: decides all prompts and arrivals; each run and round has its own, made from it, so
            that no prompt comes twice.
    """

    words: WordSource
    rounds: int = 3
    seed: int = 1
    api: Api = Api.COMPLETIONS
    as_ids: bool = False
    fields: tuple[tuple[str, Scalar], ...] = ()
    key: str | None = None
    keys: dict[str, str] = field(default_factory=dict)

    def target(self, server: RunningServer) -> Target:
        """The server, addressed under these conditions."""
        return Target(
            server.endpoint,
            self.words,
            model=server.model_field,
            api=self.api,
            as_ids=self.as_ids,
            key=self.key or server.spec.key,
            keys=self.keys,
            fields=self.fields,
        )


@dataclass(slots=True)
class Outcome:
    """All rounds of one server under one workload."""

    label: str
    command: list[str]
    runs: list[Run] = field(default_factory=list)
    rounds: list[Figures] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)

    @property
    def figures(self) -> Figures:
        """Medians over the rounds."""
        return merge(self.rounds)


@dataclass(slots=True)
class Comparison:
    """One workload on all servers.

    Attributes:
        equal_outputs: share of calls whose text is the same on every server.
        equal_lengths: share of calls with the same number of output tokens on every server: only
            then did the servers do the same work.
    """

    name: str
    workload: Workload
    conditions: Conditions
    outcomes: dict[str, Outcome]
    equal_outputs: float | None = None
    equal_lengths: float | None = None


Progress = Callable[[str, CallRecord | None], None]
Around = Callable[[RunningServer], Awaitable[None]]


async def _nothing(server: RunningServer) -> None:
    """Nothing is done around a pass."""


async def warm(server: RunningServer, conditions: Conditions) -> None:
    """One call alone and four at once, so that no pass pays for a server's first times."""
    for streams in (1, 4):
        plan = Steady(streams=streams, prompt=32, output=4).plan(seed=-streams)
        await drive(conditions.target(server), plan)


async def wake(server: RunningServer, conditions: Conditions) -> None:
    """A short call, so that no pass pays for the others': while one server is measured the system
    may page out the code of those that idle, and a first step took a second longer."""
    plan = Steady(streams=1, prompt=32, output=4).plan(seed=-5)
    await drive(conditions.target(server), plan)


async def compare(
    name: str,
    workload: Workload,
    servers: Sequence[RunningServer],
    conditions: Conditions,
    progress: Progress = lambda label, record: None,
    around: Around = _nothing,
) -> Comparison:
    """Run the workload on each server in turn, `rounds` times over. Servers must be warm.

    `around` is awaited before and behind each pass, with the pass's server.
    """
    outcomes = {server.spec.label: Outcome(server.spec.label, server.command) for server in servers}
    for number in range(conditions.rounds):
        for server in servers:
            outcome = outcomes[server.spec.label]
            plan = workload.plan(plan_seed(name, conditions.seed, number))
            await wake(server, conditions)
            await around(server)
            watch = LoadWatch(lambda: [server.cpu_seconds() for server in servers])
            run = await drive(
                conditions.target(server),
                plan,
                functools.partial(progress, server.spec.label),
            )
            outcome.loads.append(watch.read())
            run.steps = await journal(server, run)
            outcome.runs.append(run)
            outcome.rounds.append(measure(run, workload.slo) | workload.figures(run))
            progress(server.spec.label, None)
            await around(server)
            # What the pass left to do (aborts, freed memory) is not the next server's to bear.
            await asyncio.sleep(0.2)
    comparison = Comparison(name, workload, conditions, outcomes)
    if len(servers) > 1:
        comparison.equal_outputs, comparison.equal_lengths = equality(list(outcomes.values()))
    return comparison


def plan_seed(name: str, seed: int, number: int) -> int:
    """Seed of one round. Runs of one session differ by name: with equal seeds their prompts would
    be equal too, and a prefix cache would know them from the run before."""
    return zlib.crc32(f"{name}/{seed}/{number}".encode())


async def journal(server: RunningServer, run: Run) -> list[dict[str, float]]:
    """Step records of the run from `/status/steps`; empty for servers that keep none."""
    path, key = f"/status/steps?last={STEPS}", server.spec.key
    answer = await get_json_bytes(server.endpoint, path, key=key)
    if answer.status != 200:
        return []
    content = msgspec.json.decode(answer.body)
    steps = content.get("steps", []) if isinstance(content, dict) else content
    # A step that is still running has no measured time yet.
    finished = [s for s in steps if s["started"] >= run.began and s["seconds"] is not None]
    return [
        {name: step[name] for name in _STEP_FIELDS if name in step} | _attention(step, samples)
        for step, samples in zip(finished, _last_chunks(finished), strict=True)
    ]


def _last_chunks(steps: Sequence[dict[str, Any]]) -> list[int]:
    """How many chunks of each step were the last of their prompts: those chose a token."""
    continued: set[str] = set()
    counts = []
    for step in reversed(steps):
        ids = {chunk["request_id"] for chunk in step.get("prefills", ())}
        counts.append(len(ids - continued))
        continued |= ids
    return counts[::-1]


def _attention(step: dict[str, Any], samples: int) -> dict[str, float]:
    """What the chunks of a step attend to, and how many chose a token: the journal's list of them
    in four numbers, as `sim.cost.PassShape` has them."""
    if "prefills" not in step:
        return {}
    chunks = [(chunk["start"], chunk["num_tokens"]) for chunk in step["prefills"]]
    return {
        "chunks": len(chunks),
        "samples": samples,
        "pairs": sum(count * (start + count / 2) for start, count in chunks),
        "scores": sum(count * (start + count) for start, count in chunks),
    }


def equality(outcomes: Sequence[Outcome]) -> tuple[float | None, float | None]:
    """Shares of the calls that ended with equal texts and with equal token counts everywhere.

    Only calls that are complete on all servers count; None when there are none.
    """
    texts = lengths = total = 0
    for runs in zip(*(outcome.runs for outcome in outcomes), strict=True):
        by_call = [
            {record.call: record for record in run.records if record.is_complete} for run in runs
        ]
        for call in set(by_call[0]).intersection(*by_call[1:]):
            same = [records[call] for records in by_call]
            total += 1
            # mlx_lm.server leaves out the space before the first word.
            texts += len({record.text.lstrip() for record in same}) == 1
            lengths += len({record.output_tokens for record in same}) == 1
    return (texts / total, lengths / total) if total else (None, None)


def merge(rounds: Sequence[Figures]) -> Figures:
    """Median of every number over the rounds that have it; failures are added up, so that none
    is hidden by the rounds without."""
    merged: Figures = {}
    for key in dict.fromkeys(key for figures in rounds for key in figures):
        values = [figures[key] for figures in rounds if figures.get(key) is not None]
        if key == "failures":
            merged[key] = _added(values)
        elif key == "failed":
            merged[key] = sum(values)
        elif not values:
            merged[key] = None
        elif isinstance(values[0], dict):
            merged[key] = merge(values)
        else:
            merged[key] = median(values)
    return merged


def _added(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    total: dict[str, Any] = {}
    for kinds in counts:
        for kind, count in kinds.items():
            total[kind] = total.get(kind, 0) + count
    return total

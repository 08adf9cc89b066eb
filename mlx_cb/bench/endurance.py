"""Whether memory stays where it was set: a server of ours under churn for minutes, and looked at.

Short answers, conversations, a long context beside short ones and clients that hang up follow each
other, with more text than the pool holds. Needs a server that tells its memory in `/status`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from mlx_cb.bench.calls import CallRecord
from mlx_cb.bench.compare import Conditions, plan_seed
from mlx_cb.bench.exchange import get_json_bytes
from mlx_cb.bench.generator import drive
from mlx_cb.bench.metrics import Figures
from mlx_cb.bench.servers import RunningServer
from mlx_cb.bench.workloads.base import make
from mlx_cb.errors import MlxCbError

SAMPLE_S = 1.0
#: One after the other, again and again, each time with prompts of its own.
LOADS = (
    ("churn", {"streams": 24, "calls": 72, "prompt": 96, "output_low": 6, "output_high": 60}),
    ("skew", {"streams": 12, "calls": 24, "long_prompt": 600, "long_output": 48}),
    ("fim", {"users": 3, "bursts": 1, "pause_s": 0.5}),
    ("turns", {"users": 6, "turns": 3, "first": 192, "output": 8, "concurrency": 3}),
)


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What was held at one moment, bytes.

    Attributes:
        pool: what the blocks may take, as it was set.
        kv: what exists of them.
        held: everything that MLX holds between two steps, without the weights.
        resident: memory of all the server's processes.
    """

    pool: int
    kv: int
    held: int
    resident: int


async def endure(server: RunningServer, conditions: Conditions, minutes: float) -> Figures:
    """Put the loads on the server for so long, and say how its memory fared.

    Raises MlxCbError for a server that does not tell its memory.
    """
    ended = time.monotonic() + minutes * 60
    samples: list[MemorySample] = []
    watching = asyncio.create_task(_watch(server, samples))
    records: list[CallRecord] = []
    try:
        for number in itertools.count():
            if time.monotonic() >= ended:
                break
            name, parameters = LOADS[number % len(LOADS)]
            plan = make(name, parameters).plan(plan_seed(name, conditions.seed, number))
            records += (await drive(conditions.target(server), plan)).records
            if watching.done():
                await watching
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    failed = [record for record in records if record.failure is not None]
    if failed:
        raise MlxCbError(f"{len(failed)} calls failed, first: {failed[0].detail}")
    return {"calls": len(records), "minutes": minutes} | memory_figures(samples)


async def _watch(server: RunningServer, samples: list[MemorySample]) -> None:
    while True:
        samples.append(await _look(server))
        await asyncio.sleep(SAMPLE_S)


async def _look(server: RunningServer) -> MemorySample:
    answer = await get_json_bytes(server.endpoint, "/status", 60.0, server.spec.key)
    if answer.status != 200:
        raise MlxCbError(f"{server.spec.label} does not tell its memory: {answer.status}")
    status = msgspec.json.decode(answer.body)
    memory, blocks = status["memory"], status["blocks"]
    per_token = status["model_info"]["kv_bytes_per_token"]
    return MemorySample(
        pool=blocks["capacity"] * blocks["size"] * per_token,
        kv=memory["kv"],
        held=memory["active"] - memory["weights"],
        resident=sum(process.memory_info().rss for process in server.processes()),
    )


def memory_figures(samples: Sequence[MemorySample]) -> Figures:
    """Peaks over the pool, and the last quarter's peak over the second's, once all has grown."""
    if len(samples) < 4:
        raise MlxCbError(f"{len(samples)} samples of memory are too few to judge by")
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    pool = samples[0].pool
    return {
        "samples": len(samples),
        "pool_mb": pool / 1e6,
        "kv_peak_over_pool": max(sample.kv for sample in samples) / pool,
        "held_peak_over_pool": max(sample.held for sample in samples) / pool,
        "resident_mb": max(sample.resident for sample in samples) / 1e6,
        "resident_growth": max(s.resident for s in late) / max(s.resident for s in early),
    }

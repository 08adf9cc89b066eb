"""What an SSD tier is worth after a restart: the time to the first token of a prompt it knows.

Starts the server twice over one folder of its own. Everything else about the two starts is equal.
"""

from __future__ import annotations

import tempfile
from collections import deque
from dataclasses import replace

from mlx_cb.bench.calls import Call, CallRecord, Lane, Plan, Prompt
from mlx_cb.bench.compare import Conditions
from mlx_cb.bench.generator import drive
from mlx_cb.bench.metrics import Figures
from mlx_cb.bench.servers import Cores, RunningServer, ServerSpec
from mlx_cb.errors import MlxCbError

PROMPT = 1500  # tokens
OUTPUT = 8


async def warm_restart(
    spec: ServerSpec, cores: Cores, conditions: Conditions, seed: int
) -> Figures:
    """Ask a long prompt, restart, ask it again; the ratio of the times to first token.

    Raises MlxCbError when the prompt fails, or its two answers differ.
    """
    with tempfile.TemporaryDirectory(prefix="mlx-cb-bench-") as folder:
        spec = replace(spec, flags=(*spec.flags, "--ssd-cache", folder))
        cold, warm = [await _first_answer(spec, cores, conditions, seed) for _ in range(2)]
    if cold.text != warm.text:
        raise MlxCbError(f"{spec.label}: the answer after a restart is another one")
    return {
        "cold_ttft": cold.ttft_s,
        "warm_ttft": warm.ttft_s,
        "warm_over_cold": warm.ttft_s / cold.ttft_s,
        "cached_tokens": warm.cached_tokens,
    }


async def _first_answer(
    spec: ServerSpec, cores: Cores, conditions: Conditions, seed: int
) -> CallRecord:
    """Start the server, let it run a short prompt of its own, and ask the long one."""
    server = RunningServer(spec, cores)
    try:
        await server.ready()
        calls = deque([Call(Prompt(64, seed + 1), OUTPUT), Call(Prompt(PROMPT, seed), OUTPUT)])
        run = await drive(conditions.target(server), Plan([Lane(calls)]))
    finally:
        server.stop()
    record = max(run.records, key=lambda record: record.sent_s)
    if not record.is_complete:
        raise MlxCbError(f"{spec.label} gave no answer: {record.failure} {record.detail}")
    return record

"""What a server still does for a client that has gone, read from its step journal.

Needs a server that keeps `/status/steps` on this machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
from collections import deque

from mlx_cb.bench.calls import Call, Lane, Plan, Prompt
from mlx_cb.bench.compare import Conditions, journal
from mlx_cb.bench.generator import drive
from mlx_cb.bench.metrics import Figures
from mlx_cb.bench.servers import RunningServer

_OUTPUT = 100_000
_STREAM_S = 0.5
_SETTLE_S = 1.0


async def steps_for_the_gone(server: RunningServer, conditions: Conditions, seed: int) -> Figures:
    """Hang up on a lone endless stream, and count the steps that begin afterwards.

    The stream is the only request, so every later step with a row is one for nobody. The moment of
    hanging up is the client's; what the network and the front take to notice is counted as well.
    """
    call = Call(Prompt(16, seed), _OUTPUT, cancel_after_s=_STREAM_S)
    run = await drive(conditions.target(server), Plan([Lane(deque([call]))]))
    await asyncio.sleep(_SETTLE_S)
    steps = await journal(server, run)
    record = run.records[0]
    gone = run.began + record.ended_s
    after = [
        step
        for step in steps
        if step["started"] > gone and step["rows_decode"] + step["rows_prefill"] > 0
    ]
    before = [step["seconds"] for step in steps if step["started"] <= gone]
    longest = max((step["started"] + step["seconds"] for step in after), default=gone)
    return {
        "streamed_chunks": len(record.chunk_times_s),
        "steps_before": len(before),
        "steps_after": len(after),
        "worked_on_for_ms": (longest - gone) * 1e3,
    }

"""What an operator watches, in little: the newest steps as rows of numbers, and who is here.

Made once a second while somebody looks, between two steps, so it is kept cheap: `steps` of the
journal itself are for those who want to know everything about one.
"""

from __future__ import annotations

from typing import Any

from mlx_cb.core.request import Request
from mlx_cb.core.scheduler import Scheduler

MOST_STEPS = 240
MOST_REQUESTS = 200
#: What the numbers of a step are, in their order; times in seconds.
STEP_COLUMNS = (
    "step",
    "started",
    "rows_decode",
    "rows_prefill",
    "predicted",
    "measured",
    "token_budget",
    "waiting",
    "blocks_used",
    "preempted",
)


def overview(scheduler: Scheduler, now: float, after: int) -> dict[str, Any]:
    """Steps newer than number `after`, oldest first, and the unfinished requests; JSON-ready.

    `now` is on the clock of all times here.
    """
    requests = list(scheduler.requests.values())
    return {
        "now": now,
        "columns": STEP_COLUMNS,
        "steps": _steps(scheduler, after),
        "num_requests": len(requests),
        "requests": [_request(request, now) for request in requests[:MOST_REQUESTS]],
        "users": _users(requests, now),
    }


def count_users(scheduler: Scheduler) -> dict[str, dict[str, Any]]:
    """Unfinished requests of each user, waiting and running, and what the prefix cache did."""
    users: dict[str, dict[str, Any]] = {
        user: {"waiting": 0, "running": 0, "prefix_cache": counts}
        for user, counts in scheduler.kv_cache.counts_by_user().items()
    }
    for request in scheduler.requests.values():
        counts = users.setdefault(request.user, {"waiting": 0, "running": 0})
        counts["waiting" if request.request_id in scheduler.waiting else "running"] += 1
    return users


def _steps(scheduler: Scheduler, after: int) -> list[list[float | int | None]]:
    found: list[list[float | int | None]] = []
    for record in reversed(scheduler.journal.records):
        if record.step <= after or len(found) == MOST_STEPS:
            break
        found.append(
            [
                record.step,
                round(record.started, 4),
                record.rows_decode,
                record.rows_prefill,
                round(record.predicted_seconds, 5),
                None if record.seconds is None else round(record.seconds, 5),
                record.token_budget,
                record.num_waiting,
                record.blocks_used,
                len(record.preempted),
            ]
        )
    return found[::-1]


def _request(request: Request, now: float) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "user": request.user,
        "status": request.status.value,
        "waiting_for": request.waiting_for,
        "age": round(now - request.arrival_time, 2),
        "prompt": request.num_prompt_tokens,
        "cached": request.num_cached_tokens,
        "computed": request.num_computed_tokens,
        "output": request.num_output_tokens,
    }


def _users(requests: list[Request], now: float) -> dict[str, dict[str, Any]]:
    """By user: how many run and wait, what for, and since when the oldest waits (seconds)."""
    users: dict[str, dict[str, Any]] = {}
    for request in requests:
        own = users.setdefault(
            request.user, {"running": 0, "waiting": 0, "reasons": {}, "oldest_wait": 0.0}
        )
        if not request.waiting_for:
            own["running"] += 1
            continue
        own["waiting"] += 1
        reasons = own["reasons"]
        reasons[request.waiting_for] = reasons.get(request.waiting_for, 0) + 1
        own["oldest_wait"] = max(own["oldest_wait"], round(now - request.arrival_time, 2))
    return users

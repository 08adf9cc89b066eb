"""What the operator's page shows, as one JSON object: gathered once a second while it is open.

Only admins get any of this. Knows nothing about the page or HTTP.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import psutil

from mlx_cb.server.control_routes import control_state
from mlx_cb.server.front import Front
from mlx_cb.server.keys import KeyRecord

LATENCY_WINDOW_S = 120.0
MOST_RECORDS = 30
_SIGN = ("sign", "unit", "value", "begins_at")


class OperatorState:
    """One server's state, for who watches."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._process = psutil.Process()
        self._started = time.time()

    async def now(self, after_step: int, after_line: int) -> dict[str, Any]:
        """The state; of steps and log lines only those after the given numbers."""
        front = self._front
        status = await front.engine.status()
        overview = await front.engine.overview(after_step)
        return {
            "time": time.time(),
            "server": self._server(),
            "engine": status | {"control": _newest(control_state(front, status))},
            "overview": overview,
            "held_by_own_limit": front.accounts.waiting(),
            "latency": {
                "window_s": LATENCY_WINDOW_S,
                "first_token": front.metrics.recent_first_tokens.percentiles(LATENCY_WINDOW_S),
                "token_gap": front.metrics.recent_gaps.percentiles(LATENCY_WINDOW_S),
            },
            "asking": self._asking(),
            "log": front.log_tail.since(after_line),
        }

    def _server(self) -> dict[str, Any]:
        front = self._front
        return {
            "model": front.served_name,
            "names": front.names(),
            "ready": front.is_ready,
            "closing": front.is_closing,
            "open_answers": len(front.open_answers),
            "started": self._started,
            "memory": self._process.memory_info().rss,
            "has_keys": front.doors is not None and front.doors.keys.ever_had_any,
        }

    def _asking(self) -> list[dict[str, Any]]:
        doors = self._front.doors
        if doors is None:
            return []
        return [
            {"name": one.name, "code": one.code, "address": one.address}
            for one in doors.links.asking()
        ]

    async def people(self) -> list[dict[str, Any]]:
        """Everyone with an account, and whoever took anything today; what each took."""
        front = self._front
        await front.machine_time.look()
        usage = front.accounts.usage
        today = await usage.since(usage.clock().date().isoformat(), None)
        taken = {one.user: asdict(one) for one in today}
        doors = front.doors
        records = {one.name: one for one in doors.keys.all()} if doors is not None else {}
        sign_ins = doors.sign_ins.count_by_user() if doors is not None else {}
        return [
            {
                "name": name,
                **_account(records.get(name)),
                "browsers": sign_ins.get(name, 0),
                "today": taken.get(name),
            }
            for name in sorted({*records, *taken})
        ]


def _newest(control: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of the control: each sign and when it is an alarm, not all the past."""
    shown = {name: value for name, value in control.items() if name != "rules"}
    shown["signs"] = [{name: rule[name] for name in _SIGN} for rule in control.get("rules", [])]
    return shown | {"records": shown.get("records", [])[-MOST_RECORDS:]}


def _account(record: KeyRecord | None) -> dict[str, Any]:
    if record is None:
        return {"has_account": False}
    return {
        "has_account": True,
        "admin": record.admin,
        "may_infer": record.inference,
        "weight": record.weight,
        "rank": record.rank,
        "max_running": record.max_running,
        "daily_tokens": record.daily_tokens,
        "expires": record.expires,
    }

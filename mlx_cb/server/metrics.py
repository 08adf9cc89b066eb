"""Prometheus metrics, named like vLLM's under `mlx_cb:` so that dashboards carry over.

Counts what the front sees; the engine's gauges are read from its status when a scrape asks.
"""

from __future__ import annotations

from collections import Counter as Counts
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mlx_cb.server.recent import Recent

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

_ENGINE_GAUGES = {
    "num_requests_running": "Requests that take part in steps",
    "num_requests_waiting": "Requests that wait to be admitted",
    "kv_cache_usage_perc": "Share of the KV blocks in use, 0 to 1",
    "num_preemptions": "Preemptions since the engine started",
    "num_steps": "Steps since the engine started",
    "control_frozen": "1 while an operator has frozen the control loop",
    "num_evicted_blocks": "Blocks whose content was given up for another, since start",
    "num_stopped_admissions": "Steps in which a request waited for blocks, since start",
    "num_restored_tokens": "Tokens whose keys and values came back from the SSD, since start",
    "num_recomputed_tokens": "Tokens computed again after their request gave way, since start",
    "ssd_is_on": "1 while the SSD tier works",
    "ssd_bytes": "Bytes of the SSD tier's files, other models' included",
    "ssd_blocks": "Blocks of this model on the SSD",
    "ssd_written_bytes_today": "Bytes written to the SSD tier today, UTC",
    "kv_blocks_used": "KV blocks that requests use",
    "kv_blocks_cached": "KV blocks whose content can be found again",
    "kv_blocks_available": "KV blocks that can be taken now",
    "kv_blocks_in_memory": "KV blocks that exist in memory",
    "kv_evictions": "KV blocks that lost their content to another one since the engine started",
    "prefix_cache_hit_rate": "Part of the looked-up tokens that were found, 0 to 1",
}
_USER_GAUGES = {
    "user_prefix_cache_queries": ("queries", "Requests that looked for a known prefix, by user"),
    "user_prefix_cache_hits": ("hits", "Requests that found one, by user"),
    "user_prefix_cache_hit_tokens": ("hit_tokens", "Tokens that were found, by user"),
    "user_kv_evictions": ("evictions", "A user's blocks that lost their content to others"),
}


class Metrics:
    """One server's metrics."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        r = self._registry
        self.prompt_tokens = Counter("mlx_cb:prompt_tokens", "Prompt tokens", registry=r)
        self.cached_tokens = Counter(
            "mlx_cb:prefix_cache_hits", "Prompt tokens found in the prefix cache", registry=r
        )
        self.generation_tokens = Counter("mlx_cb:generation_tokens", "Generated tokens", registry=r)
        self.finished = Counter(
            "mlx_cb:request_success", "Requests by how they ended", ["finished_reason"], registry=r
        )
        self.refused = Counter("mlx_cb:request_refused", "Refused requests", ["code"], registry=r)
        self.first_token = Histogram(
            "mlx_cb:time_to_first_token_seconds",
            "Arrival to first token",
            buckets=_SECONDS,
            registry=r,
        )
        self.token_gap = Histogram(
            "mlx_cb:inter_token_latency_seconds", "Gap between outputs", buckets=_GAPS, registry=r
        )
        self.whole = Histogram(
            "mlx_cb:e2e_request_latency_seconds", "Arrival to end", buckets=_SECONDS, registry=r
        )
        self.recent_first_tokens, self.recent_gaps = Recent(), Recent()
        self._live = Gauge(
            "mlx_cb:num_requests_live", "Generations the front waits for", registry=r
        )
        self._in_force = Gauge(
            "mlx_cb:control_in_force",
            "Acts of the control loop and orders of operators in force",
            ["action"],
            registry=r,
        )
        self._acts = Gauge(
            "mlx_cb:control_acts",
            "Acts of the control loop since the engine started",
            ["action"],
            registry=r,
        )
        self._engine = {
            name: Gauge(f"mlx_cb:{name}", text, registry=r) for name, text in _ENGINE_GAUGES.items()
        }
        self._users = {
            name: Gauge(f"mlx_cb:{name}", text, ["user"], registry=r)
            for name, (_, text) in _USER_GAUGES.items()
        }

    def saw_first_token(self, seconds: float, user: str) -> None:
        """A first token came so long after its request."""
        self.first_token.observe(seconds)
        self.recent_first_tokens.add(seconds, user)

    def saw_gap(self, seconds: float, user: str) -> None:
        """So much time passed between two outputs of an answer."""
        self.token_gap.observe(seconds)
        self.recent_gaps.add(seconds, user)

    def exposition(self, num_live: int, engine_status: dict[str, Any]) -> bytes:
        """The scrape's text; gauges that the engine does not report keep their last value."""
        self._live.set(num_live)
        for name, value in _engine_values(engine_status).items():
            self._engine[name].set(value)
        for user, counts in engine_status.get("users", {}).items():
            for name, (key, _) in _USER_GAUGES.items():
                self._users[name].labels(user).set(counts.get("prefix_cache", {}).get(key, 0))
        if control := engine_status.get("control"):
            self._show_control(control)
        return generate_latest(self._registry)

    def _show_control(self, control: dict[str, Any]) -> None:
        self._in_force.clear()
        for action, number in Counts(act["action"] for act in control["in_force"]).items():
            self._in_force.labels(action).set(number)
        for action, number in control.get("acts", {}).items():
            self._acts.labels(action).set(number)


def _engine_values(status: dict[str, Any]) -> dict[str, float]:
    """Gauges of an engine's status; {} while its worker is down."""
    requests, blocks = status.get("requests"), status.get("blocks")
    values: dict[str, float] = {}
    if requests:
        values["num_requests_running"] = requests["prefilling"] + requests["decoding"]
        values["num_requests_waiting"] = requests["waiting"]
        values["num_preemptions"] = requests["preemptions"]
    if blocks:
        values["kv_cache_usage_perc"] = blocks["used"] / max(1, blocks["capacity"])
        for name in ("used", "cached", "available", "in_memory"):
            values[f"kv_blocks_{name}"] = blocks[name]
        values["kv_evictions"] = blocks["evictions"]
    if prefix_cache := status.get("prefix_cache"):
        values["prefix_cache_hit_rate"] = prefix_cache["hit_rate"]
    if control := status.get("control"):
        values["control_frozen"] = float(control["frozen"])
    if steps := status.get("steps"):
        values["num_steps"] = steps["count"]
    if ladder := status.get("ladder"):
        values["num_evicted_blocks"] = ladder["evicted_blocks"]
        values["num_stopped_admissions"] = ladder["stopped_admissions"]
        values["num_restored_tokens"] = ladder["restored_tokens"]
        values["num_recomputed_tokens"] = ladder["recomputed_tokens"]
    if ssd := status.get("ssd"):
        values["ssd_is_on"] = ssd["state"] == "on"
        values["ssd_bytes"] = ssd.get("bytes", 0)
        values["ssd_blocks"] = ssd.get("blocks", 0)
        values["ssd_written_bytes_today"] = ssd.get("written_today", 0)
    return values

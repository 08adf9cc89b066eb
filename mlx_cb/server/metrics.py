"""Prometheus metrics, named like vLLM's under `mlx_cb:` so that dashboards carry over.

Counts what the front sees; the engine's gauges are read from its status when a scrape asks.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

_ENGINE_GAUGES = {
    "num_requests_running": "Requests that take part in steps",
    "num_requests_waiting": "Requests that wait to be admitted",
    "kv_cache_usage_perc": "Share of the KV blocks in use, 0 to 1",
    "num_preemptions": "Preemptions since the engine started",
    "num_steps": "Steps since the engine started",
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
        self._live = Gauge(
            "mlx_cb:num_requests_live", "Generations the front waits for", registry=r
        )
        self._engine = {
            name: Gauge(f"mlx_cb:{name}", text, registry=r) for name, text in _ENGINE_GAUGES.items()
        }

        self._users = {
            name: Gauge(f"mlx_cb:{name}", text, ["user"], registry=r)
            for name, (_, text) in _USER_GAUGES.items()
        }

    def exposition(self, num_live: int, engine_status: dict[str, Any]) -> bytes:
        """The scrape's text; gauges that the engine does not report keep their last value."""
        self._live.set(num_live)
        for name, value in _engine_values(engine_status).items():
            self._engine[name].set(value)
        for user, counts in engine_status.get("users", {}).items():
            for name, (key, _) in _USER_GAUGES.items():
                self._users[name].labels(user).set(counts.get("prefix_cache", {}).get(key, 0))
        return generate_latest(self._registry)


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
    if steps := status.get("steps"):
        values["num_steps"] = steps["count"]
    return values

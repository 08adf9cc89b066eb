"""Turns the records of a run into the figures that are reported; never one mean.

All times in seconds, all rates per second. Failed calls count as failures and against goodput;
they never lower a latency. Knows nothing about where the records come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_cb.bench.calls import CallRecord, Run
from mlx_cb.bench.stats import jain, summarize

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Slo:
    """What a user would call good: first token in time and no long gap, or all of it in time."""

    ttft_s: float = 2.0
    itl_p99_s: float = 0.15
    e2e_s: float | None = None

    def is_met(self, record: CallRecord) -> bool:
        """False for every call that failed."""
        if not record.is_complete:
            return False
        if self.e2e_s is not None:
            return record.ended_s - record.sent_s <= self.e2e_s
        gaps = record.gaps_s
        slowest = summarize(gaps)["p99"] if gaps else 0.0
        return record.ttft_s <= self.ttft_s and slowest <= self.itl_p99_s


def measure(run: Run, slo: Slo) -> Figures:
    """All figures of a run: over everything, per group and per user."""
    records = run.records
    figures = _figures(records, slo)
    figures["saturated_tok_s"] = _saturated_tok_s(run)
    figures["decode_tok_s"] = _all_decoding_tok_s(records)
    figures["jain"] = jain(service_by_user(records).values())
    figures["groups"] = _split(records, slo, lambda record: record.call.group)
    figures["users"] = _split(records, slo, lambda record: record.call.user)
    return figures


def _split(records: Sequence[CallRecord], slo: Slo, key: Callable[[CallRecord], str]) -> Figures:
    parts: dict[str, list[CallRecord]] = {}
    for record in records:
        parts.setdefault(key(record), []).append(record)
    return {name: _figures(part, slo) for name, part in sorted(parts.items())}


def _figures(records: Sequence[CallRecord], slo: Slo) -> Figures:
    complete = [record for record in records if record.is_complete]
    heard = [record for record in records if record.chunk_times_s]
    asked = [record for record in records if not record.cancelled]
    span = max((r.ended_s for r in records), default=0.0) - min(
        (r.sent_s for r in records), default=0.0
    )
    span = max(span, 1e-9)
    gaps = [gap for record in heard for gap in record.gaps_s]
    good = sum(slo.is_met(record) for record in asked)
    output_tokens = sum(record.output_tokens for record in heard)
    return {
        "calls": len(records),
        "complete": len(complete),
        "cancelled": sum(record.cancelled for record in records),
        "failed": sum(record.failure is not None for record in records),
        "failures": dict(Counter(r.failure for r in records if r.failure is not None)),
        "span_s": span,
        "ttft": summarize([record.ttft_s for record in heard]),
        "itl": summarize(gaps),
        "tpot": summarize([r.tpot_s for r in complete if r.tpot_s is not None]),
        "e2e": summarize([record.ended_s - record.sent_s for record in complete]),
        "normalized": summarize(
            [(r.ended_s - r.sent_s) / r.output_tokens for r in complete if r.output_tokens]
        ),
        "stall": max(gaps, default=0.0),
        "requests_s": len(complete) / span,
        "input_tok_s": sum(record.prompt_tokens for record in heard) / span,
        "output_tok_s": output_tokens / span,
        "us_per_token": span * 1e6 / output_tokens if output_tokens else None,
        "input_tokens": sum(record.prompt_tokens for record in heard),
        "output_tokens": output_tokens,
        "cached_tokens": sum(record.cached_tokens for record in heard),
        "goodput": good / len(asked) if asked else None,
        "goodput_s": good / span,
    }


def _tokens_between(records: Sequence[CallRecord], start_s: float, end_s: float) -> float:
    """Output tokens that arrived in the span; a merged chunk counts its average tokens."""
    return sum(
        record.tokens_per_chunk * sum(start_s <= time <= end_s for time in record.chunk_times_s)
        for record in records
        if record.chunk_times_s
    )


def _saturated_tok_s(run: Run) -> float | None:
    """Output tokens per second until the last call was sent, so that the drain at the end, when
    the load falls, is left out. None when all calls were sent before the first answer."""
    tokens = _tokens_between(run.records, 0.0, run.last_sent_s)
    return tokens / run.last_sent_s if tokens else None


def _all_decoding_tok_s(records: Sequence[CallRecord]) -> float | None:
    """Output tokens per second while *every* call of the run was decoding; None without such a
    span. Arrivals are counted after its first instant, so that n tokens span n gaps."""
    if not records or not all(record.is_complete for record in records):
        return None
    start = max(record.chunk_times_s[0] for record in records)
    end = min(record.chunk_times_s[-1] for record in records)
    if end <= start:
        return None
    tokens = sum(
        record.tokens_per_chunk * sum(start < time <= end for time in record.chunk_times_s)
        for record in records
    )
    return tokens / (end - start)


def service_by_user(records: Sequence[CallRecord]) -> dict[str, float]:
    """Tokens served per user (uncached prompt, once answered, and output) as long as every user
    had something outstanding."""
    users: dict[str, list[CallRecord]] = {}
    for record in records:
        users.setdefault(record.call.user, []).append(record)
    until_s = min((max(r.ended_s for r in own) for own in users.values()), default=0.0)
    return {
        user: sum(
            record.prompt_tokens - record.cached_tokens
            for record in own
            if record.chunk_times_s and record.chunk_times_s[0] <= until_s
        )
        + _tokens_between(own, 0.0, until_s)
        for user, own in users.items()
    }


def look_up(figures: Figures, metric: str) -> float | None:
    """The number behind a dotted name such as `groups.short.ttft.p95`; None if it is not there."""
    value: Any = figures
    for part in metric.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return float(value) if isinstance(value, (int, float)) else None

"""The report: everything needed to read a measurement, to plot it and to repeat it, as plain data.

Owns the JSON layout (`FORMAT`). Knows nothing about terminals or HTML.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mlx_cb.bench.calls import CallRecord, Run
from mlx_cb.bench.compare import Comparison, Outcome
from mlx_cb.bench.gates import GateResult, Measured
from mlx_cb.bench.metrics import look_up

FORMAT = "mlx-cb-bench/1"
_SAMPLES = 2000
_STEPS = 4096

Report = dict[str, Any]


def new_report(environment: dict[str, object], models: Mapping[str, object]) -> Report:
    """A report without runs."""
    return {
        "format": FORMAT,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": environment,
        "models": models,
        "runs": [],
        "gates": [],
        "verdict": None,
    }


def comparison_entry(comparison: Comparison, model: str) -> dict[str, Any]:
    """One workload on all its servers, as it goes into `runs`."""
    conditions = comparison.conditions
    return {
        "name": comparison.name,
        "workload": comparison.workload.name,
        "parameters": comparison.workload.parameters(),
        "slo": _slo(comparison),
        "model": model,
        "seed": conditions.seed,
        "rounds": conditions.rounds,
        "api": conditions.api.value,
        "prompts": "token ids" if conditions.as_ids else "text",
        "fields": dict(conditions.fields),
        "equal_outputs": comparison.equal_outputs,
        "equal_lengths": comparison.equal_lengths,
        "servers": {label: _outcome(o) for label, o in comparison.outcomes.items()},
    }


def direct_entry(name: str, model: str, figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A measurement that is not a load (start-up, host cost): figures by server."""
    return {
        "name": name,
        "model": model,
        "servers": {label: {"figures": values} for label, values in figures.items()},
    }


def gate_entry(judged: GateResult, report: Report) -> dict[str, Any]:
    """A judged gate, as it goes into `gates`, with the same figure of ours, P and T beside it."""
    value = judged.gate.value
    entry: dict[str, Any] = msgspec.to_builtins(judged)
    servers = measured(report)[value.run].servers if value.run in measured(report) else {}
    figures = {label: look_up(own, value.metric) for label, own in servers.items()}
    figures["ours"] = figures.get(value.of)
    entry["columns"] = {
        label: f"{figure:.4g}" for label, figure in figures.items() if figure is not None
    }
    return entry


def measured(report: Report) -> dict[str, Measured]:
    """Figures of all runs, as gates want them; with those that compare a run's servers."""
    return {
        run["name"]: Measured(
            {
                label: server["figures"] | {"equal_outputs": run.get("equal_outputs")}
                for label, server in run["servers"].items()
            },
            run.get("equal_lengths"),
        )
        for run in report["runs"]
    }


def write_json(report: Report, path: Path) -> None:
    """Write the report; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))


def figure_of(run: dict[str, Any], label: str, metric: str) -> float | None:
    """A number of one server in a run entry."""
    server = run["servers"].get(label)
    return look_up(server["figures"], metric) if server else None


def _slo(comparison: Comparison) -> dict[str, float | None]:
    slo = comparison.workload.slo
    return {"ttft_s": slo.ttft_s, "itl_p99_s": slo.itl_p99_s, "e2e_s": slo.e2e_s}


def _outcome(outcome: Outcome) -> dict[str, Any]:
    records = [record for run in outcome.runs for record in run.records]
    heard = [record for record in records if record.chunk_times_s]
    last = outcome.runs[-1]
    return {
        "command": outcome.command,
        "figures": outcome.figures,
        "by_round": outcome.rounds,
        "loads": [load.as_dict() for load in outcome.loads],
        "samples": {
            "ttft": _sampled([record.ttft_s for record in heard]),
            "itl": _sampled([gap for record in heard for gap in record.gaps_s]),
        },
        "last_round": {
            "calls": [_call(record) for record in sorted(last.records, key=_sent)],
            "steps": _steps(last),
        },
        "failures": sorted({f"{r.failure}: {r.detail}"[:300] for r in records if r.failure})[:20],
    }


def _sent(record: CallRecord) -> float:
    return record.sent_s


def _sampled(values: Sequence[float]) -> list[float]:
    """At most `_SAMPLES` order statistics, evenly spaced, smallest and largest among them."""
    ordered = sorted(values)
    if len(ordered) <= _SAMPLES:
        return ordered
    step = (len(ordered) - 1) / (_SAMPLES - 1)
    return [ordered[round(index * step)] for index in range(_SAMPLES)]


def _call(record: CallRecord) -> dict[str, Any]:
    times = record.chunk_times_s
    gaps = record.gaps_s
    stall_at = max(range(len(gaps)), key=gaps.__getitem__) if gaps else None
    return {
        "user": record.call.user,
        "group": record.call.group,
        "sent": record.sent_s,
        "first": times[0] if times else None,
        "ended": record.ended_s,
        "stall": [times[stall_at], times[stall_at + 1]] if stall_at is not None else None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "failure": record.failure,
        "cancelled": record.cancelled,
        "times": times,
    }


def _steps(run: Run) -> list[dict[str, float]]:
    """Journal records with the run's own clock."""
    return [step | {"started": step["started"] - run.began} for step in run.steps[-_STEPS:]]

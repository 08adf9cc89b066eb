"""What the terminal shows: figures of a run side by side, goals, progress.

Owns the choice and order of rows, which the HTML page shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from mlx_cb.bench.plots import seconds_text
from mlx_cb.bench.report import figure_of


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the comparison: what it is called, where it is found, how it is written."""

    name: str
    metric: str
    unit: str


def _latency(name: str, key: str) -> list[Row]:
    return [Row(f"{name} {p}", f"{key}.{p}", "s") for p in ("p50", "p95", "p99", "max")]


ROWS = [
    Row("calls", "calls", ""),
    Row("complete", "complete", ""),
    Row("cancelled on purpose", "cancelled", ""),
    *_latency("time to first token", "ttft"),
    *_latency("gap between tokens", "itl"),
    *_latency("time per output token", "tpot"),
    *_latency("end to end", "e2e"),
    *_latency("end to end per output token", "normalized"),
    Row("longest stall", "stall", "s"),
    Row("requests/s", "requests_s", ""),
    Row("input tokens/s", "input_tok_s", ""),
    Row("output tokens/s", "output_tok_s", ""),
    Row("output tokens/s while load is full", "saturated_tok_s", ""),
    Row("output tokens/s while all decode", "decode_tok_s", ""),
    Row("input tokens from cache", "cached_tokens", ""),
    Row("goodput, share of calls", "goodput", "%"),
    Row("goodput, calls/s", "goodput_s", ""),
    Row("Jain index between users", "jain", ""),
    Row("reused of reusable tokens", "reused_over_reusable", "%"),
    Row("streams' gap p99, disturbed", "disturbed.p99", "s"),
    Row("streams' gap max, disturbed", "disturbed.max", "s"),
    Row("streams' gap p50, undisturbed", "undisturbed.p50", "s"),
    Row("first token of the long prompt", "long_ttft", "s"),
    Row("first token of the short one behind", "short_ttft", "s"),
    Row("first token of a long prompt, idle", "long_idle_ttft", "s"),
    Row("victims' time to first token p95", "victims_ttft.p95", "s"),
]

GATE_COLUMNS = ["goal", "what", "ours", "P", "T", "ratio or value", "threshold", "limit", ""]


def figure_text(unit: str, value: float | None) -> str:
    """A number with its unit, or a dash."""
    if value is None:
        return "–"
    if unit == "s":
        return seconds_text(value)
    if unit == "%":
        return f"{value:.0%}"
    return f"{value:,.4g}"


def run_table(run: dict[str, Any]) -> Table:
    """One run: a row per figure, a column per server, and ours divided by each peer."""
    labels = list(run["servers"])
    table = Table(title=run["name"], title_justify="left")
    table.add_column("")
    for label in labels:
        table.add_column(label, justify="right")
    for label in labels[1:]:
        table.add_column(f"{labels[0]}/{label}", justify="right", style="dim")
    for row in ROWS:
        values = [figure_of(run, label, row.metric) for label in labels]
        if all(value is None for value in values):
            continue
        cells = [figure_text(row.unit, value) for value in values]
        table.add_row(row.name, *cells, *(_ratio(values[0], value) for value in values[1:]))
    for name, cells in _text_rows(run, labels):
        table.add_row(name, *cells)
    return table


def _text_rows(run: dict[str, Any], labels: list[str]) -> list[tuple[str, list[str]]]:
    servers = [run["servers"][label] for label in labels]
    failures = [server["figures"].get("failures") or {} for server in servers]
    rows = [("failures", [", ".join(f"{n} {kind}" for kind, n in f.items()) for f in failures])]
    if run.get("equal_outputs") is not None:
        text = f"{run['equal_outputs']:.0%} / {run['equal_lengths']:.0%}"
        rows.append(("equal texts / output lengths", [text]))
    rows.append(("load average / foreign cores", [_worst_load(server) for server in servers]))
    return rows


def _worst_load(server: dict[str, Any]) -> str:
    """Highest load average and foreign cores of all rounds."""
    loads = server.get("loads", [])
    texts = []
    for key in ("average", "foreign_cores"):
        known = [load[key] for load in loads if load[key] is not None]
        texts.append(f"{max(known):.2f}" if known else "unknown")
    return " / ".join(texts)


def _ratio(ours: float | None, other: float | None) -> str:
    return "" if ours is None or not other else f"{ours / other:.3g}"


def direct_table(run: dict[str, Any]) -> Table:
    """A measurement that is not a load: all its plain numbers."""
    labels = list(run["servers"])
    table = Table("", *labels, title=run["name"], title_justify="left")
    names = dict.fromkeys(
        name
        for label in labels
        for name, value in run["servers"][label]["figures"].items()
        if isinstance(value, (int, float))
    )
    for name in names:
        table.add_row(name, *(figure_text("", figure_of(run, label, name)) for label in labels))
    return table


def gate_cells(gate: dict[str, Any]) -> list[str]:
    """A judged gate as text, in the order of GATE_COLUMNS."""
    terms = gate["gate"]
    is_minimum = terms["at_least"] is not None
    threshold = terms["at_least"] if is_minimum else terms["at_most"]
    unit = "×" if terms["against"] else terms["unit"]
    limit = "–" if terms["limit"] is None else f"{terms['limit']:g}"
    raw = gate.get("columns", {})
    return [
        terms["goal"],
        terms["name"],
        *(raw.get(label, "–") for label in ("ours", "P", "T")),
        "–" if gate["actual"] is None else f"{gate['actual']:.4g} {unit}".strip(),
        f"{'≥' if is_minimum else '≤'} {threshold:g} {unit}".strip(),
        limit,
        "pass" if gate["passed"] else "FALLS SHORT",
    ]


def gate_table(gates: list[dict[str, Any]]) -> Table:
    """All goals: ours, P, T, threshold and limit."""
    table = Table(title="Goals", title_justify="left")
    for column in GATE_COLUMNS:
        table.add_column(column, justify="left" if column in ("goal", "what", "") else "right")
    for gate in gates:
        cells = gate_cells(gate)
        style = "" if gate["passed"] else "red"
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table

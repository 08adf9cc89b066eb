"""One self-contained page from a report: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from mlx_cb.bench import plots
from mlx_cb.bench.plots import Bar, Series, Step
from mlx_cb.bench.report import Report, figure_of
from mlx_cb.bench.table import GATE_COLUMNS, ROWS, figure_text, gate_cells

_STYLE = """
:root{color-scheme:light dark;--ink:#1c1e21;--soft:#5f6670;--paper:#fff;--line:#dfe2e6;
--bad:#c62828;
--c0:#0072b2;--c1:#d55e00;--c2:#c79a00;--c3:#009e73;--c4:#b5609a;--c5:#4c9ed9;--c6:#7a5c3e;--c7:#777}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#9aa3ad;--paper:#15171a;--line:#30353b;
--bad:#ff6b60;--c0:#58b0ea;--c1:#ff8f4a;--c2:#ecc94b;--c3:#3fd0a3;--c4:#e08fc4;--c5:#8fc7f0;
--c6:#c7a583;--c7:#a5a5a5}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:2rem auto;
max-width:1360px;padding:0 1.2rem}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2.4rem;border-top:1px solid var(--line);
padding-top:1rem}h3{font-size:1rem;margin:1.4rem 0 .3rem}
table{border-collapse:collapse;margin:.6rem 0;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .8rem .2rem 0;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}th{font-weight:600;color:var(--soft)}
.scroll{overflow-x:auto}.soft{color:var(--soft)}.bad{color:var(--bad);font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));
gap:1rem 1.6rem}
figure{margin:0}figcaption{color:var(--soft);font-size:.9rem;margin-bottom:.2rem}
svg{width:100%;height:auto}svg text{font-size:11px;fill:var(--soft)}
.mid{text-anchor:middle}.end{text-anchor:end}.grid{stroke:var(--line);stroke-width:1}
.line{fill:none;stroke-width:1.8}.wait{opacity:.28}.stall{fill:var(--bad)}
.key span{display:inline-block;margin-right:1.1rem}.key i{display:inline-block;width:.8rem;
height:.8rem;border-radius:2px;margin-right:.35rem;vertical-align:-1px}
.goals :is(td,th):is(:nth-child(2),:nth-last-child(-n+2)){text-align:left}
details{margin:.8rem 0}pre{white-space:pre-wrap;font-size:12px}
"""
_COLOURS = "".join(
    f".s{n}{{stroke:var(--c{n})}}.f{n}{{fill:var(--c{n});background:var(--c{n})}}"
    for n in range(plots.COLOURS)
)


def render(report: Report) -> str:
    """The whole page."""
    body = [
        "<h1>mlx-cb bench</h1>",
        f'<p class="soft">{escape(report["created"])} · {escape(_machine(report))}</p>',
        _verdict(report),
        _gates(report["gates"]),
        *(_run(run) for run in report["runs"]),
        _details("What is needed to repeat this", _repeat(report)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>mlx-cb bench</title><style>{_STYLE}{_COLOURS}</style></head>"
        f"<body>{''.join(body)}</body></html>"
    )


def _machine(report: Report) -> str:
    environment = report["environment"]
    return f"{environment['processor']}, {environment['cores']} cores, {environment['platform']}"


def _verdict(report: Report) -> str:
    verdict = report["verdict"]
    if not verdict:
        return ""
    style = "" if verdict["concluded"] else ' class="bad"'
    return f"<p{style}>{escape(verdict['text'])}</p>"


def _gates(gates: Sequence[dict[str, Any]]) -> str:
    if not gates:
        return ""
    rows = [[*gate_cells(gate), gate["reason"]] for gate in gates]
    table = _table([*GATE_COLUMNS, ""], rows, [not gate["passed"] for gate in gates])
    return f'<h2>Goals</h2><div class="goals">{table}</div>'


def _run(run: dict[str, Any]) -> str:
    labels = list(run["servers"])
    heading = f"<h2>{escape(run['name'])}</h2>"
    if "workload" not in run:
        return heading + _direct(run, labels)
    parameters = ", ".join(f"{key}={value}" for key, value in run["parameters"].items())
    parts = [
        heading,
        f'<p class="soft">{escape(run["workload"])}({escape(parameters)}) · {escape(run["model"])} '
        f"· seed {run['seed']} · median of {run['rounds']}{escape(_equal(run))}</p>",
        _key(labels),
        _figures(run, labels),
        '<div class="plots">',
        _distribution(run, "ttft", "Time to first token, share of calls"),
        _distribution(run, "itl", "Gaps between tokens, share of gaps"),
        *(_calls(run, label) for label in labels),
        *(_service(run, label) for label in labels),
        *(_steps(run, label) for label in labels),
        "</div>",
        *(_subgroups(run, label) for label in labels),
    ]
    return "".join(parts)


def _equal(run: dict[str, Any]) -> str:
    if run["equal_outputs"] is None:
        return ""
    return (
        f" · equal texts {run['equal_outputs']:.0%}, equal output lengths "
        f"{run['equal_lengths']:.0%}"
    )


def _direct(run: dict[str, Any], labels: list[str]) -> str:
    names = dict.fromkeys(
        name
        for label in labels
        for name, value in run["servers"][label]["figures"].items()
        if isinstance(value, (int, float))
    )
    rows = ([name, *(_number(figure_of(run, label, name)) for label in labels)] for name in names)
    return _table(["", *labels], rows)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}"


def _figures(run: dict[str, Any], labels: list[str]) -> str:
    rows = []
    for row in ROWS:
        values = [figure_of(run, label, row.metric) for label in labels]
        if any(value is not None for value in values):
            rows.append([row.name, *(figure_text(row.unit, value) for value in values)])
    failures = [run["servers"][label]["figures"]["failures"] for label in labels]
    rows.append(["failures by kind", *(_kinds(kinds) for kinds in failures)])
    return _table(["", *labels], rows)


def _kinds(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"


def _key(labels: Iterable[str]) -> str:
    marks = (
        f'<span><i class="f{number % plots.COLOURS}"></i>{escape(label)}</span>'
        for number, label in enumerate(labels)
    )
    return f'<p class="key">{"".join(marks)}</p>'


def _distribution(run: dict[str, Any], what: str, title: str) -> str:
    series = [
        Series(label, plots.ecdf(server["samples"][what]), colour)
        for colour, (label, server) in enumerate(run["servers"].items())
    ]
    return plots.distribution(title, series)


def _calls(run: dict[str, Any], label: str) -> str:
    calls = run["servers"][label]["last_round"]["calls"]
    groups = list(dict.fromkeys(call["group"] for call in calls))
    bars = [
        Bar(
            f"{call['user']} ({call['group']})",
            call["sent"],
            call["first"],
            call["ended"],
            tuple(call["stall"]) if call["stall"] else None,
            groups.index(call["group"]) % plots.COLOURS,
        )
        for call in calls
    ]
    title = f"{label}: each call — pale waits, full talks, red is its longest gap"
    return f"<div>{plots.calls_over_time(title, bars)}{_key(groups)}</div>"


def _service(run: dict[str, Any], label: str) -> str:
    """Output tokens each user has had so far; the eight with the most calls."""
    times: dict[str, list[tuple[float, float]]] = {}
    for call in run["servers"][label]["last_round"]["calls"]:
        arrived = call["times"]
        share = call["output_tokens"] / len(arrived) if arrived else 0.0
        times.setdefault(call["user"], []).extend((time, share) for time in arrived)
    users = sorted(times, key=lambda user: -len(times[user]))[: plots.COLOURS]
    series = []
    for colour, user in enumerate(users):
        total, points = 0.0, [(0.0, 0.0)]
        for time, share in sorted(times[user]):
            total += share
            points.append((time, total))
        series.append(Series(user, points, colour))
    plot = plots.curves(f"{label}: output tokens served to each user", series, "tokens")
    return f"<div>{plot}{_key(users)}</div>" if plot else ""


def _steps(run: dict[str, Any], label: str) -> str:
    steps = [
        Step(step["started"], step["seconds"], step["rows_decode"], step["rows_prefill"])
        for step in run["servers"][label]["last_round"]["steps"]
    ]
    if not steps:
        return ""
    plot = plots.steps_over_time(f"{label}: the engine's steps, last round", steps)
    return f"<div>{plot}{_key(['decode rows', 'prefill rows'])}</div>"


def _subgroups(run: dict[str, Any], label: str) -> str:
    figures = run["servers"][label]["figures"]
    columns = ["", "calls", "TTFT p50", "p95", "max", "gap p50", "p99", "max", "e2e p95", "goodput"]
    metrics = ["ttft.p50", "ttft.p95", "ttft.max", "itl.p50", "itl.p99", "stall", "e2e.p95"]
    parts = []
    for kind in ("groups", "users"):
        names = list(figures[kind])
        if len(names) < 2:
            continue
        rows = []
        for name in names:
            values = [figure_of(run, label, f"{kind}.{name}.{metric}") for metric in metrics]
            goodput = figure_of(run, label, f"{kind}.{name}.goodput")
            calls = figures[kind][name]["calls"]
            latencies = [figure_text("s", value) for value in values]
            rows.append([name, f"{calls:g}", *latencies, figure_text("%", goodput)])
        parts.append(f"<h3>{escape(label)} by {kind[:-1]}</h3>{_table(columns, rows)}")
    return _details(f"{label}: every group and user", "".join(parts)) if parts else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], bad: Sequence[bool] = ()) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = []
    for number, row in enumerate(rows):
        style = ' class="bad"' if number < len(bad) and bad[number] else ""
        lines.append(f"<tr{style}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _repeat(report: Report) -> str:
    lines = [f"{key}: {value}" for key, value in report["environment"].items()]
    for name, facts in report["models"].items():
        lines += [f"model {name}: {facts}"]
    for run in report["runs"]:
        for label, server in run["servers"].items():
            if "command" not in server:
                continue
            loads = "; ".join(
                ", ".join(f"{key} {value}" for key, value in load.items() if value is not None)
                for load in server["loads"]
            )
            lines.append(f"{run['name']} {label}: {' '.join(server['command'])} — {loads}")
    return f"<pre>{escape(chr(10).join(lines))}</pre>"

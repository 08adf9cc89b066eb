"""Plots as SVG text: lines, calls over time, steps. Knows numbers and labels, not reports.

Colours are CSS classes (`s0` … `s7`), so that a page decides them for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 34
COLOURS = 8

_Text = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels; logarithmic for latencies that span orders of magnitude."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Pixel of a value; values outside are drawn at the edge."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values, about five of them; powers of ten (with 2 and 5 on short axes) in logs."""
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            factors = (1, 2, 5) if len(decades) <= 3 else (1,)
            marks = [factor * 10.0**decade for decade in decades for factor in factors]
            return [mark for mark in marks if self.low <= mark <= self.high]
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = power * next(factor for factor in (1, 2, 5, 10) if raw <= factor * power)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Series:
    """A line: points in drawing order, and the colour it has everywhere on the page."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int


@dataclass(frozen=True, slots=True)
class Bar:
    """One call over time: waiting from `sent` to `first`, talking to `ended`; `stall` its longest
    gap. `first` is None for a call that never was answered."""

    label: str
    sent: float
    first: float | None
    ended: float
    stall: tuple[float, float] | None
    colour: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine: seconds, and rows of both kinds."""

    started: float
    seconds: float
    decode: float
    prefill: float


def seconds_text(value: float) -> str:
    """1.2 s, 85 ms, 40 µs."""
    if value == 0:
        return "0"
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= factor * 0.9999:
            return f"{value / factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def ecdf(values: Sequence[float]) -> list[tuple[float, float]]:
    """Points of the share of values at or below each value."""
    ordered = sorted(values)
    return [(value, (index + 1) / len(ordered)) for index, value in enumerate(ordered)]


def distribution(title: str, series: Sequence[Series]) -> str:
    """Empirical distribution of latencies in seconds, log axis."""
    positive = [x for line in series for x, _ in line.points if x > 0]
    if not positive:
        return ""
    low, high = max(min(positive), 1e-5), max(positive)
    x = Axis(low * 0.8, max(high, low) * 1.25, LEFT, WIDTH - RIGHT, is_log=True)
    y = Axis(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    parts = [_frame(x, y, title, seconds_text, lambda value: f"{value:.0%}")]
    parts += [_path(line, x, y) for line in series if line.points]
    return _svg(title, parts)


def curves(title: str, series: Sequence[Series], y_label: str) -> str:
    """Values over time in seconds, from zero."""
    points = [point for line in series for point in line.points]
    if not points:
        return ""
    x = Axis(0.0, max(p[0] for p in points) or 1.0, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, max(p[1] for p in points) or 1.0, HEIGHT - BOTTOM, TOP)
    parts = [_frame(x, y, f"{y_label} over time", seconds_text, _plain)]
    parts += [_path(line, x, y) for line in series]
    return _svg(title, parts)


def calls_over_time(title: str, bars: Sequence[Bar]) -> str:
    """One row per call: pale while it waits, full while it talks, red where it stalled longest."""
    if not bars:
        return ""
    row = max(2.0, min(12.0, 360 / len(bars)))
    height = TOP + BOTTOM + row * len(bars)
    x = Axis(0.0, max(bar.ended for bar in bars) or 1.0, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, len(bars), TOP, height - BOTTOM)
    parts = [_frame(x, y, "seconds since the start", seconds_text, None)]
    for index, bar in enumerate(bars):
        top, thick = TOP + index * row, max(1.0, row - 1)
        first = bar.first if bar.first is not None else bar.ended
        tip = f"{bar.label}: waits {seconds_text(first - bar.sent)}"
        parts.append(_box(x.at(bar.sent), x.at(first), top, thick, f"f{bar.colour} wait", tip))
        if bar.first is not None:
            tip = f"{bar.label}: talks {seconds_text(bar.ended - first)}"
            parts.append(_box(x.at(first), x.at(bar.ended), top, thick, f"f{bar.colour}", tip))
        if bar.stall is not None:
            tip = f"{bar.label}: longest gap {seconds_text(bar.stall[1] - bar.stall[0])}"
            start, end = x.at(bar.stall[0]), x.at(bar.stall[1])
            parts.append(_box(start, end, top + thick / 4, thick / 2, "stall", tip))
    return _svg(title, parts, height)


def steps_over_time(title: str, steps: Sequence[Step]) -> str:
    """Rows per step, decode below and prefill above it; as wide as the step took."""
    if not steps:
        return ""
    steps = _binned(steps, 1200)
    x = Axis(0.0, max(step.started + step.seconds for step in steps) or 1.0, LEFT, WIDTH - RIGHT)
    tallest = max(step.decode + step.prefill for step in steps)
    y = Axis(0.0, max(tallest, 1.0), HEIGHT - BOTTOM, TOP)
    parts = [_frame(x, y, "rows per step over time", seconds_text, _plain)]
    for step in steps:
        start, end = x.at(step.started), x.at(step.started + step.seconds)
        base, middle, top = y.at(0), y.at(step.decode), y.at(step.decode + step.prefill)
        tip = (
            f"{seconds_text(step.started)}: {step.decode:.3g} decode and {step.prefill:.3g} "
            f"prefill rows, {seconds_text(step.seconds)}"
        )
        parts.append(_box(start, end, middle, base - middle, "f0", tip))
        parts.append(_box(start, end, top, middle - top, "f1", tip))
    return _svg(title, parts)


def _binned(steps: Sequence[Step], most: int) -> list[Step]:
    """Neighbouring steps averaged when there are more than can be told apart."""
    size = math.ceil(len(steps) / most)
    if size == 1:
        return list(steps)
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    return [
        Step(
            group[0].started,
            sum(step.seconds for step in group),
            sum(step.decode for step in group) / len(group),
            sum(step.prefill for step in group) / len(group),
        )
        for group in groups
    ]


def _plain(value: float) -> str:
    return f"{value:,.4g}"


def _svg(title: str, parts: Sequence[str], height: float = HEIGHT) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height:g}" '
        f'role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )


def _frame(x: Axis, y: Axis, x_label: str, x_text: _Text, y_text: _Text | None) -> str:
    """Grid, ticks and the label below; without `y_text` the rows go unlabelled."""
    bottom, top = max(y.start, y.end), min(y.start, y.end)
    parts = []
    for tick in x.ticks():
        at = f"{x.at(tick):.1f}"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{top:g}" y2="{bottom:g}"/>')
        parts.append(f'<text x="{at}" y="{bottom + 14:g}" class="mid">{x_text(tick)}</text>')
    y_ticks = [(y.at(tick), y_text(tick)) for tick in y.ticks()] if y_text is not None else []
    for height, text in y_ticks:
        at = f"{height:.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at}" dy="4" class="end">{text}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:g}" y="{bottom + 28:g}" class="mid">{escape(x_label)}</text>')
    return "".join(parts)


def _path(line: Series, x: Axis, y: Axis) -> str:
    points = " ".join(f"{x.at(px):.1f},{y.at(py):.1f}" for px, py in line.points)
    return (
        f'<polyline class="line s{line.colour % COLOURS}" points="{points}">'
        f"<title>{escape(line.label)}</title></polyline>"
    )


def _box(start: float, end: float, top: float, height: float, classes: str, tip: str) -> str:
    if height <= 0:
        return ""
    return (
        f'<rect class="{classes}" x="{start:.2f}" y="{top:.2f}" '
        f'width="{max(end - start, 0.4):.2f}" height="{height:.2f}">'
        f"<title>{escape(tip)}</title></rect>"
    )

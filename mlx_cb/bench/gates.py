"""Thresholds agreed before the measurement, and what became of them.

A gate takes one figure of one server, as it is or as a ratio to another figure, and says what it
must at least or at most be. Reads a TOML file and plain figures; measures nothing.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mlx_cb.bench.metrics import Figures, look_up
from mlx_cb.errors import InvalidRequest


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a number is found: in which run, of which server, under which dotted name."""

    run: str
    metric: str
    of: str = "ours"

    def __str__(self) -> str:
        return f"{self.run}/{self.of}/{self.metric}"


class Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One goal.

    Attributes:
        goal: its number in the issue, e.g. "G1"; `name` says it in words.
        against: makes it a ratio, value / against.
        at_least, at_most: the threshold; exactly one of them.
        limit: what a measurement or the cost model allows, in the unit of the threshold.
        why: where the limit comes from.
        unit: of an absolute figure.
        equal_lengths: least share of calls with equal output lengths on all servers of the run.
    """

    goal: str
    name: str
    value: Figure
    why: str
    against: Figure | None = None
    at_least: float | None = None
    at_most: float | None = None
    limit: float | None = None
    unit: str = ""
    equal_lengths: float = 0.9

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"{self.goal} {self.name}: give either at_least or at_most")

    @property
    def runs(self) -> set[str]:
        """Names of the runs it needs."""
        return {self.value.run} | ({self.against.run} if self.against else set())


class GateResult(msgspec.Struct):
    """What a gate came to. `actual` is None when it was not measured."""

    gate: Gate
    actual: float | None
    passed: bool
    reason: str = ""


class ServerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server of the suite: which program (`mlx-cb`, `mlx-lm`) with which flags beside the
    defaults, or the `url` of one that is already running (kind `url`). `{folder}` in a flag is a
    folder that lives as long as the suite."""

    kind: str
    flags: tuple[str, ...] = ()
    url: str | None = None


class RunEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measurement of the suite.

    Attributes:
        measures: `load` puts a workload on servers; `startup`, `restart`, `disconnect`,
            `endurance` and `host` are the measurements of `suite.py` and `host.py` that no load
            can make.
        model: `float32` or `quantized` form of the demo model, or the `tiny` random model.
        fields: body fields sent with every call.
        users: of the workload, who get keys of their own from servers of ours.
    """

    name: str
    measures: str = "load"
    workload: str = ""
    parameters: dict[str, str | int | float] = {}
    servers: tuple[str, ...] = ("ours", "P")
    model: str = "float32"
    rounds: int = 3
    fields: dict[str, str | int | float | bool] = {}
    users: tuple[str, ...] = ()


class GateFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything in a gates file: only `gate` is needed outside the suite."""

    gate: tuple[Gate, ...] = ()
    run: tuple[RunEntry, ...] = ()
    server: dict[str, ServerEntry] = {}


SHIPPED = Path(__file__).with_name("gates.toml")


def read_gates(path: Path) -> GateFile:
    """Read and check a gates file. Raises InvalidRequest, naming the place."""
    try:
        content = msgspec.convert(tomllib.loads(path.read_text()), GateFile)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"{path}: {error}") from error
    if not content.gate:
        raise InvalidRequest(f"{path} holds no gate")
    return content


class Measured(msgspec.Struct):
    """Figures of one run: by server, and how far the servers did the same work."""

    servers: dict[str, Figures]
    equal_lengths: float | None = None


def judge(gate: Gate, measured: Mapping[str, Measured]) -> GateResult:
    """Compare one gate with what was measured; what was not measured does not pass."""
    value = _find(gate.value, measured)
    if value is None:
        return GateResult(gate, None, False, f"{gate.value} was not measured")
    if gate.against is not None:
        base = _find(gate.against, measured)
        if base is None:
            return GateResult(gate, None, False, f"{gate.against} was not measured")
        if base == 0 and not (gate.at_least is not None and value > 0):
            return GateResult(gate, None, False, f"{gate.against} is zero")
        # Something is more than any multiple of nothing.
        value = value / base if base else math.inf
    unfair = _unfair(gate, measured)
    if unfair:
        return GateResult(gate, value, False, unfair)
    if gate.at_least is not None and value < gate.at_least:
        return GateResult(gate, value, False, f"{value:.4g} is below {gate.at_least:g}")
    if gate.at_most is not None and value > gate.at_most:
        return GateResult(gate, value, False, f"{value:.4g} is above {gate.at_most:g}")
    return GateResult(gate, value, True)


def judge_all(gates: tuple[Gate, ...], measured: Mapping[str, Measured]) -> list[GateResult]:
    """Judge every gate, in the file's order."""
    return [judge(gate, measured) for gate in gates]


def relevant(gates: tuple[Gate, ...], runs: set[str]) -> tuple[Gate, ...]:
    """Gates that need nothing but these runs. Raises InvalidRequest when that leaves none."""
    chosen = tuple(gate for gate in gates if gate.runs <= runs)
    if not chosen:
        raise InvalidRequest(f"no gate is about {', '.join(sorted(runs))}")
    return chosen


def _find(figure: Figure, measured: Mapping[str, Measured]) -> float | None:
    run = measured.get(figure.run)
    figures: Any = run.servers.get(figure.of) if run else None
    return look_up(figures, figure.metric) if figures else None


def _unfair(gate: Gate, measured: Mapping[str, Measured]) -> str:
    """Why the servers' figures cannot be held against each other; empty when they can."""
    for name in sorted(gate.runs):
        equal = measured[name].equal_lengths
        if gate.against is not None and equal is not None and equal < gate.equal_lengths:
            return f"{name}: only {equal:.0%} of the calls had equal output lengths"
    for figure in filter(None, (gate.value, gate.against)):
        failures = measured[figure.run].servers[figure.of].get("failures") or {}
        if figure.of == "ours" and failures:
            return f"{figure.run}: ours failed {sum(failures.values())} calls ({failures})"
    return ""

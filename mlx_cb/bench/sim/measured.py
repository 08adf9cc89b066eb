"""Reads what real servers measured of themselves, and makes the description of this machine of it.

Our steps come from the journal in a bench report, the peer's from the file of `bench.peer_journal`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mlx_cb.bench.sim.cost import BLAS_ROWS, FittedCost, PassShape
from mlx_cb.bench.sim.fit import Measured, fit_cost
from mlx_cb.bench.sim.substrate import Substrate
from mlx_cb.bench.stats import median
from mlx_cb.errors import InvalidRequest

PAUSE_S = 0.05  # a longer gap between two steps is idleness, not the host's work


def our_steps(steps: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """Measured steps from the `steps` of a report."""
    return [
        Measured(
            [
                PassShape(
                    rows=int(step["rows_decode"] + step["rows_prefill"]),
                    sampled=int(step["rows_decode"] + step["samples"]),
                    context=int(step["context_sum"] - step["rows_prefill"]),
                    chunks=int(step["chunks"]),
                    pairs=step["pairs"],
                    scores=step["scores"],
                )
            ],
            step["seconds"],
            step["started"],
            int(step["rows_decode"] + step["samples"]),
        )
        for step in steps
        if step["rows_decode"] + step["rows_prefill"] > 0 and "samples" in step
    ]


def peer_steps(path: Path, since: float = 0.0, until: float = float("inf")) -> list[Measured]:
    """Measured steps from the peer's journal, begun between two moments of the monotonic clock."""
    entries = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    chosen = [entry for entry in entries if since <= entry["started"] <= until]
    return [
        Measured(
            # What was moved before a step is paid for by its first pass.
            [
                _peer_pass(part, 0 if number else entry["copied"])
                for number, part in enumerate(entry["passes"])
            ],
            entry["seconds"],
            entry["started"],
            entry["tokens"],
        )
        for entry in chosen
    ]


def _peer_pass(written: tuple[str, int, int, int], copied: int) -> PassShape:
    kind, count, tokens, before = written
    if kind == "decode":
        return PassShape(count, count, context=count * (before + 1), copied=copied)
    return PassShape(
        rows=count * tokens,
        context=count * before,
        chunks=1,
        pairs=count * tokens * (before + tokens / 2),
        scores=count * tokens * (before + tokens),
        copied=copied,
    )


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds of the host: between two steps, per token handed out, and to the client and back."""

    step_s: float
    row_s: float
    front_s: float

    def at_pace(self, pace: float) -> HostTimes:
        """The same, each `pace` times as long."""
        return HostTimes(pace * self.step_s, pace * self.row_s, pace * self.front_s)


def host_times(steps: Sequence[Measured], calls: Sequence[Mapping[str, Any]]) -> HostTimes:
    """What happens around the steps. `calls` ran alone; their times share the steps' clock."""
    ordered = sorted(steps, key=lambda step: step.started)
    between = [
        (float(one.tokens), two.started - one.started - one.seconds)
        for one, two in pairwise(ordered)
        if 0 <= two.started - one.started - one.seconds < PAUSE_S
    ]
    step_s = row_s = 0.0
    if len({tokens for tokens, _ in between}) > 1:
        tokens, gaps = (np.asarray(column) for column in zip(*between, strict=True))
        row_s, step_s = (float(value) for value in np.polyfit(tokens, gaps, 1))
    elif between:
        step_s = median([gap for _, gap in between])
    fronts = []
    for call in calls:
        own = [
            s
            for s in ordered
            if call["sent"] <= s.started and s.started + s.seconds <= call["first"]
        ]
        if own:
            fronts.append(
                call["first"] - call["sent"] - (own[-1].started - own[0].started) - own[-1].seconds
            )
    return HostTimes(max(step_s, 0.0), max(row_s, 0.0), max(median(fronts), 0.0) if fronts else 0.0)


@dataclass(frozen=True, slots=True)
class Side:
    """One server on this machine: its passes and what is around them."""

    cost: FittedCost
    host: HostTimes

    def at_pace(self, pace: float) -> Side:
        """The same server on the machine while that takes `pace` times as long for everything."""
        return Side(self.cost.at_pace(pace), self.host.at_pace(pace))


@dataclass(frozen=True, slots=True)
class Description:
    """This machine with a model on it, as it was measured.

    Attributes:
        made: from what and when, for people.
        num_blocks: of 16 tokens, in our server's pool.
    """

    name: str
    made: str
    ours: Side
    peer: Side
    num_blocks: int
    max_tokens: int

    def at_pace(self, ours: float, peer: float) -> Description:
        """The machine at another time, when it takes so many times as long."""
        return replace(self, ours=self.ours.at_pace(ours), peer=self.peer.at_pace(peer))

    def substrate(self) -> Substrate:
        """To simulate on."""
        return Substrate(
            name=self.name,
            ours=self.ours.cost,
            peer=self.peer.cost,
            runs_beside_host=False,
            kv_bytes=self.num_blocks * 16.0,
            token_bytes=1,
            max_tokens=self.max_tokens,
            front_s=self.ours.host.front_s,
            peer_front_s=self.peer.host.front_s,
            step_s=self.ours.host.step_s,
            row_s=self.ours.host.row_s,
            peer_step_s=self.peer.host.step_s,
            peer_row_s=self.peer.host.row_s,
            salts_users=True,
            tile_rows=BLAS_ROWS,
        )


class _SideFile(msgspec.Struct, forbid_unknown_fields=True):
    coefficients: list[float]
    spread: float
    step_s: float
    row_s: float
    front_s: float


class _File(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    made: str
    num_blocks: int
    max_tokens: int
    ours: _SideFile
    peer: _SideFile


SHIPPED = Path(__file__).with_name("cpu.json")


def content_of(description: Description) -> dict[str, Any]:
    """Plain data, as it goes into a file or a report."""

    def side(own: Side) -> _SideFile:
        return _SideFile(
            [float(f"{value:.5g}") for value in own.cost.coefficients],
            round(own.cost.spread, 4),
            round(own.host.step_s, 6),
            round(own.host.row_s, 7),
            round(own.host.front_s, 5),
        )

    file = _File(
        description.name,
        description.made,
        description.num_blocks,
        description.max_tokens,
        side(description.ours),
        side(description.peer),
    )
    content: dict[str, Any] = msgspec.to_builtins(file)
    return content


def description_of(content: Mapping[str, Any], where: str) -> Description:
    """From plain data. Raises InvalidRequest, naming `where` it came from, when it is none."""
    try:
        file = msgspec.convert(content, type=_File)
        ours, peer = (
            Side(
                FittedCost(tuple(own.coefficients), own.spread),
                HostTimes(own.step_s, own.row_s, own.front_s),
            )
            for own in (file.ours, file.peer)
        )
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidRequest(f"{where} does not describe a machine: {error}") from error
    return Description(file.name, file.made, ours, peer, file.num_blocks, file.max_tokens)


def write_description(description: Description, path: Path) -> None:
    """Keep it in a file."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content_of(description)), indent=1))


def read_description(path: Path) -> Description:
    """From a file. Raises InvalidRequest when it is none."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"{path} does not describe a machine: {error}") from error
    return description_of(content, str(path))


#: Of one server: the steps of each probe, and the calls that ran alone in any of them.
Probed = tuple[Sequence[Sequence[Measured]], Sequence[Mapping[str, Any]]]


def describe(
    name: str, made: str, sides: tuple[Probed, Probed], *, num_blocks: int, max_tokens: int
) -> tuple[Description, tuple[list[float], list[float]]]:
    """Fit ours and the peer; also returns the paces of each in its probes (see `fit_cost`)."""
    (ours, our_paces), (peer, peer_paces) = (_side(*side) for side in sides)
    description = Description(name, made, ours, peer, num_blocks, max_tokens)
    return description, (our_paces, peer_paces)


def _side(
    probes: Sequence[Sequence[Measured]], calls: Sequence[Mapping[str, Any]]
) -> tuple[Side, list[float]]:
    fit = fit_cost(probes)
    return Side(fit.cost, host_times(list(chain.from_iterable(probes)), calls)), fit.paces

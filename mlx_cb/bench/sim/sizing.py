"""Which settings suit so many people on such a machine: simulated, the best of a few.

First the number of places is chosen, then the target for gaps, each by the share of calls that went
well; among equals the smaller memory and the steadier text win.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_cb.bench.metrics import Figures, look_up
from mlx_cb.bench.sim.engines import Engine, simulate
from mlx_cb.bench.sim.substrate import Substrate
from mlx_cb.bench.workloads.team import People
from mlx_cb.config import SchedulerConfig

PLACES = (8, 16, 32, 64)
TARGETS_MS = (50.0, 100.0, 200.0)
SAME = 0.01  # of goodput: less is no difference
SERVED = 0.9  # share of good calls from which people count as served


@dataclass(frozen=True, slots=True)
class Advice:
    """The settings that served these people best, and how well.

    Attributes:
        goodput: share of calls with a first token within 2 s and gaps within 150 ms.
        one_at_a_time: the same with one place: what batching is held against.
        wait_s: the 99th percentile of waits for the first token: a queue limit below it refuses
            people whom the machine could have served.
    """

    people: int
    max_num_seqs: int
    itl_target_ms: float
    goodput: float
    ttft_p95: float
    itl_p99: float
    output_tok_s: float
    wait_s: float
    one_at_a_time: float

    @property
    def is_enough(self) -> bool:
        """The machine serves these people."""
        return self.goodput >= SERVED

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def advise(
    substrate: Substrate,
    load: People,
    *,
    seed: int = 1,
    announce: Callable[[str], None] = lambda what: None,
) -> Advice:
    """Try the settings one after the other."""

    def figures(**settings: Any) -> Figures:
        announce(f"{load.people} people, {settings}")
        # Nobody is refused, so that the waits are all seen.
        config = SchedulerConfig(max_queue_wait_s=1e9, **settings)
        return simulate("people", load, Engine("ours", config), substrate, seed=seed).figures

    by_places = {places: figures(max_num_seqs=places) for places in PLACES}
    places = _best(by_places, sorted(by_places))
    by_target = {100.0: by_places[places]} | {
        target: figures(max_num_seqs=places, itl_target_ms=target)
        for target in TARGETS_MS
        if target != 100.0
    }
    target = _best(by_target, (100.0, 50.0, 200.0))
    chosen = by_target[target]
    alone = figures(max_num_seqs=1)
    return Advice(
        load.people,
        places,
        target,
        _of(chosen, "goodput"),
        _of(chosen, "ttft.p95"),
        _of(chosen, "itl.p99"),
        _of(chosen, "output_tok_s"),
        _of(chosen, "ttft.p99"),
        _of(alone, "goodput"),
    )


def _best(found: dict[Any, Figures], preferred: Sequence[Any]) -> Any:
    """The first of `preferred` whose goodput is no worse than the best."""
    best = max(_of(figures, "goodput") for figures in found.values())
    return next(key for key in preferred if _of(found[key], "goodput") >= best - SAME)


def _of(figures: Figures, metric: str) -> float:
    value = look_up(figures, metric)
    return 0.0 if value is None else value

"""The load that the cost of passes is fitted on; nothing is judged by it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mlx_cb.bench.calls import Call, Lane, Milestone, Plan, Prompt
from mlx_cb.bench.workloads.base import Workload, seeds

ALONE = (16, 48, 128, 256, 512, 1024)  # prompt lengths measured alone
#: Streams, tokens of their prompts, calls of each. The number of streams falls by one at a time, as
#: odd numbers cost more than even ones; with several calls prompts come in beside streams.
TOGETHER = ((2, 24, 1), (4, 24, 1), (12, 24, 1), (16, 24, 1), (8, 256, 1), (6, 512, 1), (6, 24, 3))
SAID = range(8, 32, 2)  # tokens of a stage's streams in turn: they leave one after another


@dataclass(frozen=True)
class Probe(Workload):
    """Passes of every shape: single prompts of growing length, then streams of growing number.

    Each stage begins when the one before it has ended, and its streams end one after another.
    """

    alone: tuple[int, ...] = ALONE
    together: tuple[tuple[int, int, int], ...] = TOGETHER

    def plan(self, seed: int) -> Plan:
        """One lane for the single prompts, one per stream."""
        next_seed = seeds(seed)
        alone = deque(Call(Prompt(length, next_seed()), 4, group="alone") for length in self.alone)
        lanes = [Lane(alone)]
        before = Milestone("alone", len(self.alone))
        for streams, length, calls in self.together:
            group = f"{streams}x{length}x{calls}"
            lanes += [
                Lane(
                    deque(
                        Call(Prompt(length, next_seed()), SAID[n % len(SAID)], group=group)
                        for n in range(stream, stream + calls)
                    ),
                    starts_when=before,
                )
                for stream in range(streams)
            ]
            before = Milestone(group, streams * calls)
        return Plan(lanes)


SHORT = Probe(alone=(128,), together=((4, 24, 1),))

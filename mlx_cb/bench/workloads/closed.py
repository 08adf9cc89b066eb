"""Closed loops: a fixed number of streams is kept busy."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from mlx_cb.bench.calls import Call, Lane, Plan, Prompt
from mlx_cb.bench.distributions import MIXES
from mlx_cb.bench.workloads.base import Workload, seeds, workload


@workload("steady")
@dataclass(frozen=True)
class Steady(Workload):
    """Equal lengths, all at once: `decode_tok_s` is the speed while all of them decode."""

    streams: int = 16
    prompt: int = 24
    output: int = 48

    def plan(self, seed: int) -> Plan:
        """One lane per stream, one call each."""
        next_seed = seeds(seed)
        return Plan([Lane(deque([self.call(index, next_seed())])) for index in range(self.streams)])

    def call(self, index: int, seed: int) -> Call:
        """The call of one stream."""
        return Call(Prompt(self.prompt, seed), self.output, user=f"user{index % 8}")


@workload("many")
@dataclass(frozen=True)
class Many(Steady):
    """Hundreds of SSE streams at once: what serving costs beside the model."""

    streams: int = 256
    prompt: int = 16
    output: int = 64


@workload("samplers")
@dataclass(frozen=True)
class Samplers(Steady):
    """As steady, every stream with a temperature, top-p and, with `seeded=1`, a seed of its own."""

    streams: int = 32
    seeded: int = 1

    def call(self, index: int, seed: int) -> Call:
        """Parameters spread evenly over their usual ranges."""
        share = index / max(1, self.streams - 1)
        body = [("temperature", round(0.5 + share, 3)), ("top_p", round(0.80 + 0.15 * share, 3))]
        if self.seeded:
            body.append(("seed", index))
        prompt = Prompt(self.prompt, seed)
        return Call(prompt, self.output, user=f"user{index % 8}", body=tuple(body))


@workload("churn")
@dataclass(frozen=True)
class Churn(Workload):
    """Short answers of unequal length: somebody joins or leaves at nearly every step."""

    streams: int = 16
    calls: int = 64
    prompt: int = 24
    output_low: int = 6
    output_high: int = 20

    def plan(self, seed: int) -> Plan:
        """All lanes share one queue of calls."""
        queue = deque(self.short_calls(seed))
        return Plan([Lane(queue) for _ in range(self.streams)])

    def short_calls(self, seed: int) -> list[Call]:
        """Calls with output lengths uniform between the two limits."""
        rng, next_seed = random.Random(seed), seeds(seed)
        return [
            Call(
                Prompt(self.prompt, next_seed()),
                rng.randint(self.output_low, self.output_high),
                user=f"user{index % 4}",
                group="short",
            )
            for index in range(self.calls)
        ]


@workload("skew")
@dataclass(frozen=True)
class Skew(Churn):
    """Churn beside one long context: padding to the longest would make everybody pay for it."""

    long_prompt: int = 768
    long_output: int = 64

    def plan(self, seed: int) -> Plan:
        """One lane for the long context, the others churn."""
        long = Call(
            Prompt(self.long_prompt, seeds(seed + 1)()), self.long_output, user="long", group="long"
        )
        queue = deque(self.short_calls(seed))
        return Plan([Lane(deque([long])), *(Lane(queue) for _ in range(self.streams - 1))])


@workload("static")
@dataclass(frozen=True)
class StaticComparison(Workload):
    """Conversational output lengths, more calls waiting than there are places: what continuous
    batching gains over fixed batches (start one server with `--scheduler static`, and both with
    `--max-num-seqs` = `streams`)."""

    streams: int = 16
    batches: int = 4
    prompt: int = 16
    scale: float = 8.0

    def plan(self, seed: int) -> Plan:
        """Twice as many lanes as places, so that a batch always finds enough to begin with."""
        rng, next_seed = random.Random(seed), seeds(seed)
        output = MIXES["conv"].output.scaled(self.scale)
        queue = deque(
            Call(Prompt(self.prompt, next_seed()), max(2, output.draw(rng)))
            for _ in range(self.streams * self.batches)
        )
        return Plan([Lane(queue) for _ in range(2 * self.streams)])

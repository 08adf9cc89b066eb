"""What a team does to one machine: people at work at once, backlogs, overload."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from mlx_cb.bench.calls import Call, Lane, Plan, Prompt, Run
from mlx_cb.bench.distributions import AGENT_STEP, MIXES
from mlx_cb.bench.metrics import Figures, Slo
from mlx_cb.bench.stats import summarize
from mlx_cb.bench.workloads.arriving import Poisson
from mlx_cb.bench.workloads.base import Workload, seeds, workload


@workload("people")
@dataclass(frozen=True)
class People(Workload):
    """People who use the machine at the same time: most chat in turns and think in between, some
    have a coding agent that hardly thinks. `agents` is the share of the latter."""

    people: int = 20
    turns: int = 8
    think_s: float = 45.0
    shared: int = 600
    agents: float = 0.0
    scale: float = 8.0
    slo = Slo(ttft_s=2.0, itl_p99_s=0.15)

    def plan(self, seed: int) -> Plan:
        """One lane and one conversation per person, begun at some moment of the first pause."""
        rng, next_seed, system = random.Random(seed), seeds(seed), seeds(seed + 1)()
        num_agents = round(self.people * self.agents)
        lanes = []
        for number in range(self.people):
            calls = (
                self._agent(number, rng, next_seed())
                if number < num_agents
                else self._chat(number, rng, next_seed(), system)
            )
            lanes.append(Lane(calls, starts_at_s=rng.uniform(0.0, self.think_s)))
        return Plan(lanes)

    def _chat(self, number: int, rng: random.Random, seed: int, system: int) -> deque[Call]:
        output = MIXES["conv"].output.scaled(self.scale)
        shared = round(self.shared / self.scale)
        return deque(
            Call(
                Prompt(
                    max(4, round(rng.uniform(30, 120) / self.scale)),
                    seed + turn,
                    shared=0 if turn else shared,
                    shared_seed=system,
                    conversation=f"person{number}",
                ),
                max(2, output.draw(rng)),
                user=f"person{number}",
                group="chat",
                think_s=rng.expovariate(1 / self.think_s) if turn else 0.0,
            )
            for turn in range(self.turns)
        )

    def _agent(self, number: int, rng: random.Random, seed: int) -> deque[Call]:
        mix = AGENT_STEP.scaled(self.scale)
        first = max(8, round(rng.uniform(4000, 12000) / self.scale))
        return deque(
            Call(
                Prompt(
                    max(4, min(mix.prompt.draw(rng), first)) if step else first,
                    seed + step,
                    conversation=f"agent{number}",
                ),
                max(2, min(mix.output.draw(rng), round(1000 / self.scale))),
                user=f"agent{number}",
                group="agent",
                think_s=rng.uniform(0.5, 3.0) if step else 0.0,
            )
            for step in range(2 * self.turns)
        )


@workload("backlog")
@dataclass(frozen=True)
class Backlog(Workload):
    """Users who all have more work than the machine can do, of sizes that `growth` multiplies from
    one to the next: how service is divided while all of them wait."""

    users: int = 4
    calls: int = 48
    streams: int = 12
    prompt: int = 256
    output: int = 64
    growth: float = 1.5

    def plan(self, seed: int) -> Plan:
        """`streams` lanes per user over one queue; smaller calls are more in number."""
        next_seed = seeds(seed)
        lanes = []
        for number in range(self.users):
            size = self.growth**number
            queue = deque(
                Call(
                    Prompt(max(1, round(self.prompt * size)), next_seed()),
                    max(2, round(self.output * size)),
                    user=f"user{number}",
                    group=f"size{number}",
                )
                for _ in range(max(1, round(self.calls / size)))
            )
            lanes += [Lane(queue) for _ in range(self.streams)]
        return Plan(lanes)


@workload("overload")
@dataclass(frozen=True)
class Overload(Poisson):
    """As poisson, at `times` the rate that the machine can take: what becomes of those who are let
    in, and of those who are not."""

    times: float = 3.0
    calls: int = 96
    users: int = 16

    def plan(self, seed: int) -> Plan:
        """The plan of poisson at the multiplied rate."""
        load = Poisson(
            self.mix, self.rate * self.times, self.calls, self.scale, self.bursty, self.users
        )
        return load.plan(seed)

    def figures(self, run: Run) -> Figures:
        """Shares and times of those who were refused, goodput of those who were not."""
        refused = [r for r in run.records if r.failure in ("http_429", "http_503")]
        admitted = [r for r in run.records if r not in refused and not r.cancelled]
        good = sum(self.slo.is_met(record) for record in admitted)
        return {
            "refused": len(refused) / max(1, len(run.records)),
            "refusal": summarize([record.ended_s - record.sent_s for record in refused]),
            "admitted_goodput": good / len(admitted) if admitted else None,
        }

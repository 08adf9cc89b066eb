"""What a team does to one machine: people at work at once, and backlogs."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mlx_cb.bench.calls import Call, Lane, Plan, Prompt, Run
from mlx_cb.bench.distributions import AGENT_STEP, MIXES
from mlx_cb.bench.metrics import Figures, Slo, service_by_user
from mlx_cb.bench.workloads.base import Workload, seeds, workload


@workload("people")
@dataclass(frozen=True)
class People(Workload):
    """People who use the machine at the same time: most chat in turns and think in between, some
    have a coding agent that hardly thinks. `agents` is the share of the latter."""

    people: int = 20
    turns: int = 4
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
        return Plan(
            [lane for number in range(self.users) for lane in self._lanes(number, next_seed)]
        )

    def _lanes(self, number: int, next_seed: Callable[[], int]) -> list[Lane]:
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
        return [Lane(queue) for _ in range(self.streams)]

    def names(self) -> list[str]:
        """The users."""
        return [f"user{number}" for number in range(self.users)]

    def alone(self) -> list[Workload]:
        """Each user's backlog without the others."""
        return [OnlyUser(self, number) for number in range(self.users)]

    def figures(self, run: Run) -> Figures:
        """How far the least served falls behind an equal share, while all have something."""
        served = list(service_by_user(run.records).values())
        mean = sum(served) / len(served)
        return {"least_over_fair_share": min(served) / mean if mean else None}


@dataclass(frozen=True)
class OnlyUser(Workload):
    """One user of a backlog, alone on the machine."""

    backlog: Backlog
    number: int
    name = "backlog"

    def plan(self, seed: int) -> Plan:
        """That user's lanes."""
        return Plan(self.backlog._lanes(self.number, seeds(seed)))

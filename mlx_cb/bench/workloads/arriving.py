"""Open loops: calls arrive by the clock, whether or not the server keeps up."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from mlx_cb.bench.calls import Call, Lane, Plan, Prompt, Run
from mlx_cb.bench.distributions import MIXES, arrival_times
from mlx_cb.bench.metrics import Figures, Slo
from mlx_cb.bench.stats import summarize
from mlx_cb.bench.workloads.base import Workload, in_group, seeds, workload
from mlx_cb.errors import InvalidRequest


@workload("poisson")
@dataclass(frozen=True)
class Poisson(Workload):
    """Traffic with the lengths of a public trace. `bursty=1` takes the trace's own interarrival
    shape instead of exponential gaps. Prompts below 64 tokens are reported as short."""

    mix: str = "conv"
    rate: float = 0.7
    calls: int = 24
    scale: float = 8.0
    bursty: int = 0
    users: int = 4
    slo = Slo(ttft_s=2.0, itl_p99_s=0.5)

    def plan(self, seed: int) -> Plan:
        """One lane per call."""
        if self.mix not in MIXES:
            raise InvalidRequest(f"no mix {self.mix!r}; there are: {', '.join(MIXES)}")
        mix = MIXES[self.mix].scaled(self.scale)
        rng, next_seed = random.Random(seed), seeds(seed)
        shape = mix.interarrival_shape if self.bursty else 1.0
        lanes = []
        for at_s in arrival_times(rng, self.rate, self.calls, shape):
            tokens = max(4, mix.prompt.draw(rng))
            call = Call(
                Prompt(tokens, next_seed()),
                max(2, mix.output.draw(rng)),
                user=f"user{rng.randrange(self.users)}",
                group="short" if tokens < 64 else "long",
            )
            lanes.append(Lane(deque([call]), starts_at_s=at_s))
        return Plan(lanes)


@workload("hog")
@dataclass(frozen=True)
class Hog(Workload):
    """One user floods the server with long prompts while the others chat.

    `hog_calls=0` is the same chat without the flood. Servers tell users apart by their keys
    (`--user-key`), else by the `user` field if they read it.
    """

    hog_calls: int = 60
    hog_prompt: int = 512
    hog_output: int = 32
    victims: int = 7
    turns: int = 3
    think_s: float = 2.0
    scale: float = 8.0

    def plan(self, seed: int) -> Plan:
        """The flood at once; victims start spread over the first think time."""
        rng, next_seed = random.Random(seed), seeds(seed)
        mix = MIXES["conv"].scaled(self.scale)
        flood = [
            Lane(deque([self._call("hog", self.hog_prompt, self.hog_output, next_seed())]))
            for _ in range(self.hog_calls)
        ]
        chats = []
        for number in range(self.victims):
            calls = deque(
                self._call(
                    f"victim{number}",
                    max(4, mix.prompt.draw(rng)),
                    max(2, mix.output.draw(rng)),
                    next_seed(),
                    think_s=rng.expovariate(1 / self.think_s),
                )
                for _ in range(self.turns)
            )
            chats.append(Lane(calls))
        return Plan(flood + chats)

    @staticmethod
    def _call(user: str, prompt: int, output: int, seed: int, think_s: float = 0.0) -> Call:
        return Call(
            Prompt(prompt, seed),
            output,
            user=user,
            group="hog" if user == "hog" else "victims",
            think_s=think_s,
            body=(("user", user),),
        )

    def figures(self, run: Run) -> Figures:
        """Time to first token of the victims alone."""
        return {"victims_ttft": summarize([r.ttft_s for r in in_group(run.records, "victims")])}

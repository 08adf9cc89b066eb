"""Open loops: calls arrive by the clock, whether or not the server keeps up."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_cb.bench.calls import Call, CallRecord, Lane, Plan, Prompt, Run
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


@workload("refusals")
@dataclass(frozen=True)
class Refusals(Workload):
    """More calls than the server can answer: who is refused, how soon, and how honestly.

    All calls are one user's, so that one queue fills. `max_wait_s` is the server's
    `--max-queue-wait-s`. Calls that are refused do not come back; that Retry-After was right is
    told by the calls after them: the first that is let in shows that the door was open again.
    """

    mix: str = "conv"
    rate: float = 3.0
    calls: int = 120
    scale: float = 8.0
    max_wait_s: float = 10.0

    def plan(self, seed: int) -> Plan:
        """One lane per call, by the clock."""
        poisson = Poisson(self.mix, self.rate, self.calls, self.scale, users=1)
        return poisson.plan(seed)

    def figures(self, run: Run) -> Figures:
        """Refusals are what is measured here, and no failures."""
        records = sorted(run.records, key=lambda record: record.sent_s)
        refused = [record for record in records if record.failure == "http_429"]
        others = [r.failure for r in records if r.failure not in (None, "http_429")]
        let_in = [record for record in records if record.chunk_times_s]
        errors = [
            abs(record.retry_after_s - actual) / actual
            for record in refused
            if record.retry_after_s is not None
            and (actual := _until_open(record.sent_s, records)) is not None
        ]
        longest = max((record.ttft_s for record in let_in), default=0.0)
        return {
            "failures": dict(Counter(others)),
            "refused": len(refused),
            "refused_after": summarize([r.ended_s - r.sent_s for r in refused]),
            "retry_after": summarize([r.retry_after_s for r in refused if r.retry_after_s]),
            "retry_after_error": summarize(errors),
            "longest_wait_over_limit": longest / self.max_wait_s,
            "unanswered": sum(not record.is_complete for record in let_in),
        }


def _until_open(since: float, records: Sequence[CallRecord]) -> float | None:
    """Seconds from a refusal to the opening of the door, which lies between the last call that
    was refused and the first that was let in; None when it was not seen to open."""
    last = since
    for record in records:
        if record.sent_s <= since:
            continue
        if record.failure != "http_429":
            return (last + record.sent_s) / 2 - since
        last = record.sent_s
    return None


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

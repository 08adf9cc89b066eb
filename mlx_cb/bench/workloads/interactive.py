"""What people and their editors do: join others' streams, take turns, hang up."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from mlx_cb.bench.calls import Call, CallRecord, Lane, Milestone, Plan, Prompt, Run
from mlx_cb.bench.distributions import AGENT_STEP
from mlx_cb.bench.metrics import Figures, Slo
from mlx_cb.bench.stats import summarize
from mlx_cb.bench.workloads.base import Workload, in_group, seeds, workload


@workload("longjoin")
@dataclass(frozen=True)
class LongJoin(Workload):
    """Streams are decoding, a long prompt joins, a short one comes right behind it.

    When all is over, another prompt of the long one's length runs alone: its idle time to first
    token is what the long one's is held against.
    """

    streams: int = 8
    prompt: int = 24
    output: int = 96
    long_prompt: int = 1024
    short_prompt: int = 24
    joins_after: int = 12
    behind_s: float = 0.05

    def plan(self, seed: int) -> Plan:
        """Lanes: the streams, then the long, the short and the idle call on their milestones."""
        next_seed = seeds(seed)
        lanes = [
            Lane(deque([self._call("stream", self.prompt, self.output, next_seed())]))
            for _ in range(self.streams)
        ]
        decoding = Milestone("stream", self.streams, self.joins_after)
        long = self._call("long", self.long_prompt, 8, next_seed())
        short = self._call("short", self.short_prompt, 8, next_seed())
        idle = self._call("long_idle", self.long_prompt, 2, next_seed())
        lanes.append(Lane(deque([long]), starts_when=decoding))
        lanes.append(Lane(deque([short]), starts_at_s=self.behind_s, starts_when=decoding))
        over = Milestone(None, self.streams + 2)
        lanes.append(Lane(deque([idle]), starts_at_s=0.5, starts_when=over))
        return Plan(lanes)

    @staticmethod
    def _call(group: str, prompt: int, output: int, seed: int) -> Call:
        return Call(Prompt(prompt, seed), output, user=group, group=group)

    def figures(self, run: Run) -> Figures:
        """Gaps of the streams while the joiners wait for their first tokens, and before that."""
        streams = in_group(run.records, "stream")
        joiners = in_group(run.records, "long") + in_group(run.records, "short")
        if not streams or not joiners:
            return {}
        start = min(record.sent_s for record in joiners)
        end = max(record.chunk_times_s[0] for record in joiners)
        settled = max(record.chunk_times_s[0] for record in streams)
        during, before = _gaps(streams, start, end), _gaps(streams, settled, start)
        figures: Figures = {"disturbed": summarize(during), "undisturbed": summarize(before)}
        for group in ("long", "short", "long_idle"):
            found = in_group(run.records, group)
            if found:
                figures[f"{group}_ttft"] = found[0].ttft_s
        if during and before:
            figures["disturbed_over_undisturbed"] = (
                figures["disturbed"]["p99"] / figures["undisturbed"]["p50"]
            )
        if "long_ttft" in figures and "long_idle_ttft" in figures:
            figures["long_over_idle"] = figures["long_ttft"] / figures["long_idle_ttft"]
        return figures


def _gaps(records: list[CallRecord], start: float, end: float) -> list[float]:
    """Gaps that overlap the span."""
    return [
        after - before
        for record in records
        for before, after in pairwise(record.chunk_times_s)
        if after > start and before < end
    ]


@workload("fim")
@dataclass(frozen=True)
class Fim(Workload):
    """Editors asking for completions in bursts; most calls are hung up on as typing goes on."""

    users: int = 3
    bursts: int = 2
    per_burst: int = 6
    prompt_low: int = 300
    prompt_high: int = 1500
    kept: float = 0.9
    cancelled: float = 0.6
    pause_s: float = 3.0
    scale: float = 8.0
    slo = Slo(e2e_s=0.5)

    def plan(self, seed: int) -> Plan:
        """One lane per user; within a burst most of the prompt stays the same."""
        rng, next_seed = random.Random(seed), seeds(seed)
        lanes = []
        for number in range(self.users):
            calls: deque[Call] = deque()
            for _ in range(self.bursts):
                calls.extend(self._burst(rng, f"user{number}", next_seed))
            lanes.append(Lane(calls, starts_at_s=rng.uniform(0.0, self.pause_s)))
        return Plan(lanes)

    def _burst(self, rng: random.Random, user: str, next_seed: Callable[[], int]) -> list[Call]:
        tokens = max(8, round(rng.randint(self.prompt_low, self.prompt_high) / self.scale))
        kept, kept_seed = round(tokens * self.kept), next_seed()
        calls = []
        for index in range(self.per_burst):
            hang_up = rng.uniform(0.15, 0.40) if rng.random() < self.cancelled else None
            gap = rng.uniform(0.25, 0.5)
            calls.append(
                Call(
                    Prompt(max(1, tokens - kept), next_seed(), kept, kept_seed),
                    rng.randint(8, 48),
                    user=user,
                    group="typed_over" if hang_up else "awaited",
                    think_s=gap if index else self.pause_s,
                    cancel_after_s=hang_up,
                )
            )
        return calls


@workload("turns")
@dataclass(frozen=True)
class Turns(Workload):
    """Conversations: every turn sends all that was said before and a little more. With
    `concurrency=1` users take turns one by one, so that only reuse decides, not queueing."""

    users: int = 24
    turns: int = 4
    first: int = 768
    more: int = 24
    output: int = 8
    shared: int = 0
    concurrency: int = 1
    think_s: float = 0.0

    def plan(self, seed: int) -> Plan:
        """Round robin: everybody's first turn, everybody's second, …"""
        next_seed, system = seeds(seed), seeds(seed + 1)()
        queue = deque(
            Call(
                Prompt(
                    self.first - self.shared if turn == 0 else self.more,
                    next_seed(),
                    shared=self.shared if turn == 0 else 0,
                    shared_seed=system,
                    conversation=f"user{user}",
                ),
                self.output,
                user=f"user{user}",
                group=f"turn{turn + 1}",
                think_s=self.think_s if turn else 0.0,
            )
            for turn in range(self.turns)
            for user in range(self.users)
        )
        return Plan([Lane(queue) for _ in range(self.concurrency)])

    def figures(self, run: Run) -> Figures:
        """Share of the tokens known from earlier turns that were not computed again."""
        known = reused = 0
        before: dict[str, int] = {}
        for record in sorted(run.records, key=lambda record: record.sent_s):
            if not record.is_complete:
                continue
            known += before.get(record.call.user, 0)
            reused += record.cached_tokens if record.call.user in before else 0
            # The answer's last token is never fed back, so it is not in any cache.
            before[record.call.user] = record.prompt_tokens + record.output_tokens - 1
        return {"reused_over_reusable": reused / known} if known else {}


@workload("agent")
@dataclass(frozen=True)
class Agent(Workload):
    """Coding agents: a large common prefix, then steps that add tool results and think between."""

    agents: int = 4
    steps: int = 8
    prefix_low: int = 4000
    prefix_high: int = 24000
    think_low_s: float = 0.5
    think_high_s: float = 3.0
    scale: float = 32.0
    slo = Slo(ttft_s=10.0, itl_p99_s=0.25)

    def plan(self, seed: int) -> Plan:
        """One lane and one conversation per agent; half of the prefix is common to all."""
        rng, next_seed = random.Random(seed), seeds(seed)
        step_lengths, system = AGENT_STEP.scaled(self.scale), next_seed()
        lanes = []
        for number in range(self.agents):
            prefix = max(8, round(rng.randint(self.prefix_low, self.prefix_high) / self.scale))
            common = round(self.prefix_low / self.scale / 2)
            calls: deque[Call] = deque()
            for step in range(self.steps):
                fresh = max(4, step_lengths.prompt.draw(rng))
                calls.append(
                    Call(
                        Prompt(
                            prefix - common if step == 0 else fresh,
                            next_seed(),
                            shared=common if step == 0 else 0,
                            shared_seed=system,
                            conversation=f"agent{number}",
                        ),
                        max(2, step_lengths.output.draw(rng)),
                        user=f"agent{number}",
                        group="first" if step == 0 else "step",
                        think_s=rng.uniform(self.think_low_s, self.think_high_s) if step else 0.0,
                    )
                )
            lanes.append(Lane(calls))
        return Plan(lanes)

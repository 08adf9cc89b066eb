"""Sends a plan under virtual time and keeps the records: the simulator's load generator.

The counterpart of `bench.generator`: lanes, think times, milestones, hang-ups and conversations
mean the same. Prompts are token ids that no model reads; equal seeds give equal tokens, so that
prefixes are shared where the real texts share them.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

from mlx_cb.bench.calls import Call, CallRecord, Lane, Milestone, Plan, Prompt, Run
from mlx_cb.bench.sim.clock import VirtualClock

_TOKENS = 2**31 - 2**20  # ids are kept in 32 bits by the block hashes


@dataclass(slots=True, eq=False)
class SimCall:
    """A call on its way: what a server needs to know, and what has become of it.

    Attributes:
        prompt: token ids.
        answer: token ids said so far.
        has_ended: nothing more may be delivered.
    """

    number: int
    call: Call
    prompt: list[int]
    record: CallRecord
    answer: list[int]
    has_ended: bool = False


class SimServer(Protocol):
    """Takes calls, and tells the client of each through `hear` and `end`."""

    def send(self, call: SimCall, client: Client) -> None:
        """A call arrives."""
        ...

    def hang_up(self, call: SimCall) -> None:
        """The client of this call has gone; it has been told the end already."""
        ...


class PromptTokens:
    """Token ids of prompts, and what was said in each conversation."""

    def __init__(self) -> None:
        self._conversations: dict[str, list[int]] = {}

    def ids(self, prompt: Prompt) -> list[int]:
        """The whole prompt; `prompt.tokens` long plus the conversation before it."""
        fresh = _run_of(prompt.seed, prompt.fresh)
        before = self._conversations.get(prompt.conversation) if prompt.conversation else None
        if before is not None:
            return before + fresh
        return _run_of(prompt.shared_seed, prompt.shared) + fresh

    def said(self, call: SimCall) -> None:
        """Remember a turn, when the prompt belongs to a conversation."""
        conversation = call.call.prompt.conversation
        if conversation is not None:
            self._conversations[conversation] = call.prompt + call.answer


def _run_of(seed: int, count: int) -> list[int]:
    first = seed * 0x9E3779B97F4A7C15 % _TOKENS
    return list(range(first, first + count))


class Client:
    """All clients of one plan."""

    def __init__(self, clock: VirtualClock, server: SimServer, plan: Plan, first: int = 0) -> None:
        """`first` is the number of the first call; a server must not see a number twice."""
        self.clock = clock
        self.server = server
        self.run = Run([], began=clock.now, last_sent_s=0.0)
        self.num_open = 0
        self._tokens = PromptTokens()
        self._numbers = itertools.count(first)
        self._lanes: dict[int, Lane] = {}
        self._turns: dict[str, deque[tuple[Lane, Call]]] = {}
        self._milestones = {lane.starts_when for lane in plan.lanes if lane.starts_when}
        self._reached: Counter[Milestone] = Counter()
        self._ahead: dict[int, list[Milestone]] = {}
        self._held: dict[Milestone, list[Lane]] = {}
        for lane in plan.lanes:
            if lane.starts_when is None:
                clock.after(lane.starts_at_s, functools.partial(self._next, lane))
            else:
                self._held.setdefault(lane.starts_when, []).append(lane)

    @property
    def now(self) -> float:
        """Seconds since this plan began."""
        return self.clock.now - self.run.began

    def _next(self, lane: Lane) -> None:
        if not lane.calls:
            return
        call = lane.calls.popleft()
        take = functools.partial(self._take_turn, lane, call)
        if call.think_s:
            self.clock.after(call.think_s, take)
        else:
            take()

    def _take_turn(self, lane: Lane, call: Call) -> None:
        """Send it now, or when the turn before it in the same conversation has ended."""
        conversation = call.prompt.conversation
        if conversation is not None:
            waiting = self._turns.get(conversation)
            if waiting is not None:
                waiting.append((lane, call))
                return
            self._turns[conversation] = deque()
        self._send(lane, call)

    def _send(self, lane: Lane, call: Call) -> None:
        record = CallRecord(call, sent_s=self.now)
        sent = SimCall(next(self._numbers), call, self._tokens.ids(call.prompt), record, [])
        record.prompt_tokens = len(sent.prompt)
        self.run.records.append(record)
        self.run.last_sent_s = record.sent_s
        self.num_open += 1
        self._lanes[sent.number] = lane
        self._ahead[sent.number] = [m for m in self._milestones if m.group in (None, call.group)]
        if call.cancel_after_s is not None:
            self.clock.after(call.cancel_after_s, functools.partial(self._hang_up, sent))
        self.server.send(sent, self)

    def _hang_up(self, call: SimCall) -> None:
        if not call.has_ended:
            call.record.cancelled = True
            self.end(call)
            self.server.hang_up(call)

    def hear(self, call: SimCall, tokens: list[int], cached: int = 0) -> None:
        """A chunk of the answer arrives."""
        if call.has_ended:
            return
        call.answer += tokens
        record = call.record
        record.chunk_times_s.append(self.now)
        record.output_tokens += len(tokens)
        record.cached_tokens = cached
        ahead = self._ahead[call.number]
        for milestone in [m for m in ahead if m.chunks == len(record.chunk_times_s)]:
            ahead.remove(milestone)
            self._count(milestone)

    def end(self, call: SimCall, failure: str | None = None, detail: str = "") -> None:
        """The answer is complete, or has failed, or nobody waits for it any more."""
        if call.has_ended:
            return
        call.has_ended = True
        record, lane = call.record, self._lanes.pop(call.number)
        record.ended_s = self.now
        record.failure, record.detail = failure, detail
        record.finish_reason = None if failure or record.cancelled else "length"
        self.num_open -= 1
        for milestone in self._ahead.pop(call.number):
            self._count(milestone)
        self._tokens.said(call)
        conversation = call.call.prompt.conversation
        if conversation is not None:
            waiting = self._turns[conversation]
            if waiting:
                self._send(*waiting.popleft())
            else:
                del self._turns[conversation]
        self._next(lane)

    def _count(self, milestone: Milestone) -> None:
        self._reached[milestone] += 1
        if self._reached[milestone] == milestone.calls:
            for lane in self._held.pop(milestone, []):
                self.clock.after(lane.starts_at_s, functools.partial(self._next, lane))

"""Sends a plan to one server and brings back its records.

Owns pacing: lanes, think times, milestones and hang-ups. Knows nothing about what the plan is for
or which figures are made of it.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from mlx_cb.bench.calls import Call, CallRecord, Lane, Milestone, Plan, Run, Scalar
from mlx_cb.bench.exchange import Endpoint, Exchanged, exchange
from mlx_cb.bench.prompts import PromptMaker, TokenizerWords, WordSource
from mlx_cb.bench.wire import Api, body, read_stream


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how it is spoken to.

    Attributes:
        model: value of the `model` field; None leaves it out.
        words: where prompts come from; exact with the model's tokenizer.
        as_ids: send `/v1/completions` prompts as token ids instead of text.
        keys: API key per user; a user without one sends `key`.
        fields: body fields sent with every call.
    """

    endpoint: Endpoint
    words: WordSource
    model: str | None = None
    api: Api = Api.COMPLETIONS
    as_ids: bool = False
    key: str | None = None
    keys: dict[str, str] = field(default_factory=dict)
    fields: tuple[tuple[str, Scalar], ...] = ()
    timeout_s: float = 600.0


async def drive(
    target: Target, plan: Plan, on_end: Callable[[CallRecord], None] = lambda record: None
) -> Run:
    """Send every call of the plan, which is used up by it; `on_end` hears of each that ended."""
    drive_ = _Drive(target, plan, on_end)
    was_enabled = gc.isenabled()
    gc.collect()
    # A collection in the client would show up as a stall of every stream at once.
    gc.disable()
    try:
        async with asyncio.TaskGroup() as group:
            for lane in plan.lanes:
                group.create_task(drive_.run_lane(lane))
    finally:
        if was_enabled:
            gc.enable()
    return Run(drive_.records, drive_.began, drive_.last_sent_s)


class _Drive:
    """State of one drive."""

    def __init__(self, target: Target, plan: Plan, on_end: Callable[[CallRecord], None]) -> None:
        self.target = target
        self.on_end = on_end
        self.records: list[CallRecord] = []
        self.maker = PromptMaker(target.words)
        self.turn_locks: dict[str, asyncio.Lock] = {}
        self.milestones = {lane.starts_when for lane in plan.lanes if lane.starts_when}
        self.reached: Counter[Milestone] = Counter()
        self.events = {milestone: asyncio.Event() for milestone in self.milestones}
        # Texts are made before the clock starts; turns of a conversation depend on answers.
        self.texts = {
            call.prompt: self.maker.text(call.prompt)
            for call in plan.calls()
            if call.prompt.conversation is None
        }
        self.last_sent_s = 0.0
        self.began = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self.began

    async def run_lane(self, lane: Lane) -> None:
        if lane.starts_when is not None:
            await self.events[lane.starts_when].wait()
            await asyncio.sleep(lane.starts_at_s)
        else:
            await asyncio.sleep(max(0.0, lane.starts_at_s - self.now()))
        while lane.calls:
            call = lane.calls.popleft()
            if call.think_s:
                await asyncio.sleep(call.think_s)
            record = await self.send_in_turn(call)
            self.records.append(record)
            self.on_end(record)

    async def send_in_turn(self, call: Call) -> CallRecord:
        conversation = call.prompt.conversation
        if conversation is None:
            return await self.send(call, self.texts[call.prompt])
        async with self.turn_locks.setdefault(conversation, asyncio.Lock()):
            text = self.maker.text(call.prompt)
            record = await self.send(call, text)
            self.maker.said(call.prompt, text, record.text)
            return record

    async def send(self, call: Call, text: str) -> CallRecord:
        payload = self.payload(call, text)
        record = CallRecord(call, sent_s=self.now())
        self.last_sent_s = record.sent_s
        ahead = [m for m in self.milestones if m.group in (None, call.group)]
        exchanged = await exchange(
            self.target.endpoint,
            payload,
            timeout_s=self.target.timeout_s,
            cancel_after_s=call.cancel_after_s,
            watch=self.watched(ahead),
        )
        for milestone in ahead:
            # Ended early counts as well, or the lanes behind the milestone would wait for ever.
            self.count(milestone)
        record.ended_s = self.now()
        fill_in(record, exchanged, self.began)
        return record

    def payload(self, call: Call, text: str) -> bytes:
        target = self.target
        prompt: str | list[int] = text
        if target.as_ids and target.api is Api.COMPLETIONS:
            if not isinstance(target.words, TokenizerWords):
                raise ValueError("prompts as token ids need the model's tokenizer")
            prompt = target.words.encode(text)
        content = body(
            target.api,
            prompt,
            model=target.model,
            max_tokens=call.max_tokens,
            fields=(*target.fields, *call.body),
        )
        key = target.keys.get(call.user, target.key)
        return target.endpoint.head("POST", target.api.path, len(content), key) + content

    def watched(self, ahead: list[Milestone]) -> dict[int, Callable[[], None]]:
        """Callbacks at the chunk counts of the milestones; each is taken off `ahead` as it fires.

        What is left on `ahead` is counted when the call ends.
        """

        def pass_(milestone: Milestone) -> None:
            ahead.remove(milestone)
            self.count(milestone)

        return {
            milestone.chunks: functools.partial(pass_, milestone)
            for milestone in ahead
            if milestone.chunks is not None
        }

    def count(self, milestone: Milestone) -> None:
        self.reached[milestone] += 1
        if self.reached[milestone] >= milestone.calls:
            self.events[milestone].set()


def fill_in(record: CallRecord, exchanged: Exchanged, began: float) -> None:
    """Read what came back into the record; the kind of failure is decided here."""
    record.cancelled = exchanged.cancelled
    record.failure, record.detail = exchanged.failure, exchanged.detail
    if exchanged.status and exchanged.status != 200:
        record.failure = f"http_{exchanged.status}"
        record.retry_after_s = exchanged.retry_after_s
        record.detail = exchanged.body[:300].decode(errors="replace")
        return
    try:
        answer = read_stream(exchanged.pieces)
    except msgspec.DecodeError as error:
        record.failure, record.detail = "malformed", str(error)
        return
    record.chunk_times_s = [time - began for time in answer.chunk_times]
    if exchanged.pieces and record.failure is None and not record.cancelled:
        # The last byte ends the answer, not the moment this loop got to look at it.
        record.ended_s = exchanged.pieces[-1][0] - began
    record.text = answer.text
    record.prompt_tokens = answer.prompt_tokens
    record.cached_tokens = answer.cached_tokens
    record.output_tokens = (
        len(answer.chunk_times) if answer.output_tokens is None else answer.output_tokens
    )
    record.finish_reason = answer.finish_reason
    if record.failure is not None or record.cancelled:
        return
    if answer.error is not None:
        record.failure, record.detail = "stream_error", answer.error
    elif answer.finish_reason is None:
        record.failure, record.detail = "cut", "the stream ended without a finish reason"
    elif not answer.chunk_times:
        record.failure, record.detail = "empty", "no content at all"

"""One client's question on its way through the engine: the one path that all dialects share.

Owns the choices of an answer: their engine generations, parsers, usage, and that each generation
is closed when the client no longer wants it. Knows nothing about HTTP or any dialect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from mlx_cb.core.outputs import FinishReason, RequestOutput, TokenLogprobs
from mlx_cb.engine.interface import Engine
from mlx_cb.errors import Cancelled, DeadlineExceeded, EngineDead, MlxCbError
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.server.metrics import Metrics
from mlx_cb.server.terms import Terms
from mlx_cb.server.transcript import Transcript
from mlx_cb.text.events import EndReason, Finish, OutputEvent
from mlx_cb.text.output_parser import OutputParser

# How long an answer's status line waits for the engine to accept or refuse the request.
ACCEPT_S = 0.25


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that an answer took."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int


@dataclass(slots=True, eq=False)
class Choice:
    """One of an answer's texts, while it is generated."""

    index: int
    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    parser: OutputParser
    prompt_text: str = ""
    transcript: Transcript | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes | None = None
    first: asyncio.Task[RequestOutput] | None = None
    outputs: AsyncIterator[RequestOutput] | None = None


@dataclass(slots=True, eq=False)
class Generation:
    """An answer of one or more choices. Use `start`, then `events`, then always `close`.

    `places` is how many of its user's answers it counts for.
    """

    engine: Engine
    metrics: Metrics
    choices: list[Choice]
    user: str
    terms: Terms = field(default_factory=Terms)
    places: int = 1
    arrived: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    was_started: bool = False
    _pumps: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Hand all choices to the engine.

        Returns as soon as the first tokens or a refusal are there, at the latest after
        `ACCEPT_S`. Raises what the engine refuses with.
        """
        timeout_s = self.remaining_s()
        for choice in self.choices:
            choice.outputs = self.engine.generate(
                choice.request_id,
                choice.prompt_ids,
                choice.params,
                user=self.user,
                standing=self.terms.standing,
                timeout_s=timeout_s,
            )
            choice.first = asyncio.ensure_future(anext(choice.outputs))
        self.was_started = True
        firsts = [choice.first for choice in self.choices if choice.first is not None]
        done, _ = await asyncio.wait(firsts, timeout=ACCEPT_S)
        try:
            for first in done:
                self._check(first.result())
        except MlxCbError:
            self.was_started = False
            raise

    def remaining_s(self) -> float | None:
        """What is left of the time it may take. Raises DeadlineExceeded when that is nothing."""
        if self.terms.timeout_s is None:
            return None
        left = self.arrived + self.terms.timeout_s - time.monotonic()
        if left <= 0:
            raise self._too_late()
        return left

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the time of {self.terms.timeout_s:g} s was over before the first token; what was "
            "computed of the prompt is kept, so that another try goes on from there"
        )

    def _check(self, output: RequestOutput) -> None:
        """Raise when the engine gave the request up, or its time was over with nothing to show."""
        if output.finish_reason is FinishReason.ERROR:
            raise EngineDead(output.error or "the engine failed on this request", retry_after=1.0)
        if output.finish_reason is FinishReason.ABORT:
            raise Cancelled(output.error or "the request was aborted on the server")
        has_tokens = output.token_ids or any(c.parser.num_tokens for c in self.choices)
        if output.finish_reason is FinishReason.DEADLINE and not has_tokens:
            raise self._too_late()

    async def events(self) -> AsyncIterator[tuple[Choice, list[OutputEvent]]]:
        """All choices' events as they come. Raises MlxCbError when the engine fails."""
        if len(self.choices) == 1:
            only = self.choices[0]
            async for events in self._choice_events(only):
                yield only, events
            return
        # A bound queue: a slow client makes the pumps wait, and the engine merges their outputs.
        queue: asyncio.Queue[tuple[Choice, list[OutputEvent] | Exception]] = asyncio.Queue(16)
        self._pumps = [asyncio.create_task(self._pump(c, queue)) for c in self.choices]
        running = len(self.choices)
        while running:
            choice, got = await queue.get()
            if isinstance(got, Exception):
                raise got
            events = got
            yield choice, events
            if isinstance(events[-1], Finish):
                running -= 1

    async def close(self) -> None:
        """Free all that the engine still holds for this answer. Safe at any time, also twice."""
        running = [*self._pumps, *(c.first for c in self.choices if c.first is not None)]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for choice in self.choices:
            if choice.transcript is not None:
                choice.transcript.write()
                choice.transcript = None
            if choice.outputs is not None:
                await choice.outputs.aclose()  # type: ignore[attr-defined]

    @property
    def usage(self) -> Usage:
        """What the answer took so far; a prompt counts once, however many choices it has."""
        prompts = {id(choice.prompt_ids): choice for choice in self.choices}.values()
        return Usage(
            sum(len(choice.prompt_ids) for choice in prompts),
            sum(choice.parser.num_tokens for choice in self.choices),
            sum(choice.cached_tokens for choice in prompts),
            sum(choice.parser.num_reasoning_tokens for choice in self.choices),
        )

    def timings(self) -> dict[str, float]:
        """llama.cpp's numbers: tokens, milliseconds and speed of prompt and answer."""
        usage, now = self.usage, time.monotonic()
        prompt_s = self.first_token_s or now - self.arrived
        answer_s = max(now - self.arrived - prompt_s, 1e-9)
        computed = usage.prompt_tokens - usage.cached_tokens
        return {
            "prompt_n": computed,
            "prompt_ms": prompt_s * 1000,
            "prompt_per_second": computed / max(prompt_s, 1e-9),
            "predicted_n": usage.completion_tokens,
            "predicted_ms": answer_s * 1000,
            "predicted_per_second": usage.completion_tokens / answer_s,
            "cache_n": usage.cached_tokens,
        }

    async def _pump(self, choice: Choice, queue: asyncio.Queue) -> None:  # type: ignore[type-arg]
        try:
            async for events in self._choice_events(choice):
                await queue.put((choice, events))
        except Exception as error:  # whatever it is, the reader of the queue must hear of it
            await queue.put((choice, error))

    async def _choice_events(self, choice: Choice) -> AsyncIterator[list[OutputEvent]]:
        parser, metrics = choice.parser, self.metrics
        last = self.arrived
        assert choice.outputs is not None
        assert choice.first is not None
        output = await choice.first
        while True:
            self._check(output)
            now = time.monotonic()
            if self.first_token_s is None:
                self.first_token_s = now - self.arrived
                metrics.saw_first_token(self.first_token_s, self.user)
            else:
                metrics.saw_gap(now - last, self.user)
            last = now
            if output.prompt_logprobs is not None:
                choice.prompt_logprobs = output.prompt_logprobs
            choice.embedding = output.embedding or choice.embedding
            choice.cached_tokens = output.num_cached_tokens or choice.cached_tokens
            events = parser.feed(output)
            if choice.transcript is not None:
                choice.transcript.add(events)
            if parser.is_finished:
                self._count(choice, events)
                await choice.outputs.aclose()  # type: ignore[attr-defined]
                yield events
                return
            if events:
                yield events
            output = await anext(choice.outputs)

    def _count(self, choice: Choice, events: list[OutputEvent]) -> None:
        metrics = self.metrics
        metrics.prompt_tokens.inc(len(choice.prompt_ids))
        metrics.cached_tokens.inc(choice.cached_tokens)
        metrics.generation_tokens.inc(choice.parser.num_tokens)
        end = events[-1]
        is_cut = isinstance(end, Finish) and end.reason is EndReason.LENGTH
        metrics.finished.labels("length" if is_cut else "stop").inc()
        metrics.whole.observe(time.monotonic() - self.arrived)

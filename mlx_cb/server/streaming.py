"""Bytes to the client: whole answers, streams, keep-alives, and noticing that nobody listens.

Owns the ASGI messages. Knows nothing about what the bytes mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Send

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
NDJSON = b"application/x-ndjson"
COMMENT = b": keep-alive\n\n"  # SSE parsers skip lines that begin with a colon


@dataclass(frozen=True, slots=True)
class Whole:
    """A complete answer."""

    body: bytes
    status: int = 200
    media_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer in pieces, each of them whole events.

    `keep_alive` is sent when nothing else was for a while; b"" sends nothing.
    """

    frames: AsyncIterator[bytes]
    keep_alive: bytes


async def send_whole(send: Send, answer: Whole) -> None:
    """Send status, headers and body."""
    length = str(len(answer.body)).encode()
    headers = [(b"content-type", answer.media_type), (b"content-length", length), *answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


async def start_stream(send: Send, media_type: bytes) -> None:
    """Send the headers, so that the client knows it was accepted before the first token."""
    headers = [
        (b"content-type", media_type),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    # uvicorn holds the headers back until there is a body.
    await send({"type": "http.response.body", "body": b"", "more_body": True})


async def send_frames(send: Send, stream: Stream, keep_alive_s: float) -> None:
    """Send all frames, keep-alives between them. The body's end is the caller's."""
    clock = asyncio.get_running_loop().time
    pulse = _Pulse(clock())
    alive = asyncio.create_task(_keep_alive(send, stream.keep_alive, keep_alive_s, pulse))
    try:
        async for frame in stream.frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            pulse.last = clock()
    finally:
        alive.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await alive


@dataclass(slots=True)
class _Pulse:
    """When something was sent last, in the loop's seconds."""

    last: float


async def _keep_alive(send: Send, frame: bytes, interval: float, pulse: _Pulse) -> None:
    if not frame:
        return
    clock = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(max(0.0, pulse.last + interval - clock()))
        if clock() - pulse.last >= interval:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            pulse.last = clock()


async def run_until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, None], open_answers: set[asyncio.Task[None]]
) -> None:
    """Run `work`, and cancel it at once when the client hangs up, streaming or not.

    While it runs it stands in `open_answers`, so that a closing server can cancel it.
    """
    running = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    open_answers.add(running)
    try:
        await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        open_answers.discard(running)
        was_done = running.done()
        running.cancel()
        gone.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)
    if was_done and not running.cancelled():
        await running


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""One endpoint of a dialect: body in, answer out, every failure in that dialect's own words.

Owns the order parse → prepare → start → answer, and when a status line may be sent: only after
everything that can be checked was checked. Knows nothing about any dialect.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from mlx_cb.errors import EngineDead, MlxCbError
from mlx_cb.server.body import ClientGone, read_body
from mlx_cb.server.compression import ENCODINGS
from mlx_cb.server.front import Front
from mlx_cb.server.generate_input import GenerateInput
from mlx_cb.server.generation import Generation
from mlx_cb.server.streaming import (
    COMMENT,
    EVENT_STREAM,
    Stream,
    Whole,
    run_until_disconnect,
    send_frames,
    send_whole,
    start_stream,
)
from mlx_cb.server.terms import terms_for
from mlx_cb.server.users import User

_log = logging.getLogger("mlx_cb.server")


@dataclass(frozen=True, slots=True)
class Answering:
    """One answer in the making: what was asked, and how it is generated."""

    front: Front
    given: GenerateInput
    generation: Generation
    request_id: str
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API's shapes.

    Attributes:
        parse: body to `GenerateInput`, or to the answer if nothing has to be generated;
            raises InvalidRequest.
        whole: events to the complete answer's body.
        stream: events to frames, each of them whole events, the last one ending the stream.
        error: an error as status and body; used before anything was sent.
        stream_error: the same as the last frame of a stream.
        keep_alive: what to send while nothing else was sent for a while.
        request_type, answer_type: of the body and the whole answer, for the API's description.
    """

    parse: Callable[[bytes, Front], GenerateInput | Whole]
    whole: Callable[[Answering], Awaitable[bytes]]
    stream: Callable[[Answering], AsyncIterator[bytes]]
    error: Callable[[MlxCbError, str], Whole]
    stream_error: Callable[[MlxCbError, str], bytes]
    media_type: bytes = EVENT_STREAM
    keep_alive: Callable[[Answering], bytes] = lambda answering: COMMENT
    request_type: type | None = None
    answer_type: Any = None  # a type, or a union of types


class Endpoint:
    """An ASGI application that answers one path of a dialect."""

    def __init__(self, front: Front, dialect: Dialect) -> None:
        self._front = front
        self._dialect = dialect
        self.request_type, self.answer_type = dialect.request_type, dialect.answer_type
        self.stream_media_type = dialect.media_type.decode().partition(";")[0]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope["state"]["request_id"]
        front = self._front
        try:
            body = await read_body(scope, receive, front.config.max_body_bytes)
            given = self._dialect.parse(body, front)
        except ClientGone:
            return
        except MlxCbError as error:
            await self._refuse(send, error, request_id)
            return
        if isinstance(given, Whole):
            await send_whole(send, given)
            return
        work = self._answer(given, request_id, scope, send)
        await run_until_disconnect(receive, work, front.open_answers)

    async def _answer(
        self, given: GenerateInput, request_id: str, scope: Scope, send: Send
    ) -> None:
        user: User = scope["state"]["account"]
        generation: Generation | None = None
        try:
            terms = terms_for(scope["headers"], user, self._front.config)
            self._front.check_open(user, terms)
            generation = await self._front.prepare(given, request_id, user, terms)
            scope["state"]["generation"] = generation
            async with self._front.accounts.place_for(user, generation):
                await generation.start()
                answering = Answering(self._front, given, generation, request_id)
                if given.stream:
                    await self._stream(answering, send)
                else:
                    body = await self._dialect.whole(answering)
                    await send_whole(send, Whole(body))
        except MlxCbError as error:
            await self._refuse(send, error, request_id)
        except asyncio.CancelledError:
            if not self._front.is_closing:
                raise
            await self._refuse(send, _closing(), request_id)
        except Exception:
            _log.exception("request %s failed", request_id)
            await self._refuse(send, internal_error(request_id), request_id)
        finally:
            if generation is not None:
                await generation.close()

    async def _stream(self, answering: Answering, send: Send) -> None:
        """Everything after the status line: from here errors go into the stream."""
        dialect, front = self._dialect, self._front
        stream = Stream(dialect.stream(answering), dialect.keep_alive(answering))
        await start_stream(send, dialect.media_type)
        last = b""
        try:
            await send_frames(send, stream, front.config.keep_alive_s)
        except MlxCbError as error:
            last = dialect.stream_error(error, answering.request_id)
        except asyncio.CancelledError:
            if not front.is_closing:
                raise
            last = dialect.stream_error(_closing(), answering.request_id)
        except Exception:
            _log.exception("request %s failed", answering.request_id)
            failure = internal_error(answering.request_id)
            last = dialect.stream_error(failure, answering.request_id)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _refuse(self, send: Send, error: MlxCbError, request_id: str) -> None:
        self._front.metrics.refused.labels(error.code).inc()
        answer = self._dialect.error(error, request_id)
        headers = error_headers(error)
        await send_whole(send, Whole(answer.body, answer.status, answer.media_type, headers))


class JsonEndpoint:
    """An ASGI application that answers a body with a body, without the engine.

    `stream_media_type` names what an answer in lines is sent as, for the API's description.
    """

    stream_media_type: str | None = None

    def __init__(
        self,
        front: Front,
        answer: Callable[[bytes, Front], Awaitable[bytes | Whole]],
        error: Callable[[MlxCbError, str], Whole],
        request_type: type | None = None,
        answer_type: type | None = None,
    ) -> None:
        self.request_type, self.answer_type = request_type, answer_type
        self._front = front
        self._answer = answer
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, self._front.config.max_body_bytes)
            answer = await self._answer(body, self._front)
            made = answer if isinstance(answer, Whole) else Whole(answer)
        except ClientGone:
            return
        except MlxCbError as error:
            refused = self._error(error, scope["state"]["request_id"])
            headers = error_headers(error)
            made = Whole(refused.body, refused.status, refused.media_type, headers)
        await send_whole(send, made)


def error_headers(error: MlxCbError) -> tuple[tuple[bytes, bytes], ...]:
    """`Retry-After` in whole seconds; every 429 and 503 has one, or some clients give up.

    `retry-after-ms` says the same without rounding; OpenAI's clients read it first.
    """
    if error.status == 415:
        return ((b"accept-encoding", ", ".join(ENCODINGS).encode()),)
    seconds = error.retry_after
    if seconds is None and error.status in (429, 503):
        seconds = 1.0
    if seconds is None:
        return ()
    return (
        (b"retry-after", str(max(1, math.ceil(seconds))).encode()),
        (b"retry-after-ms", str(max(1, math.ceil(seconds * 1000))).encode()),
    )


def _closing() -> MlxCbError:
    return EngineDead("the server is shutting down", retry_after=5.0)


def internal_error(request_id: str) -> MlxCbError:
    """What a client is told of a fault of our own."""
    return MlxCbError(f"the server failed on this request; its log names {request_id}")

"""One HTTP exchange over a raw asyncio connection, as cheap per chunk as Python allows.

Notes when each piece of the body arrived and keeps the bytes; what they mean is read after the end
of the stream (`wire.py`), so that the client is not the bottleneck at hundreds of streams. Knows
nothing about SSE beyond the five bytes that open a data line.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens; made from a base URL with or without `/v1`."""

    host: str
    port: int
    prefix: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Raises ValueError for anything but an http(s) URL with a host."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http URL: {url}")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), prefix, tls)

    @property
    def url(self) -> str:
        """Base URL without `/v1`."""
        return f"http{'s' if self.tls else ''}://{self.host}:{self.port}{self.prefix}"

    def head(self, method: str, path: str, length: int, key: str | None = None) -> bytes:
        """Request line and headers for a JSON body of `length` bytes."""
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        ]
        if key is not None:
            lines.append(f"Authorization: Bearer {key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n"


@dataclass(slots=True)
class Exchanged:
    """What came back. `pieces` are body bytes with their arrival on the monotonic clock;
    `retry_after_s` is what the headers say of coming back."""

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None
    detail: str = ""
    cancelled: bool = False
    retry_after_s: float | None = None

    @property
    def body(self) -> bytes:
        """All pieces joined."""
        return b"".join(piece for _, piece in self.pieces)


class _ExchangeProtocol(asyncio.Protocol):
    """Feeds httptools and stamps what it hands back."""

    def __init__(self, payload: bytes, watch: dict[int, Callable[[], None]]) -> None:
        self.payload = payload
        self.watch = watch
        self.result = Exchanged()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parser = httptools.HttpResponseParser(self)
        self.arrived = 0.0
        self.chunks = 0
        self.transport: asyncio.Transport | None = None
        self.is_delimited = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not asyncio.Transport by class, only by what they can do.
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.payload)

    def data_received(self, data: bytes) -> None:
        self.arrived = time.monotonic()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end("malformed", str(error))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self.is_delimited = True
        elif name.lower() == b"retry-after" and self.result.retry_after_s is None:
            self.result.retry_after_s = _number(value)
        elif name.lower() == b"retry-after-ms":
            self.result.retry_after_s = (_number(value) or 0.0) / 1e3

    def on_headers_complete(self) -> None:
        self.result.status = self.parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self.result.pieces.append((self.arrived, piece))
        if self.watch and piece[:5] == b"data:":
            self.chunks += 1
            reached = self.watch.get(self.chunks)
            if reached is not None:
                reached()

    def on_message_complete(self) -> None:
        self._end(None, "")

    def connection_lost(self, exc: Exception | None) -> None:
        # A body without a length ends with the connection (HTTP/1.0, the peer's way).
        if self.result.status and not self.is_delimited and exc is None:
            self._end(None, "")
        else:
            self._end("cut", str(exc) if exc else "connection closed before the end")

    def _end(self, failure: str | None, detail: str) -> None:
        if not self.ended.done():
            self.result.failure, self.result.detail = failure, detail
            self.ended.set_result(None)


def _number(value: bytes) -> float | None:
    """Retry-After may also be a date, which no server here sends."""
    return float(value) if value.strip().isdigit() else None


async def exchange(
    endpoint: Endpoint,
    payload: bytes,
    *,
    timeout_s: float = 600.0,
    cancel_after_s: float | None = None,
    watch: dict[int, Callable[[], None]] | None = None,
) -> Exchanged:
    """Send the payload over a connection of its own and collect what comes back.

    Never raises for what a server or network does: the kind of failure is in the result. After
    `cancel_after_s` the connection is dropped, as an editor does. `watch` maps a number of data
    lines to what is called when that many have come.
    """
    loop = asyncio.get_running_loop()
    patience = timeout_s if cancel_after_s is None else min(timeout_s, cancel_after_s)
    try:
        async with asyncio.timeout(timeout_s):
            transport, protocol = await loop.create_connection(
                lambda: _ExchangeProtocol(payload, watch or {}),
                endpoint.host,
                endpoint.port,
                ssl=ssl.create_default_context() if endpoint.tls else None,
            )
    except (OSError, TimeoutError) as error:
        return Exchanged(failure="connect", detail=str(error) or type(error).__name__)
    try:
        async with asyncio.timeout(patience):
            await protocol.ended
    except TimeoutError:
        protocol.result.cancelled = cancel_after_s is not None and patience == cancel_after_s
        if not protocol.result.cancelled:
            protocol.result.failure = "timeout"
            protocol.result.detail = f"no end within {timeout_s:g} s"
    finally:
        transport.abort()
    return protocol.result


async def get_json_bytes(
    endpoint: Endpoint, path: str, timeout_s: float = 10.0, key: str | None = None
) -> Exchanged:
    """GET a path; the same result as `exchange`."""
    return await exchange(endpoint, endpoint.head("GET", path, 0, key), timeout_s=timeout_s)

"""What one connection may take of the server: time and bytes for a request's head, time to read.

uvicorn waits for ever for a head that comes byte by byte (slowloris), lets it grow without an end,
and lets an answer wait for ever for a client that does not read. Here each has a limit, and so has
the number of connections whose head is not there yet: a newcomer takes the place of the oldest of
whichever address has most, so that nobody's slow connections shut out anybody else. Knows nothing
about what is asked. A body's time is `body`'s business.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from mlx_cb.server.rate import network_of


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds, bytes and connections.

    Attributes:
        head_s: from the connection, or a request's first byte, to the end of its head; before it
            the same again for the handshake of TLS.
        head_bytes: of a request's line and headers together.
        rest_s: for the rest of a body that an answer did not wait for.
        unread_s: for a client that reads nothing of an answer that is there for it.
        half_open: connections without a complete handshake or head.
    """

    head_s: float = 15.0
    head_bytes: int = 64 * 1024
    rest_s: float = 10.0
    unread_s: float = 120.0
    half_open: int = 1024


class Unfinished(Protocol):
    """A connection on which nothing can be done yet."""

    def give_up(self) -> None:
        """Close it."""


@dataclass(slots=True)
class HalfOpen:
    """Connections whose head is not complete, by network, each network's oldest first."""

    limits: ConnectionLimits
    _by_network: dict[str, OrderedDict[Unfinished, None]] = field(default_factory=dict)
    count: int = 0

    def add(self, connection: Unfinished, network: str) -> Unfinished | None:
        """Take one in; returns the one that has to go for it."""
        own = self._by_network.setdefault(network, OrderedDict())
        own[connection] = None
        self.count += 1
        if self.count <= self.limits.half_open:
            return None
        most = max(self._by_network.values(), key=lambda of_one: len(of_one))
        return next(iter(most))

    def discard(self, connection: Unfinished, network: str) -> None:
        """Its head is complete, or it is gone."""
        own = self._by_network.get(network)
        if own is None or connection not in own:
            return
        del own[connection]
        self.count -= 1
        if not own:
            del self._by_network[network]


class UntilClose(RequestResponseCycle):
    """An answer to HTTP/1.0, which knows no chunks: without a length it ends with the connection.

    uvicorn would send chunks, and such a client would take their sizes for text.
    """

    _has_length = True

    async def send(self, message: Any) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._has_length = b"content-length" in names
            if not self._has_length:
                self.chunked_encoding = self.keep_alive = False
        elif not self._has_length:
            self.expected_content_length = len(message.get("body", b""))  # as if it were all
        await super().send(message)


class LimitedConnection(HttpToolsProtocol):
    """One client's connection. `half_open` is set by `limited`, and shared by one server's."""

    half_open: HalfOpen

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._network = "-"
        self._in_head = False
        self._is_refused = False
        self._head_bytes = 0
        self._patience: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there; its first head has to come soon."""
        super().connection_made(transport)
        self._network = network_of(self.client[0]) if self.client else "-"
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._stop_waiting()
        self._set_unread(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came; as many as a head may have, or they are refused."""
        if self._is_refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self.half_open.limits.head_bytes:
            self._refuse(431, "the request's headers are too large")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        if not self._in_head:
            self._await_head()
        self._head_bytes += 1  # at least: how many of the bytes just read are its own is not known

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._stop_waiting()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.half_open.limits.head_bytes:
            self._refuse(431, "the request's headers are too large")
        if not self._is_refused:
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                self.cycle.__class__ = UntilClose

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request's end."""
        if not self._is_refused:
            super().on_message_complete()
            if self._patience is not None and not self._in_head:
                self._stop_waiting()

    def on_response_complete(self) -> None:
        """An answer's end; what is left of the request's body may still come, but not for ever."""
        super().on_response_complete()
        is_last = self.cycle.response_complete  # no other request is behind it
        if is_last and self.cycle.more_body and not self.transport.is_closing():
            limits = self.half_open.limits
            self._patience = self.loop.call_later(limits.rest_s, self.transport.close)

    def pause_writing(self) -> None:
        """The client reads more slowly than is written."""
        super().pause_writing()
        limits = self.half_open.limits
        self._set_unread(self.loop.call_later(limits.unread_s, self.transport.abort))

    def resume_writing(self) -> None:
        """The client has read."""
        self._set_unread(None)
        super().resume_writing()

    def give_up(self) -> None:
        """It is late, or has to go for another one."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._head_bytes and not is_answering:
            self._refuse(408, "the request's headers did not come in time")
        else:
            self._stop_waiting()
            self.transport.close()

    def _await_head(self) -> None:
        self._stop_waiting()
        self._in_head, self._head_bytes = True, 0
        limits = self.half_open.limits
        self._patience = self.loop.call_later(limits.head_s, self.give_up)
        oldest = self.half_open.add(self, self._network)
        if oldest is not None:
            oldest.give_up()

    def _stop_waiting(self) -> None:
        self._in_head = False
        self.half_open.discard(self, self._network)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _set_unread(self, timer: asyncio.TimerHandle | None) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._unread = timer

    def _refuse(self, status: int, reason: str) -> None:
        """Say why, and close: what follows on this connection cannot be understood any more."""
        self._stop_waiting()
        self._is_refused = True
        body = b'{"error":{"message":"%s","type":"invalid_request_error"}}' % reason.encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()


def limited(limits: ConnectionLimits) -> type[LimitedConnection]:
    """The class of one server's connections, which count together."""
    return type("Connection", (LimitedConnection,), {"half_open": HalfOpen(limits)})

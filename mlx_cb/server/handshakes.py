"""How a connection by TLS begins: its handshake has as long as a request's head, and counts there.

uvicorn leaves the handshake to the event loop, which gives each a minute, puts no limit to their
number, and tells nobody of them until they are done. Who speaks plain HTTP is told where to go.
Knows nothing about certificates.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from mlx_cb.server.connections import HalfOpen, LimitedConnection
from mlx_cb.server.plain_http import answer_to_plain_http
from mlx_cb.server.rate import network_of

# How long a client may take to say goodbye after the last answer.
_GOODBYE_S = 5.0
_HANDSHAKE = b"\x16"  # the first byte of a record of this kind
_LARGEST_PLAIN_HEAD = 8192


class Handshake(asyncio.Protocol):
    """A client that has yet to agree on a cipher. `connections` takes over where that succeeds.

    The three attributes are set by `behind_tls`. While uvicorn knows no connection of this client,
    this stands for it in uvicorn's list, so that a server that ends does not wait for it.
    """

    connections: type[LimitedConnection]
    context: ssl.SSLContext
    half_open: HalfOpen

    def __init__(self, **given: Any) -> None:
        """What uvicorn makes its connections of."""
        self._given = given
        self._known: set[Any] = given["server_state"].connections
        self._early = b""
        self._has_come = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._network = "-"
        self._work: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        self._transport = transport
        self._known.add(self)
        peer = transport.get_extra_info("peername")
        self._network = network_of(peer[0]) if peer else "-"
        oldest = self.half_open.add(self, self._network)
        self._work = asyncio.get_running_loop().create_task(self._begin(transport))
        if oldest is not None:
            oldest.give_up()

    def data_received(self, data: bytes) -> None:
        """How the client begins; later what came by TLS before the connection took over."""
        self._early += data
        self._has_come.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        self._has_come.set()

    def give_up(self) -> None:
        """Let the client go, without a word: there is no common language yet."""
        self._forget()
        if self._work is not None and self._transport is not None:
            self._work.cancel()
            self._transport.abort()

    #: uvicorn's word for it, when the server ends.
    shutdown = give_up

    def _forget(self) -> None:
        self.half_open.discard(self, self._network)
        self._known.discard(self)

    async def _begin(self, transport: asyncio.Transport) -> None:
        secured = None
        try:
            async with asyncio.timeout(self.half_open.limits.head_s):
                await self._has_come.wait()
                if self._early.startswith(_HANDSHAKE):
                    secured = await self._shake(transport)
                elif self._early:
                    await self._refuse(transport)
        except OSError:  # it trusts us not, takes too long (TimeoutError is one), or has gone
            transport.abort()
        finally:
            self._forget()
        if secured is None or secured.is_closing():
            transport.close()
            return
        connection = self.connections(**self._given)
        secured.set_protocol(connection)
        connection.connection_made(secured)
        if self._early:
            connection.data_received(self._early)

    async def _shake(self, transport: asyncio.Transport) -> asyncio.Transport | None:
        """TLS on this transport, of which the beginning was read. Raises OSError when that fails.

        A loop's callbacks run in their order: TLS takes the transport over and begins, then it is
        given what was read, and only then does the loop read on.
        """
        if transport.is_closing():
            return None
        loop = asyncio.get_running_loop()
        transport.pause_reading()
        begun, self._early = self._early, b""
        shaking = loop.create_task(
            loop.start_tls(
                transport, self, self.context, server_side=True, ssl_shutdown_timeout=_GOODBYE_S
            )
        )
        await asyncio.sleep(0)
        loop.call_soon(_feed, transport, begun)
        return await shaking

    async def _refuse(self, transport: asyncio.Transport) -> None:
        """Read the rest of a head that is not by TLS, and answer it."""
        while b"\r\n\r\n" not in self._early and len(self._early) < _LARGEST_PLAIN_HEAD:
            self._has_come.clear()
            await self._has_come.wait()
            if transport.is_closing():
                return
        transport.write(answer_to_plain_http(self._early))


def _feed(transport: asyncio.Transport, data: bytes) -> None:
    """Give the transport's protocol, TLS by now, what came before it was there."""
    protocol = transport.get_protocol()
    left = memoryview(data)
    while left and not transport.is_closing():
        buffer = protocol.get_buffer(len(left))  # type: ignore[attr-defined]
        count = min(len(buffer), len(left))
        buffer[:count] = left[:count]
        protocol.buffer_updated(count)  # type: ignore[attr-defined]
        left = left[count:]


def behind_tls(
    connections: type[LimitedConnection], context: ssl.SSLContext
) -> type[asyncio.Protocol]:
    """The class of a server's connections that begin with a handshake."""
    own = {"connections": connections, "context": context, "half_open": connections.half_open}
    return type("SecuredConnection", (Handshake,), own)

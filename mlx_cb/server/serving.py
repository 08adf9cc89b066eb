"""Runs the app on a socket until it is told to stop; ends open streams politely and soon.

Owns the listening sockets and the order of closing. Knows nothing about signals or the command
line: `cli.serve` decides when to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Iterator

import uvicorn

from mlx_cb.server.app import create_app
from mlx_cb.server.connections import ConnectionLimits, limited
from mlx_cb.server.front import Front
from mlx_cb.server.handshakes import behind_tls
from mlx_cb.server.tls import Certificates, TlsError

# After this long, answers that are still open are ended with an error.
DRAIN_S = 2.5
# How often certificates are looked at: a machine that changes networks has new addresses.
_CERTIFICATE_CHECK_S = 60.0
# An engine that is within a long step is not waited for longer.
_LAST_LOOK_S = 1.0
_log = logging.getLogger("mlx_cb.server")


class PortBusy(OSError):
    """Another program listens there."""


def bind_all(port: int) -> list[socket.socket]:
    """Sockets on every IPv4 and IPv6 address. Raises PortBusy."""
    return _bind_both("0.0.0.0", "::", port)


def bind_host(host: str, port: int) -> list[socket.socket]:
    """Sockets on one address; `localhost` means both of them, since clients try either.

    Raises PortBusy, or OSError for an address this machine lacks.
    """
    if host == "localhost":
        return _bind_both("127.0.0.1", "::1", port)
    return [bind(host, port)]


def _bind_both(ipv4: str, ipv6: str, port: int) -> list[socket.socket]:
    """One port on both addresses; IPv4 alone where that is all. Raises PortBusy."""
    first = bind(ipv4, port)
    try:
        return [first, bind(ipv6, first.getsockname()[1])]
    except PortBusy:
        first.close()
        raise
    except OSError as error:
        _log.warning("there is no IPv6 here: %s", error)
        return [first]


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises PortBusy, or OSError for an address this machine lacks."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol must be named: asyncio turns Nagle's delay off only where it reads TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        # Otherwise `::` would take IPv4's port as well, and show its callers as ::ffff:a.b.c.d.
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortBusy(error.errno, f"port {port} on {host} is in use") from error
        raise
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: one place decides about signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Serving:
    """One running HTTP server."""

    def __init__(
        self,
        front: Front,
        certificates: Certificates | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """Raises TlsError when there are certificates that cannot be used."""
        self._front = front
        self._certificates = certificates
        self._context = None if certificates is None else _context(certificates)
        self.connections = limited(limits or ConnectionLimits())
        secured = None if self._context is None else behind_tls(self.connections, self._context)
        config = uvicorn.Config(
            create_app(front),
            http=secured or self.connections,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=True,
            timeout_keep_alive=120,
            backlog=2048,
        )
        self._server = _Server(config)

    async def run(self, listeners: list[socket.socket]) -> None:
        """Serve until `stop`."""
        front = self._front
        beside = [
            asyncio.create_task(self._renew_certificate()),
            asyncio.create_task(front.machine_time.run()),
        ]
        try:
            await self._server.serve(sockets=listeners)
        finally:
            for task in beside:
                task.cancel()
            # Answers of the chat have no connection that uvicorn would wait for.
            await asyncio.gather(*beside, *front.open_answers, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(front.machine_time.look(), _LAST_LOOK_S)
            front.close()

    async def _renew_certificate(self) -> None:
        """Connections made after a renewal see the new certificate; open ones go on."""
        while self._certificates is not None and self._context is not None:
            await asyncio.sleep(_CERTIFICATE_CHECK_S)
            try:
                if await asyncio.to_thread(self._certificates.renew):
                    self._certificates.load_into(self._context)
                    _log.info("there is a new certificate")
            except (TlsError, OSError) as error:
                _log.error("the certificate stays as it was: %s", error)

    async def stop(self, drain_s: float = DRAIN_S) -> None:
        """Take no new requests, let open answers end for `drain_s`, then end them."""
        front = self._front
        front.is_closing = True
        front.feed.close()
        self._server.should_exit = True
        deadline = asyncio.get_running_loop().time() + drain_s
        while front.open_answers and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for answer in list(front.open_answers):
            answer.cancel()


def _context(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    certificates.load_into(context)
    return context

"""Runs the app on a socket until it is told to stop; ends open streams politely and soon.

Owns the listening sockets and the order of closing. Knows nothing about signals or the command
line: `cli.serve` decides when to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn

from mlx_cb.server.app import create_app
from mlx_cb.server.front import Front

# After this long, answers that are still open are ended with an error.
DRAIN_S = 2.5


class PortBusy(OSError):
    """Another program listens there."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises PortBusy, or OSError for an address this machine lacks."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol must be named: asyncio turns Nagle's delay off only where it reads TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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

    def __init__(self, front: Front) -> None:
        self._front = front
        config = uvicorn.Config(
            create_app(front),
            http="httptools",
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
        try:
            await self._server.serve(sockets=listeners)
        finally:
            self._front.close()

    async def stop(self, drain_s: float = DRAIN_S) -> None:
        """Take no new requests, let open answers end for `drain_s`, then end them."""
        front = self._front
        front.is_closing = True
        self._server.should_exit = True
        deadline = asyncio.get_running_loop().time() + drain_s
        while front.open_answers and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for answer in list(front.open_answers):
            answer.cancel()

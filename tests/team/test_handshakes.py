"""TLS clients that never finish their handshake, or take their time: let go, and counted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
import uvloop

from mlx_cb.server.connections import ConnectionLimits
from mlx_cb.server.plain_http import answer_to_plain_http
from mlx_cb.server.tls import LocalAuthority
from tests.server.conftest import LiveServer
from tests.team.conftest import Serve
from tests.team.test_connections import HEALTH, answer_on, counted, rest, wait_for

PATIENT = ConnectionLimits(head_s=600.0)
IMPATIENT = ConnectionLimits(head_s=0.3)
FEW = ConnectionLimits(head_s=600.0, half_open=8)
Secured = Callable[[ConnectionLimits], LiveServer]


LOOPS = [
    pytest.param(uvloop.new_event_loop, id="uvloop"),
    pytest.param(asyncio.new_event_loop, id="asyncio", marks=pytest.mark.slow),
]


@pytest.fixture(params=LOOPS)
def secured(request: pytest.FixtureRequest, serve: Serve, tmp_path: Path) -> Secured:
    """A server by TLS, on either event loop: `mlx-cb serve` takes uvloop where it is."""
    authority = LocalAuthority(tmp_path / "tls")

    def start(limits: ConnectionLimits) -> LiveServer:
        reply = {"text": "a"}
        return serve(reply, certificates=authority, limits=limits, loop=request.param)

    return start


def connect(server: LiveServer) -> socket.socket:
    """A connection on which nothing was said yet."""
    host, port = server.url.removeprefix("https://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def client_hello() -> bytes:
    """How a client begins."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    shaking = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        shaking.do_handshake()
    return outgoing.read()


@contextlib.contextmanager
def by_tls(connection: socket.socket) -> Iterator[ssl.SSLSocket]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(connection) as wrapped:
        yield wrapped


@pytest.mark.parametrize("sent", [0, 1, 40, 10_000])
def test_a_handshake_has_to_end_in_time(secured: Secured, sent: int) -> None:
    """Whatever part of its first message the client sends; with all of it, it answers no more."""
    server = secured(IMPATIENT)
    with connect(server) as connection:
        connection.sendall(client_hello()[:sent])
        rest(connection)  # returns once the server has closed
    wait_for(lambda: counted(server).count == 0)
    assert server.get("/health").status_code == 200


def test_dripping_bytes_do_not_buy_time(secured: Secured) -> None:
    server = secured(IMPATIENT)
    with connect(server) as connection, contextlib.suppress(ConnectionError):
        for byte in client_hello():
            connection.sendall(bytes([byte]))
            time.sleep(0.02)
        pytest.fail("the connection was not closed")


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x00\x05hello", b"hello\r\n\r\n", b"SSH-2.0\r\n\r\n"]
)
def test_what_is_no_handshake_is_closed_at_once(secured: Secured, sent: bytes) -> None:
    server = secured(PATIENT)
    with connect(server) as connection:
        connection.sendall(sent)
        assert b"HTTP/" not in rest(connection)
    wait_for(lambda: counted(server).count == 0)
    assert server.get("/health").status_code == 200


def test_plain_http_is_told_where_to_go(secured: Secured) -> None:
    """Whoever leaves `https://` away; and nothing that was sent is taken for a request."""
    server = secured(PATIENT)
    plain = server.url.replace("https:", "http:")
    page = httpx2.get(plain + "/admin?a=b")
    assert (page.status_code, page.headers["location"]) == (307, server.url + "/admin?a=b")
    posted = httpx2.post(plain + "/v1/chat/completions", json={"messages": []})
    assert (posted.status_code, posted.json()["error"]["code"]) == (400, "needs_tls")
    assert not server.engine.played
    wait_for(lambda: counted(server).count == 0)


@pytest.mark.parametrize("sent", [b"GET /", b"GET / HTTP/1.1\r\nHost: a\r\nX: "])
def test_plain_http_has_to_come_in_time_too(secured: Secured, sent: bytes) -> None:
    server = secured(IMPATIENT)
    with connect(server) as connection:
        connection.sendall(sent)
        assert rest(connection) == b""


HOST = b"\r\nHost: macbot.local:8080\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "location"),
    [
        (b"GET / HTTP/1.1" + HOST, b"https://macbot.local:8080/"),
        (b"HEAD /a?b=c HTTP/1.0\r\nA: b\r\nhost: [::1]:1 \r\n\r\n", b"https://[::1]:1/a?b=c"),
        (b"GET //evil.example/ HTTP/1.1" + HOST, b"https://macbot.local:8080//evil.example/"),
        (b"GET http://evil.example/ HTTP/1.1" + HOST, None),
        (b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\nHost: a@evil\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\nHost: a\nSet-Cookie: b\r\n\r\n", None),
        (b"GET /\rSet-Cookie:a HTTP/1.1" + HOST, None),
        (b"GET / HTTP/1.1\r\n\r\n", None),
        (b"POST / HTTP/1.1" + HOST, None),
    ],
)
def test_where_plain_http_is_sent(head: bytes, location: bytes | None) -> None:
    lines = answer_to_plain_http(head).partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert [line[10:] for line in lines if line.startswith(b"location: ")] == (
        [location] if location else []
    )
    assert not [line for line in lines if b"ookie" in line]


def test_after_the_handshake_the_head_has_to_come_in_time(secured: Secured) -> None:
    server = secured(IMPATIENT)
    with connect(server) as connection, by_tls(connection) as wrapped:
        wrapped.sendall(b"GET /health HTTP/1.1\r\n")
        assert rest(wrapped).startswith(b"HTTP/1.1 408")


def test_a_request_may_come_with_the_handshakes_last_message(secured: Secured) -> None:
    """In TLS 1.3 a client's first request follows its last message at once."""
    server = secured(PATIENT)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for _ in range(20):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        shaking = context.wrap_bio(incoming, outgoing)
        with connect(server) as connection:
            while True:
                try:
                    shaking.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    connection.sendall(outgoing.read())
                    incoming.write(connection.recv(65536))
            shaking.write(HEALTH)
            connection.sendall(outgoing.read())
            data = b""
            while b"200 OK" not in data:
                incoming.write(connection.recv(65536))
                with contextlib.suppress(ssl.SSLWantReadError):
                    data += shaking.read(65536)


def test_the_oldest_handshake_makes_room(secured: Secured) -> None:
    server = secured(FEW)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(30)]
        for connection in slow[:22]:
            assert rest(connection) == b""
        assert counted(server).count <= 8
        assert server.get("/health").status_code == 200
        with by_tls(slow[-1]) as wrapped:
            wrapped.sendall(HEALTH)
            assert answer_on(wrapped).startswith(b"HTTP/1.1 200")
    wait_for(lambda: counted(server).count == 0)


def test_500_open_handshakes_keep_nobody_out(secured: Secured) -> None:
    server = secured(PATIENT)
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(connect(server)).sendall(b"\x16\x03")
        wait_for(lambda: counted(server).count >= 500)
        assert server.chat().status_code == 200
        assert counted(server).count >= 500


def test_a_server_that_ends_waits_for_no_handshake(secured: Secured) -> None:
    server = secured(PATIENT)
    with connect(server) as connection:
        wait_for(lambda: counted(server).count == 1)
        server.begin_stop().result(20)
        assert rest(connection) == b""
        assert server.has_stopped(20)

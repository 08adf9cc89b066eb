"""Slow and hostile connections: limits of time, size and number, and nobody else suffers."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_cb.server import body
from mlx_cb.server.connections import ConnectionLimits, HalfOpen, LimitedConnection
from tests.server.conftest import LiveServer
from tests.team.conftest import Serve, Team

CHAT = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
IMPATIENT = ConnectionLimits(head_s=0.3, rest_s=0.3)


def connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes; a test hangs here no longer than the timeout."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            data += piece
    return data


def answer_on(connection: socket.socket) -> bytes:
    """One answer with a length, head and body."""
    data = b""
    while True:
        head, _, content = data.partition(b"\r\n\r\n")
        if content and len(content) >= int(head.lower().split(b"content-length: ")[1].split()[0]):
            return data
        piece = connection.recv(65536)
        assert piece, data
        data += piece


def counted(server: LiveServer) -> HalfOpen:
    found: HalfOpen = server.serving.connections.half_open
    return found


def wait_for(what: Any) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def impatient(serve: Serve) -> LiveServer:
    return serve({"text": "a"}, limits=IMPATIENT)


@pytest.mark.parametrize(
    "sent", [b"G", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A:", HEALTH + b"GET"]
)
def test_a_head_has_to_come_in_time(impatient: LiveServer, sent: bytes) -> None:
    with connect(impatient) as connection:
        connection.sendall(sent)
        assert b"HTTP/1.1 408" in rest(connection)
    wait_for(lambda: counted(impatient).count == 0)


def test_dripping_bytes_do_not_buy_time(impatient: LiveServer) -> None:
    with connect(impatient) as connection, contextlib.suppress(BrokenPipeError, ConnectionError):
        connection.sendall(b"GET / HTTP/1.1\r\n")
        for k in range(1000):
            connection.sendall(b"X-%d: a\r\n" % k)
            time.sleep(0.02)
        pytest.fail("the connection was not closed")


def test_who_says_nothing_is_closed_without_a_word(impatient: LiveServer) -> None:
    with connect(impatient) as connection:
        assert rest(connection) == b""


def test_a_kept_connection_may_be_idle(impatient: LiveServer) -> None:
    with connect(impatient) as connection:
        for _ in range(2):
            connection.sendall(HEALTH)
            assert answer_on(connection).startswith(b"HTTP/1.1 200")
            time.sleep(3 * IMPATIENT.head_s)


@pytest.mark.parametrize(
    "header",
    [
        b"Cookie: " + b"a=b; " * 20_000,
        b"X: " + b"y" * 70_000,
        b"\r\n".join(b"X-%d: y" % k for k in range(9_000)),
    ],
    ids=["cookie", "one", "many"],
)
@pytest.mark.parametrize("ends", [True, False])
def test_headers_that_are_too_large(serve: Serve, header: bytes, ends: bool) -> None:
    server = serve({"text": "a"})
    with connect(server) as connection:
        sent = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n" + header
        sent += b"\r\nContent-Length: %d\r\n\r\n" % len(CHAT) + CHAT if ends else b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        assert rest(connection).startswith(b"HTTP/1.1 431")
    assert not server.engine.played
    assert server.chat().status_code == 200


def test_a_long_path_is_a_large_head(serve: Serve) -> None:
    server = serve({"text": "a"})
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert rest(connection).startswith(b"HTTP/1.1 431")


def test_a_large_body_is_no_large_head(serve: Serve) -> None:
    server = serve({"text": "a"})
    answer = server.chat("x" * 150_000)
    assert answer.status_code == 200


def test_the_oldest_makes_room_for_the_newest(serve: Serve) -> None:
    server = serve({"text": "a"}, limits=ConnectionLimits(half_open=8))
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(20)]
        for connection in slow:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"GET")
        for connection in slow[:12]:
            rest(connection)  # until it is closed
        assert counted(server).count <= 8
        assert server.chat().status_code == 200
        for connection in slow[-4:]:
            connection.sendall(HEALTH[3:])
            assert answer_on(connection).startswith(b"HTTP/1.1 200")


class _Connection:
    """Stands for a connection in the count."""


def test_the_total_takes_from_whoever_has_most() -> None:
    half_open = HalfOpen(ConnectionLimits(half_open=4))
    made: list[LimitedConnection] = [_Connection() for _ in range(6)]  # type: ignore[misc]
    assert [half_open.add(made[k], "a") for k in range(3)] == [None, None, None]
    assert half_open.add(made[3], "b") is None
    assert half_open.add(made[4], "c") is made[0]
    half_open.discard(made[0], "a")
    half_open.discard(made[0], "a")
    assert half_open.count == 4
    for connection, network in zip(made[1:5], "aabc", strict=True):
        half_open.discard(connection, network)
    assert (half_open.count, half_open._by_network) == (0, {})


def test_a_body_has_to_come_in_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "PATIENCE_S", 0.3)
    server = serve({"text": "a"})
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n{"
        )
        answer = answer_on(connection)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"type":"error"' in answer.replace(b" ", b"")
    assert not server.engine.played


def test_a_body_that_nobody_waits_for_does_not_hold_its_connection(impatient: LiveServer) -> None:
    with connect(impatient) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n")
        assert b"HTTP/1.1 200" in rest(connection)


def sends(connection: socket.socket, data: bytes) -> bool:
    try:
        connection.sendall(data)
    except OSError:
        connection.close()
        return False
    return True


@contextlib.contextmanager
def dripping(server: LiveServer, number: int) -> Iterator[None]:
    """So many connections that send a byte of a head now and then, and come back when closed."""
    ended = threading.Event()

    def run() -> None:
        connections: list[socket.socket] = []
        while not ended.wait(0.1):
            alive = [one for one in connections if sends(one, b"x")]
            new = [connect(server) for _ in range(number - len(alive))]
            connections = alive + [one for one in new if sends(one, b"GET /")]
        for connection in connections:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_500_slow_connections_while_16_streams_run(serve: Serve) -> None:
    """Counted, not timed: every stream has all its tokens, and newcomers are served."""
    words = [f"w{k} " for k in range(60)]
    server = serve({"tokens": words, "delay_s": 0.02})
    texts: list[str] = []

    def stream() -> None:
        answer = server.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "stream": True},
        )
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line[6:7] == "{"]
        texts.append("".join(c["choices"][0]["delta"].get("content") or "" for c in chunks))

    least = 500
    with dripping(server, 500):
        wait_for(lambda: counted(server).count >= 500)
        threads = [threading.Thread(target=stream) for _ in range(16)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            least = min(least, counted(server).count)
            assert server.get("/health").status_code == 200
            time.sleep(0.05)
    assert texts == ["".join(words)] * 16
    assert least >= 400  # the others were there all the time
    wait_for(lambda: counted(server).count == 0)


INJECTIONS = [
    b"/%0d%0aset-cookie:%20a=b", b"/v1/models/%0d%0aset-cookie:a=b",
    b"/usage?format=%0d%0aset-cookie:a",
    b"/status/requests/%0aset-cookie:a=b", b"/v1/models?x=%00",
    b"/sign-in?to=%0d%0aset-cookie:a=b",
]  # fmt: skip


@pytest.mark.parametrize("path", INJECTIONS)
def test_nothing_of_a_request_becomes_a_header(
    serve: Serve, path: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve({"text": "a"})
    with connect(server) as connection, caplog.at_level("INFO"):
        connection.sendall(
            b"GET "
            + path
            + b" HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\r\nConnection: close\r\n"
            b"Origin: app://a%0d%0aset-cookie:a=b\r\n\r\n"
        )
        lines = rest(connection).partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
    assert not any(line.startswith(b"set-cookie") for line in lines)
    assert sum(line.startswith(b"x-request-id") for line in lines) == 1
    assert all("\n" not in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("line", [b"X: a\nSet-Cookie: b", b"X: a\rSet-Cookie: b", b"X\x00: a"])
def test_broken_lines_in_a_head_are_refused(serve: Serve, line: bytes) -> None:
    server = serve({"text": "a"})
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + line + b"\r\n\r\n")
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 400") or b"set-cookie" not in answer.lower()


@pytest.mark.parametrize(
    "path",
    [
        b"/static/../../../../etc/passwd", b"/static/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        b"/static/..%2f..%2f..%2fetc/passwd", b"/static//etc/passwd", b"/../../etc/passwd",
        b"/static/....//....//etc/passwd", b"/static/..%5c..%5cetc/passwd",
        b"/static/%00/etc/passwd",
        b"/v1/models/../../../../etc/passwd", b"/admin/../metrics", b"/static/../metrics",
        b"/static/../admin/state", b"/sign-in/../usage?user=boss", b"/%61dmin/state",
    ],
)  # fmt: skip
def test_no_path_leads_out(serve: Serve, team: Team, path: bytes) -> None:
    """Sent as it is: clients would tidy it up."""
    server = serve({"text": "a"}, keys_file=team.path)
    key = team.keys["alice"].encode()
    with connect(server) as connection:
        connection.sendall(
            b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"X-Api-Key: " + key + b"\r\n\r\n"
        )
        answer = rest(connection)
    assert answer[9:12] in (b"400", b"403", b"404")
    assert b"root:" not in answer
    assert b"mlx_cb:" not in answer

"""Connections: idle ones stay open, pipelined ones are served, bad ones do no harm: C081, C082."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

Serve = Callable[..., Any]
BODY = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()


def connect(server: Any) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def request(length: int, *more: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", f"Content-Length: {length}"]
    return ("\r\n".join([*lines, *more]) + "\r\n\r\n").encode()


def read_answer(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of one answer with a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        assert piece, data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return head, body[:length]


@pytest.mark.slow
def test_c081_an_idle_connection_is_still_there_after_seventy_seconds(serve: Serve) -> None:
    server = serve({"text": "x"})
    with connect(server) as connection:
        for wait in (0, 6, 20, 70):
            time.sleep(wait)
            connection.sendall(request(len(BODY)) + BODY)
            head, _ = read_answer(connection)
            assert head.startswith(b"HTTP/1.1 200")


def test_c082_two_requests_in_one_packet_are_both_answered(serve: Serve) -> None:
    server = serve({"text": "x"})
    with connect(server) as connection:
        connection.sendall((request(len(BODY)) + BODY) * 2)
        data = b""
        while data.count(b'"finish_reason"') < 2:
            piece = connection.recv(65536)
            assert piece
            data += piece
    assert data.count(b"HTTP/1.1 200") == 2


def test_c082_expect_continue(serve: Serve) -> None:
    server = serve({"text": "x"})
    with connect(server) as connection:
        connection.sendall(request(len(BODY), "Expect: 100-continue"))
        assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        connection.sendall(BODY)
        head, _ = read_answer(connection)
        assert head.startswith(b"HTTP/1.1 200")


def test_c082_a_body_shorter_than_it_says_harms_nobody(serve: Serve) -> None:
    server = serve({"text": "x"})
    with connect(server) as connection:
        connection.sendall(request(len(BODY) + 100) + BODY)
        time.sleep(0.1)
    assert server.chat().status_code == 200
    server.wait_until_idle()


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00", b"HELLO\r\n\r\n", b"GET / HTTP/9\r\n\r\n"]
)
def test_garbage_is_refused_and_harms_nobody(serve: Serve, garbage: bytes) -> None:
    server = serve({"text": "x"})
    with connect(server) as connection:
        connection.sendall(garbage)
        assert b" 400 " in connection.recv(1000)
    assert server.chat().status_code == 200

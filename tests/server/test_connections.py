"""Connections: idle ones stay open, pipelined ones are served, bad ones do no harm, every answer
ends visibly: C051, C079, C081, C082."""

from __future__ import annotations

import contextlib
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


def read_to_the_end(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            answer += piece
    return answer


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
    "lines",
    [
        ["Content-Length: 10", "Content-Length: 12"],
        ["Content-Length: -5"],
        ["Content-Length: 10", "Transfer-Encoding: chunked"],
        ["Content-Length: x"],
    ],
    ids=["two", "negative", "chunked too", "no number"],
)
def test_c082_lengths_that_contradict_each_other_are_refused(
    serve: Serve, lines: list[str]
) -> None:
    server = serve({"text": "x"})
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", *lines]
    with connect(server) as connection:
        connection.sendall(("\r\n".join(head) + "\r\n\r\n").encode() + BODY)
        answer = read_to_the_end(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert server.chat().status_code == 200


def test_c082_a_chunk_with_a_bad_size_is_refused(serve: Serve) -> None:
    server = serve({"text": "x"})
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked"]
    head = "\r\n".join([*lines, "", ""])
    with connect(server) as connection:
        connection.sendall(head.encode() + b"zz\r\n" + BODY)
        assert read_to_the_end(connection).startswith(b"HTTP/1.1 400")
    server.wait_until_idle(10)
    assert server.chat().status_code == 200


def chunked(head: str, pieces: list[bytes]) -> bytes:
    sized = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return head.encode() + sized + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [900_000, 1_100_000, 5_000_000])
def test_c079_large_bodies_come_in_chunks_too(serve: Serve, size: int) -> None:
    server = serve({"text": "x"}, max_body_bytes=3_000_000)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        "Connection: close\r\n\r\n"
    )
    body = BODY[:-1] + b', "metadata": {"k": "' + b"y" * size + b'"}}'
    pieces = [body[start : start + 65536] for start in range(0, len(body), 65536)]
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):  # refused before all of it was sent
            connection.sendall(chunked(head, pieces))
        answer = read_to_the_end(connection)
    assert answer.startswith(b"HTTP/1.1 200" if size < 3_000_000 else b"HTTP/1.1 413")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("closes", [False, True])
def test_c051_the_end_of_an_answer_is_there_to_be_seen(
    serve: Serve, stream: bool, version: str, closes: bool
) -> None:
    """By its framing, or by the end of the connection where there is none to keep."""
    server = serve({"tokens": ["a", "b", "c"]})
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "stream": stream}).encode()
    lines = [f"POST /v1/chat/completions HTTP/{version}", "Host: localhost",
             f"Content-Length: {len(body)}", *["Connection: close"] * closes]  # fmt: skip
    asked = ("\r\n".join(lines) + "\r\n\r\n").encode() + body
    with connect(server) as connection:
        connection.sendall(asked)
        if closes or version == "1.0":
            answer = read_to_the_end(connection)
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"transfer-encoding" not in answer.lower() or version == "1.1"
            assert b'"finish_reason":"stop"' in answer
            return
        for _ in range(2):  # the second on the same connection
            answer = b""
            end = b"0\r\n\r\n" if stream else b"}}"
            while not answer.endswith(end):
                piece = connection.recv(65536)
                assert piece, answer
                answer += piece
            assert b'"finish_reason":"stop"' in answer
            connection.sendall(asked)


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00", b"HELLO\r\n\r\n", b"GET / HTTP/9\r\n\r\n"]
)
def test_garbage_is_refused_and_harms_nobody(serve: Serve, garbage: bytes) -> None:
    server = serve({"text": "x"})
    with connect(server) as connection:
        connection.sendall(garbage)
        assert b" 400 " in connection.recv(1000)
    assert server.chat().status_code == 200

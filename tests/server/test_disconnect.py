"""Clients that go away free the engine at once: C011 to C013."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

Serve = Callable[..., Any]
CHAT = "/v1/chat/completions"
ENDLESS = {"match": "long", "tokens": ["x"], "repeat": True, "delay_s": 0.01}
WITNESS = {"match": "witness", "tokens": [f"{n} " for n in range(60)], "delay_s": 0.02}


def connect(server: Any, content: str, stream: bool, path: str = "/v1/chat/completions") -> Any:
    """A raw connection that has sent a request and read nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    body = json.dumps(
        {"messages": [{"role": "user", "content": content}], "prompt": content, "stream": stream}
    ).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def hang_up(connection: socket.socket, how: str) -> None:
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def wait_for(condition: Callable[[], bool], seconds: float = 1.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_c011_c012_decoding_stops(serve: Serve, how: str, stream: bool, path: str) -> None:
    server = serve(ENDLESS)
    connection = connect(server, "long", stream, path)
    wait_for(lambda: any(p.num_tokens > 5 for p in server.engine.played.values()))
    hang_up(connection, how)
    (played,) = server.engine.played.values()
    wait_for(lambda: played.status == "finished")
    assert played.finish_reason == "abort"
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_c012_prefilling_and_queued_requests_stop(serve: Serve, stream: bool) -> None:
    slow = {"tokens": ["x"], "prefill_s": 30.0}
    server = serve(slow, script={"max_num_seqs": 1})
    prefilling = connect(server, "a", stream)
    wait_for(lambda: len(server.engine.played) == 1)
    queued = connect(server, "b", stream)
    wait_for(lambda: len(server.engine.played) == 2)
    first, second = server.engine.played.values()
    wait_for(lambda: (first.status, second.status) == ("running", "waiting"))
    hang_up(queued, "close")
    wait_for(lambda: second.status == "finished")
    assert first.status == "running"
    hang_up(prefilling, "close")
    wait_for(lambda: first.status == "finished")


def test_c013_many_resets_leave_a_witness_alone(
    serve: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    server = serve(ENDLESS, WITNESS)
    body = {"messages": [{"role": "user", "content": "witness"}], "stream": True}
    with httpx2.stream("POST", server.url + "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        for number in range(100):
            connection = connect(server, "long", stream=True)
            if number % 3:
                connection.recv(200 * (number % 7) + 1)
            hang_up(connection, "reset")
        rest = "\n".join(lines)
    made = [json.loads(line[6:]) for line in rest.split("\n") if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in made)
    assert text == "".join(f"{n} " for n in range(60))
    server.wait_until_idle()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_pair_of_choices_stops_together(serve: Serve) -> None:
    server = serve(ENDLESS)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(
        {"messages": [{"role": "user", "content": "long"}], "n": 4, "stream": True}
    ).encode()
    connection = socket.create_connection((host, int(port)), timeout=5)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    wait_for(lambda: sum(p.num_tokens > 3 for p in server.engine.played.values()) == 4)
    hang_up(connection, "close")
    wait_for(lambda: all(p.status == "finished" for p in server.engine.played.values()))

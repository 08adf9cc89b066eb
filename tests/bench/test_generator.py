"""The load generator against a server with scripted timing."""

import asyncio
import time
from collections import deque

import pytest

from mlx_cb.bench.calls import Call, Lane, Milestone, Plan, Prompt
from mlx_cb.bench.exchange import Endpoint
from mlx_cb.bench.generator import Target, drive
from mlx_cb.bench.prompts import CommonWords
from mlx_cb.bench.servers import free_port
from mlx_cb.bench.wire import Api

from .conftest import Script, one_call, target


def send(target_, plan):
    return asyncio.run(drive(target_, plan))


def test_a_stall_is_found_where_it_was_put(stub):
    stub.script = Script(pauses=[0.15, 0.02, 0.02, 0.4, 0.02])
    record = send(target(stub), one_call()).records[0]
    assert record.failure is None
    assert 0.15 <= record.ttft_s < 0.35
    gaps = record.gaps_s
    assert len(gaps) == 4
    assert max(range(4), key=gaps.__getitem__) == 2
    assert 0.39 <= gaps[2] < 0.6


def test_text_counts_and_finish_are_read(stub):
    record = send(target(stub), one_call()).records[0]
    assert record.text == " w w w"
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (11, 3, 4)
    assert record.finish_reason == "length"


def test_without_usage_chunks_are_tokens(stub):
    stub.script = Script(usage=False)
    assert send(target(stub), one_call()).records[0].output_tokens == 3


def test_bodies_are_greedy_and_seedless(stub):
    send(target(stub, fields=(("top_k", 5),)), one_call())
    body = stub.bodies[0]
    assert body["temperature"] == 0
    assert "seed" not in body
    assert body["top_k"] == 5
    assert isinstance(body["prompt"], str)


def test_chat_speaks_messages(stub):
    record = send(target(stub, api=Api.CHAT), one_call()).records[0]
    assert record.text == " w w w"
    assert stub.bodies[0]["messages"][0]["role"] == "user"


def test_every_user_sends_a_key(stub):
    send(target(stub, key="common", keys={"ann": "hers"}), one_call(user="ann"))
    send(target(stub, key="common", keys={"ann": "hers"}), one_call(user="bob"))
    assert stub.keys == ["Bearer hers", "Bearer common"]


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (Script(status=429), "http_429"),
        (Script(status=503), "http_503"),
        (Script(cut_after=1), "cut"),
        (Script(error_after=1), "stream_error"),
        (Script(pauses=[]), "empty"),
    ],
)
def test_failures_have_a_kind(stub, script, kind):
    stub.script = script
    assert send(target(stub), one_call()).records[0].failure == kind


def test_nobody_there_is_a_failure_to_connect():
    nowhere = Target(Endpoint("127.0.0.1", free_port(), "", False), CommonWords(), timeout_s=2.0)
    assert send(nowhere, one_call()).records[0].failure == "connect"


def test_silence_is_a_timeout(stub):
    stub.script = Script(pauses=[5.0])
    slow = Target(Endpoint.parse(stub.url), CommonWords(), timeout_s=0.3)
    assert send(slow, one_call()).records[0].failure == "timeout"


def test_hanging_up_drops_the_connection(stub):
    stub.script = Script(pauses=[0.05] * 16)
    record = send(target(stub), one_call(cancel_after_s=0.2)).records[0]
    assert record.cancelled
    assert record.failure is None
    assert 1 <= len(record.chunk_times_s) < 16
    deadline = time.monotonic() + 2
    while stub.gone == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stub.gone == 1


def test_lanes_share_a_queue_and_keep_their_number(stub):
    stub.script = Script(pauses=[0.05])
    queue = deque(Call(Prompt(4, seed), 1) for seed in range(6))
    run = send(target(stub), Plan([Lane(queue), Lane(queue)]))
    assert len(run.records) == 6
    for record in run.records:
        others = [other for other in run.records if other is not record]
        overlapping = sum(o.sent_s < record.sent_s < o.ended_s for o in others)
        assert overlapping <= 1
    assert run.last_sent_s == max(record.sent_s for record in run.records)


def test_a_lane_waits_for_its_milestone(stub):
    stub.script = Script(pauses=[0.05] * 6)
    streams = [Lane(deque([Call(Prompt(4, n), 6, group="stream")])) for n in range(2)]
    joiner = Lane(
        deque([Call(Prompt(4, 9), 1, group="joiner")]), starts_when=Milestone("stream", 2, 3)
    )
    records = send(target(stub), Plan([*streams, joiner])).records
    joined = next(record for record in records if record.call.group == "joiner")
    third = max(record.chunk_times_s[2] for record in records if record.call.group == "stream")
    assert third <= joined.sent_s < third + 0.1


def test_a_milestone_that_cannot_come_lets_the_lane_start_at_the_end(stub):
    stub.script = Script(status=500)
    stream = Lane(deque([Call(Prompt(4, 1), 6, group="stream")]))
    joiner = Lane(
        deque([Call(Prompt(4, 9), 1, group="joiner")]), starts_when=Milestone("stream", 1, 3)
    )
    assert len(send(target(stub), Plan([stream, joiner])).records) == 2


def test_a_conversation_sends_what_was_said(stub):
    turns = deque(Call(Prompt(4, seed, conversation="c"), 3) for seed in range(2))
    send(target(stub), Plan([Lane(turns)]))
    first, second = (body["prompt"] for body in stub.bodies)
    assert second.startswith(first + " w w w")
    assert len(second.split()) == 4 + 3 + 4


def test_the_client_is_not_the_bottleneck(stub):
    """64 streams of 50 chunks each: all of them arrive, each with its own time."""
    stub.script = Script(pauses=[0.001] * 50)
    lanes = [Lane(deque([Call(Prompt(4, seed), 50)])) for seed in range(64)]
    run = send(target(stub), Plan(lanes))
    assert all(record.failure is None for record in run.records)
    assert sum(len(record.chunk_times_s) for record in run.records) == 64 * 50


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8080", ("127.0.0.1", 8080, "", False)),
        ("http://127.0.0.1:8080/v1/", ("127.0.0.1", 8080, "", False)),
        ("mac.local:9000", ("mac.local", 9000, "", False)),
        ("https://example.net/llm/v1", ("example.net", 443, "/llm", True)),
    ],
)
def test_base_urls(url, expected):
    endpoint = Endpoint.parse(url)
    assert (endpoint.host, endpoint.port, endpoint.prefix, endpoint.tls) == expected


def test_a_url_needs_a_host():
    with pytest.raises(ValueError, match="not an http URL"):
        Endpoint.parse("ftp://example.net")

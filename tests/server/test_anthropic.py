"""Anthropic Messages with the released client and on the wire: C018, C034, C111 to C113, C120."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import pytest

Serve = Callable[..., Any]
MESSAGES = "/v1/messages?beta=true"
HELLO = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}]
FULL = {
    "reasoning": "let me see",
    "text": "Adding.",
    "tool_calls": [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}],
    "cached_tokens": 16,
}


def ask(server: Any, **fields: Any) -> Any:
    return server.post(MESSAGES, {"model": "m", "max_tokens": 99, "messages": HELLO, **fields})


def prompt_of(server: Any, **fields: Any) -> str:
    """The rendered prompt: the scripted tokenizer decodes it back."""
    answer = ask(server, **fields)
    assert answer.status_code == 200, answer.text
    ids = server.prompts[answer.headers["x-request-id"]]
    return server.front.text.tokenizer.decode(ids, skip_special_tokens=False)


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    made = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        made.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == content["type"] for name, content in made)
    return made


def client(server: Any, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="x", **options)


def test_golden_bytes(serve: Serve) -> None:
    answer = ask(serve(FULL), tools=TOOLS, stream=True)
    text = re.sub(r"(msg|toolu)_[0-9a-f]+", r"\1_ID", answer.text)
    golden = Path(__file__).parent / "golden" / "anthropic.txt"
    assert text == golden.read_text("utf-8")


def test_c111_order_of_events_and_true_numbers(serve: Serve) -> None:
    server = serve(FULL)
    streamed = events(ask(server, tools=TOOLS, stream=True).text)
    names = [name for name, _ in streamed]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    started = [c["index"] for name, c in streamed if name == "content_block_start"]
    assert started == [c["index"] for name, c in streamed if name == "content_block_stop"]
    assert started == [0, 1, 2, 3]
    usage = streamed[0][1]["message"]["usage"]
    counted = server.post("/v1/messages/count_tokens", {"messages": HELLO, "tools": TOOLS}).json()
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
    assert usage["cache_read_input_tokens"] == 16
    whole = ask(server, tools=TOOLS).json()
    assert whole["usage"]["output_tokens"] == streamed[-2][1]["usage"]["output_tokens"] > 0
    assert whole["stop_reason"] == streamed[-2][1]["delta"]["stop_reason"] == "tool_use"


def test_the_released_client_streamed_and_whole(serve: Serve) -> None:
    server = serve(FULL)
    with client(server) as api:
        whole = api.messages.create(model="m", max_tokens=99, messages=HELLO, tools=TOOLS)
        with api.messages.stream(model="m", max_tokens=99, messages=HELLO, tools=TOOLS) as stream:
            streamed = stream.get_final_message()
        count = api.messages.count_tokens(model="m", messages=HELLO)
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text"] + ["tool_use"] * 2
        assert message.content[0].thinking == "let me see"
        assert message.content[0].signature
        assert message.content[1].text == "Adding."
        assert [block.input for block in message.content[2:]] == [{"a": 1}, {}]
        assert message.stop_reason == "tool_use"
    assert whole.id != streamed.id
    assert count.input_tokens > 5


def test_c018_stop_sequences(serve: Serve) -> None:
    server = serve({"tokens": ["al", "pha be", "ta gam", "ma omega"]})
    answer = ask(server, stop_sequences=["zzz", "beta gamma"]).json()
    assert answer["content"] == [{"type": "text", "text": "alpha "}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "beta gamma")
    streamed = events(ask(server, stop_sequences=["beta gamma"], stream=True).text)
    assert streamed[-2][1]["delta"] == {
        "stop_reason": "stop_sequence", "stop_sequence": "beta gamma"
    }  # fmt: skip


def test_c034_stop_reasons(serve: Serve) -> None:
    server = serve({"tokens": [f"t{n} " for n in range(10)]})
    for limit, reason in ((1, "max_tokens"), (10, "max_tokens"), (11, "end_turn")):
        assert ask(server, max_tokens=limit).json()["stop_reason"] == reason


CALLS = [
    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
    {"type": "tool_use", "id": "t2", "name": "add", "input": {"a": 2}},
]


def result(number: int, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"t{number}", "content": content, **more}


@pytest.mark.parametrize(
    "content", ["five", [{"type": "text", "text": "five"}]], ids=["text", "blocks"]
)
def test_c112_calls_and_results_reach_the_prompt_in_order(serve: Serve, content: Any) -> None:
    server = serve({"text": "ok"})
    thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
    prompt = prompt_of(
        server,
        tools=TOOLS,
        messages=[
            *HELLO,
            {"role": "assistant", "content": [thinking, *CALLS]},
            {
                "role": "user",
                "content": [
                    result(1, content),
                    result(2, "six", is_error=True),
                    {"type": "text", "text": "and then?"},
                ],
            },
        ],
    )
    places = [
        prompt.index(text)
        for text in ("hm", '{"a": 1}', '{"a": 2}', "five", "six", "and then?")
    ]  # fmt: skip
    assert places == sorted(places)


def test_c113_failures_before_and_in_the_stream(serve: Serve) -> None:
    server = serve(
        {"match": "early", "tokens": [], "finish": "error"},
        {"match": "late", "tokens": ["a", "b"], "finish": "error"},
        {"match": "call", "text": '<tool_call>{"na', "finish": "error"},
        {"match": "busy", "refuse": 429},
    )

    def say(text: str, **fields: Any) -> Any:
        return ask(server, messages=[{"role": "user", "content": text}], **fields)

    for stream in (False, True):
        answer = say("early", stream=stream)
        assert answer.status_code == 503
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "overloaded_error"
        assert answer.headers["retry-after"]
        assert say("busy", stream=stream).json()["error"]["type"] == "rate_limit_error"
    for text, tools in (("late", None), ("call", TOOLS)):
        name, content = events(say(text, stream=True, tools=tools).text)[-1]
        assert name == "error"
        assert set(content["error"]) == {"type", "message"}
    messages: Any = [{"role": "user", "content": "late"}]
    with (
        client(server, max_retries=0) as api,
        api.messages.stream(model="m", max_tokens=9, messages=messages) as stream,
        pytest.raises(anthropic.APIStatusError),
    ):
        stream.get_final_message()


def test_too_long_a_prompt_says_both_numbers(serve: Serve) -> None:
    server = serve({"text": "x"}, script={"max_model_len": 100})
    answer = ask(server, messages=[{"role": "user", "content": "y" * 200}], stream=True)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > 100 maximum", message)
    assert found
    assert int(found[1]) > 200
    assert ask(server, max_tokens=128_000).status_code == 200  # clamped, not refused


def test_a_system_message_stays_where_it_stands(serve: Serve) -> None:
    server = serve({"text": "ok"})
    messages = [*HELLO, {"role": "system", "content": "rules"}, {"role": "user", "content": "go"}]
    prompt = prompt_of(server, system="head", messages=messages)
    places = [prompt.index(text) for text in ("head", "hello", "rules", "go")]
    assert places == sorted(places)


def test_the_billing_block_is_not_for_the_model(serve: Serve) -> None:
    server = serve({"text": "ok"})
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc"}
    system = [billing, {"type": "text", "text": "be kind"}]
    assert prompt_of(server, system=system) == prompt_of(server, system="be kind")


def test_a_text_and_its_block_are_the_same_prompt(serve: Serve) -> None:
    server = serve({"text": "ok"})
    block = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    blocks = prompt_of(server, messages=[{"role": "user", "content": [block]}])
    assert blocks == prompt_of(server)


def test_a_tool_loaded_later_does_not_change_the_head(serve: Serve) -> None:
    server = serve({"text": "ok"})
    later = {"name": "fetch", "input_schema": {"type": "object"}, "defer_loading": True}
    first = prompt_of(server, tools=TOOLS)
    reference = [{"type": "tool_reference", "tool_name": "fetch"}]
    messages = [
        *HELLO,
        {"role": "assistant", "content": CALLS[:1]},
        {"role": "user", "content": [result(1, reference)]},
    ]
    second = prompt_of(server, tools=[later, *TOOLS], messages=messages)
    assert second.startswith(first)
    assert '"name": "fetch"' in second[len(first) :]


def test_turns_only_append_to_the_prompt(serve: Serve) -> None:
    server = serve(FULL)
    first = prompt_of(server, tools=TOOLS)
    content = ask(server, tools=TOOLS).json()["content"]
    calls = [block["id"] for block in content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": i, "content": "1"} for i in calls]
    messages = [
        *HELLO,
        {"role": "assistant", "content": content},
        {"role": "user", "content": results},
    ]
    assert prompt_of(server, tools=TOOLS, messages=messages).startswith(first)


def test_prefill_is_continued(serve: Serve) -> None:
    server = serve({"match": "assistant\nParis is$", "text": " big."}, {"text": "no"})
    messages = [*HELLO, {"role": "assistant", "content": "Paris is"}]
    assert ask(server, messages=messages).json()["content"][0]["text"] == " big."


def test_server_tools_and_unknown_fields_are_left_out(serve: Serve) -> None:
    server = serve({"text": "ok"})
    tools = [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    fields = {
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "{}"},
        "service_tier": "auto",
    }
    assert prompt_of(server, tools=tools, **fields) == prompt_of(server, tools=TOOLS)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "banana", "content": "x"}]}, "banana"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"tool_choice": {"type": "tool", "name": "none"}, "tools": TOOLS}, "tool_choice"),
    ],
)
def test_bad_requests_name_the_field(serve: Serve, fields: dict[str, Any], word: str) -> None:
    answer = ask(serve({"text": "x"}), **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert word in answer.json()["error"]["message"]
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_pings_while_nothing_comes(serve: Serve) -> None:
    server = serve({"text": "late", "prefill_s": 1.0}, keep_alive_s=0.3)
    names = [name for name, _ in events(ask(server, stream=True).text)]
    assert names.index("message_start") >= 2
    assert set(names[: names.index("message_start")]) == {"ping"}


def test_counting_in_parallel_does_not_queue_behind_generation(serve: Serve) -> None:
    server = serve({"text": "x", "prefill_s": 3.0}, script={"max_num_seqs": 1})
    with ThreadPoolExecutor(30) as pool:
        running = pool.submit(ask, server)
        time.sleep(0.2)
        started = time.monotonic()
        counts = [
            pool.submit(server.post, "/v1/messages/count_tokens", {"messages": HELLO})
            for _ in range(29)
        ]
        assert all(count.result().json()["input_tokens"] > 5 for count in counts)
        assert time.monotonic() - started < 1.5
        assert not running.done()

"""agents.md's must-have table: every item of it as a test, in the three dialects that agents speak.

`TABLE` says which. What an item asks of one dialect alone, or of the prefix cache, is tested beside
those; here it is looked at from the agents' side, on one server.
"""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mlx_cb.server.generation import Generation

Serve = Callable[..., Any]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
DIALECTS = ("chat", "messages", "responses")
PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages?beta=true",
    "responses": "/v1/responses",
}
CALL = {"reasoning": "hm", "text": "So.", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
HERE, TESTS = Path(__file__), Path(__file__).parents[1]
#: Item of the table -> the tests that hold it; without a file's name they stand here.
TABLE: dict[str, tuple[str, ...]] = {
    "Retry-After on every 429 and 503": (
        "test_retry_after_on_every_429_and_503",
        "server/test_terms.py::test_an_overloaded_engine_is_a_429_before_anything_is_encoded",
    ),
    "unique ids per response": ("test_ids_are_unique_per_response",),
    "always a terminal event and a well-formed end of body, also after internal errors": (
        "test_a_stream_always_ends_with_a_terminal_event",
        "server/test_every_stream.py::test_c048_a_failure_in_mid_stream_in_each_apis_own_form",
        "server/test_connections.py::test_c051_the_end_of_an_answer_is_there_to_be_seen",
    ),
    "keep-alive as events during prefill and queueing, after validation": (
        "test_keep_alives_while_prefilling_and_queueing",
        "server/test_responses.py::test_keep_alives_are_events",
        "server/test_anthropic.py::test_pings_while_nothing_comes",
        "server/test_ollama.py::test_empty_lines_of_text_while_nothing_comes",
    ),
    "Responses: namespace, custom, web_search, additional_tools; un-flattened names": (
        "test_responses_tools_of_every_kind",
        "server/test_responses.py::test_codex_tools_of_every_kind_come_back_in_their_kind",
        "server/test_responses.py::test_calls_of_every_kind_can_be_replayed",
        "server/test_responses.py::test_events_are_numbered_and_end_with_the_response",
    ),
    "Messages: system in place, str = block, tool_reference, defer_loading, thinking, format": (
        "test_messages_as_claude_code_sends_them",
        "server/test_anthropic.py::test_a_system_message_stays_where_it_stands",
        "server/test_anthropic.py::test_a_text_and_its_block_are_the_same_prompt",
        "server/test_anthropic.py::test_a_tool_loaded_later_does_not_change_the_head",
    ),
    "chat: index in every tool delta, reasoning_content in and out, arguments canonicalised": (
        "test_chat_as_opencode_reads_and_sends_it",
        "server/test_tools.py::test_c053_c059_deltas_of_two_calls",
        "server/test_messages.py::test_c027_arguments_of_any_kind_can_be_replayed",
    ),
    "accurate usage": (
        "test_usage_is_the_size_of_the_real_prompt",
        "e2e/test_demo.py::test_c120_usage_tells_what_was_cached",
    ),
    "default output limit = rest of the context; larger limits are clamped": (
        "test_the_output_limit_is_the_rest_of_the_context",
    ),
    "overflow: 400 in each client's words, before queueing": (
        "test_overflow_is_said_at_once_in_the_clients_words",
    ),
    "prefix cache: several heads at once; ids, metadata, cache_control not in the key": (
        "test_what_is_not_text_is_not_in_the_cache_key",
        "engine/test_heads.py::test_several_heads_stay_cached_side_by_side",
    ),
    "three concurrent requests per client; disconnect frees the slot; EPIPE is silent": (
        "test_one_client_may_ask_several_things_at_once",
        "test_a_client_that_leaves_after_the_last_event_leaves_nothing",
        "server/test_disconnect.py::test_c011_c012_decoding_stops",
        "server/test_anthropic.py::test_counting_in_parallel_does_not_queue_behind_generation",
    ),
    "a prefix stays cached after the client disconnects": (
        "engine/test_heads.py::test_a_prefix_stays_cached_after_its_client_has_gone",
    ),
    "unknown keys, headers, betas are ignored; Bearer, x-api-key or none": (
        "test_unknown_things_and_any_key_are_taken",
    ),
    "turns are append-only after templating": ("test_turns_are_append_only_after_templating",),
}
TERMINAL = {
    "chat": ("data: [DONE]", '"error"'),
    "messages": ("event: message_stop", "event: error"),
    "responses": ("event: response.completed", "event: response.failed"),
}


def body(dialect: str, text: str = "hello", *, tools: bool = False, **fields: Any) -> Any:
    say = [{"role": "user", "content": text}]
    made: dict[str, Any] = {"model": "m", "input" if dialect == "responses" else "messages": say}
    if dialect == "messages":
        made["max_tokens"] = 128_000
    if tools:
        made["tools"] = {
            "chat": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}],
            "messages": [{"name": "add", "input_schema": SCHEMA}],
            "responses": [{"type": "function", "name": "add", "parameters": SCHEMA}],
        }[dialect]
    return {**made, **fields}


def ask(server: Any, dialect: str, text: str = "hello", **fields: Any) -> Any:
    headers = fields.pop("headers", None)
    return server.post(PATHS[dialect], body(dialect, text, **fields), headers=headers)


def prompt_ids(server: Any, answer: Any) -> list[int]:
    assert answer.status_code == 200, answer.text
    return server.prompts[answer.headers["x-request-id"]]


ALL = pytest.mark.parametrize("dialect", DIALECTS)


@pytest.mark.parametrize("item", TABLE)
def test_every_item_of_the_table_is_a_test(item: str) -> None:
    for name in TABLE[item]:
        file, _, function = name.rpartition("::")
        path = TESTS / file if file else HERE
        functions = [n.name for n in ast.walk(ast.parse(path.read_text()))
                     if isinstance(n, ast.FunctionDef)]  # fmt: skip
        assert functions.count(function) == 1, name


@ALL
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("stream", [False, True])
def test_retry_after_on_every_429_and_503(
    serve: Serve, dialect: str, status: int, stream: bool
) -> None:
    server = serve({"refuse": status, "retry_after": 3.2})
    answer = ask(server, dialect, stream=stream)
    assert answer.status_code == status
    assert answer.headers["retry-after"] == "4"
    server.engine._is_ready = False
    assert int(ask(server, dialect, stream=stream).headers["retry-after"]) >= 1
    server.engine._is_ready = True


@ALL
@pytest.mark.parametrize("stream", [False, True])
def test_ids_are_unique_per_response(serve: Serve, dialect: str, stream: bool) -> None:
    server = serve(CALL)
    pattern = r'"((?:msg|resp|call|toolu|fc|rs|chatcmpl)[_-][0-9a-f-]+)"'
    found = [
        set(re.findall(pattern, ask(server, dialect, tools=True, stream=stream).text))
        for _ in range(3)
    ]
    assert all(len(ids) >= 2 for ids in found)
    assert not found[0] & found[1]
    assert not (found[0] | found[1]) & found[2]


@ALL
def test_a_stream_always_ends_with_a_terminal_event(
    serve: Serve, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve({"match": "fails", "tokens": ["a"], "finish": "error"}, {"text": "fine"})
    well, badly = TERMINAL[dialect]
    assert well in ask(server, dialect, stream=True).text
    assert badly in ask(server, dialect, "fails", stream=True).text

    async def broken(self: Generation) -> Any:
        yield self.choices[0], []
        raise RuntimeError("a fault of our own")

    monkeypatch.setattr(Generation, "events", broken)
    ended = ask(server, dialect, stream=True)  # a body that is not closed well raises here
    assert badly in ended.text
    assert "a fault" not in ended.text


KEEP_ALIVE = {
    "chat": ": keep-alive",
    "messages": "event: ping",
    "responses": "event: keepalive",
}


@ALL
@pytest.mark.parametrize("why", ["prefill", "queue"])
def test_keep_alives_while_prefilling_and_queueing(serve: Serve, dialect: str, why: str) -> None:
    slow = {"match": "slow", "text": "late", "prefill_s": 1.2}
    server = serve(slow, {"text": "x"}, script={"max_num_seqs": 1}, keep_alive_s=0.2)
    with ThreadPoolExecutor(1) as pool:
        if why == "queue":
            first = pool.submit(ask, server, dialect, "slow", stream=True)
            deadline = time.monotonic() + 20
            while not any(p.status == "running" for p in server.engine.played.values()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            answer = ask(server, dialect, stream=True)
            first.result()
        else:
            answer = ask(server, dialect, "slow", stream=True)
    before, _, _ = answer.text.partition("late" if why == "prefill" else '"x"')
    assert before.count(KEEP_ALIVE[dialect]) >= 2
    wrong = ask(server, dialect, stream=True, temperature=-1)  # validated before headers
    assert wrong.status_code == 400


def test_responses_tools_of_every_kind(serve: Serve) -> None:
    server = serve({"tool_calls": [{"name": "ns__close", "arguments": {"a": 1}}]})
    inner = {"type": "function", "name": "close", "parameters": SCHEMA}
    tools = [
        {"type": "namespace", "name": "ns", "tools": [inner]},
        {"type": "custom", "name": "patch"},
        {"type": "web_search", "external_web_access": False},
        {"type": "invented_tomorrow"},
    ]
    asked = body("responses", stream=True)
    asked["tools"] = tools
    extra = {"type": "additional_tools", "role": "developer", "tools": [inner]}
    asked["input"] = [extra, {"type": "unheard_of"}, *asked["input"]]
    text = server.post("/v1/responses", asked).text
    data = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    done = [event for event in data if event["type"] == "response.output_item.done"]
    item = next(d["item"] for d in done if d.get("item"))
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "close", "ns")
    assert json.loads(item["arguments"]) == {"a": 1}


def test_messages_as_claude_code_sends_them(serve: Serve) -> None:
    server = serve(CALL)
    thinking = {"type": "thinking", "thinking": "before", "signature": ""}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "go"}]},
        {"role": "system", "content": "in place"},
        {
            "role": "assistant",
            "content": [thinking, {"type": "tool_use", "id": "t", "name": "add", "input": {}}],
        },
        {
            "role": "user",
            "content": [{
                "type": "tool_result", "tool_use_id": "t",
                "content": [{"type": "tool_reference", "tool_name": "later"}],
            }],
        },
    ]  # fmt: skip
    asked = body("messages", tools=True)
    asked["messages"] = history
    asked["tools"].append({"name": "later", "input_schema": SCHEMA, "defer_loading": True})
    whole = server.post(PATHS["messages"], asked)
    prompt = server.front.text.tokenizer.decode(
        prompt_ids(server, whole), skip_special_tokens=False
    )
    places = [prompt.index(text) for text in ('"add"', "go", "in place", "before", '"later"')]
    assert places == sorted(places)
    assert [block["type"] for block in whole.json()["content"]] == ["thinking", "text", "tool_use"]
    as_text = [{"role": "user", "content": "go"}, *history[1:]]
    again = server.post(PATHS["messages"], {**asked, "messages": as_text})
    assert prompt_ids(server, again) == prompt_ids(server, whole)
    form = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    made = ask(server, "messages", **form)
    assert server.engine.played[made.headers["x-request-id"]].params.grammar is not None


def test_chat_as_opencode_reads_and_sends_it(serve: Serve) -> None:
    server = serve(CALL)
    streamed = ask(server, "chat", tools=True, stream=True).text
    chunks = [json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: {")]
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert calls
    assert all(call["index"] == 0 for call in calls)
    assert any("reasoning_content" in chunk["choices"][0]["delta"] for chunk in chunks)

    def history(arguments: str) -> Any:
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
        asked = body("chat", tools=True)
        asked["messages"] += [
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "5"},
        ]
        return prompt_ids(server, server.post(PATHS["chat"], asked))

    assert history('{"a": 1}') == history('{"a":1}') == history(' {"a" : 1} ')
    assert history('{"a": 1}') != history('{"a": 1')  # broken JSON stays what it is


@ALL
def test_usage_is_the_size_of_the_real_prompt(serve: Serve, dialect: str) -> None:
    server = serve({"text": "one two", "cached_tokens": 7})
    answer = ask(server, dialect)
    size, usage = len(prompt_ids(server, answer)), answer.json()["usage"]
    match dialect:
        case "chat":
            assert usage["prompt_tokens"] == size
            assert usage["prompt_tokens_details"]["cached_tokens"] == 7
            assert usage["completion_tokens"] == 2
        case "messages":
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == size
            assert usage["cache_read_input_tokens"] == 7
        case "responses":
            assert usage["input_tokens"] == size
            assert usage["input_tokens_details"]["cached_tokens"] == 7


@ALL
def test_the_output_limit_is_the_rest_of_the_context(serve: Serve, dialect: str) -> None:
    server = serve({"tokens": ["x "], "repeat": True}, script={"max_model_len": 300})
    name = {"chat": "max_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}
    for fields in ({}, {name[dialect]: 32_000}, {name[dialect]: 128_000}):
        answer = ask(server, dialect, **fields)
        given = server.engine.played[answer.headers["x-request-id"]].num_tokens
        assert given == 300 - len(prompt_ids(server, answer))


@ALL
@pytest.mark.parametrize("stream", [False, True])
def test_overflow_is_said_at_once_in_the_clients_words(
    serve: Serve, dialect: str, stream: bool
) -> None:
    server = serve({"text": "x"}, script={"max_model_len": 100})
    answer = ask(server, dialect, "y" * 500, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    if dialect == "messages":
        assert re.fullmatch(r"prompt is too long: \d+ tokens > 100 maximum", error["message"])
    else:
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 100 tokens" in error["message"]
    assert not server.engine.played  # decided without the engine


@ALL
def test_what_is_not_text_is_not_in_the_cache_key(serve: Serve, dialect: str) -> None:
    server = serve({"text": "x"})
    plain = prompt_ids(server, ask(server, dialect))
    noise = {
        "metadata": {"user_id": "u"}, "prompt_cache_key": "k", "safety_identifier": "s",
        "client_metadata": {"x": "y"}, "service_tier": "auto", "user": "u",
    }  # fmt: skip
    assert prompt_ids(server, ask(server, dialect, **noise)) == plain
    if dialect == "messages":
        block = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
        asked = {**body(dialect), "messages": [{"role": "user", "content": [block], "id": "m1"}]}
        assert prompt_ids(server, server.post(PATHS[dialect], asked)) == plain
    if dialect == "responses":
        item = {"type": "message", "id": "msg_1", "role": "user", "status": "completed",
                "content": [{"type": "input_text", "text": "hello"}]}  # fmt: skip
        asked = {**body(dialect), "input": [item]}
        assert prompt_ids(server, server.post(PATHS[dialect], asked)) == plain


@ALL
def test_one_client_may_ask_several_things_at_once(serve: Serve, dialect: str) -> None:
    slow = {"match": "main", "tokens": ["x "] * 30, "delay_s": 0.02}
    server = serve(slow, {"text": "A title"})
    with ThreadPoolExecutor(8) as pool:
        main = pool.submit(ask, server, dialect, "main", stream=True)
        titles = [pool.submit(ask, server, dialect, "title") for _ in range(5)]
        assert all("A title" in title.result().text for title in titles)
        assert not main.done()
        assert main.result().status_code == 200


def test_a_client_that_leaves_after_the_last_event_leaves_nothing(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve({"text": "x"})
    for _ in range(5):
        with (
            httpx2.Client() as client,
            client.stream(
                "POST", server.url + "/v1/responses", json=body("responses", stream=True)
            ) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("event: response.completed"):
                    break
    server.wait_until_idle(10)
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]


@ALL
def test_unknown_things_and_any_key_are_taken(serve: Serve, dialect: str) -> None:
    server = serve({"text": "x"})
    for headers in (
        {},
        {"authorization": "Bearer whatever"},
        {"x-api-key": "whatever"},
        {"anthropic-beta": "a-2025-01-01,b", "anthropic-version": "2031-01-01"},
    ):
        answer = ask(server, dialect, headers=headers, whatever={"x": [1]}, thinking=None)
        assert answer.status_code == 200, answer.text


def turn(dialect: str, asked: Any, answer: Any) -> Any:
    """The next request of an agent: what was answered, and the result of its calls."""
    key = "input" if dialect == "responses" else "messages"
    if dialect == "chat":
        message = answer["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "5"}
            for call in message["tool_calls"]
        ]
        more = [message, *results]
    elif dialect == "messages":
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "5"}
            for block in answer["content"] if block["type"] == "tool_use"
        ]  # fmt: skip
        more = [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": results},
        ]
    else:
        more = [*answer["output"]]
        more += [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "5"}
            for item in answer["output"] if item["type"] == "function_call"
        ]  # fmt: skip
    return {**asked, key: [*asked[key], *more]}


@ALL
def test_turns_are_append_only_after_templating(serve: Serve, dialect: str) -> None:
    """The next turn's token ids begin with this turn's and the answer's: only new ones are left."""
    server = serve(CALL)
    asked, before = body(dialect, tools=True), list[int]()
    for _ in range(4):
        answer = server.post(PATHS[dialect], asked)
        ids = prompt_ids(server, answer)
        assert ids[: len(before)] == before
        text = server.front.text.tokenizer.decode(ids, skip_special_tokens=False)
        assert len(ids) > len(before)
        assert text.endswith("<|im_start|>assistant\n")
        before = ids
        asked = turn(dialect, asked, answer.json())

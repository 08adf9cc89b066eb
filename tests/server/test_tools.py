"""Tool calls on the chat route: C053, C054, C055, C056, C057, C058, C059, C060."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

Serve = Callable[..., Any]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "mul")
]
TWO = [{"name": "add", "arguments": {"a": 1}}, {"name": "mul", "arguments": {}}]


def deltas(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
    return [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]


def test_c053_c059_deltas_of_two_calls(serve: Serve) -> None:
    server = serve({"text": "So.", "tool_calls": TWO})
    calls = [
        call
        for delta in deltas(server.chat(tools=TOOLS, stream=True).text)
        for call in delta.get("tool_calls", [])
    ]
    for index, name in enumerate(("add", "mul")):
        first, *rest = [call for call in calls if call["index"] == index]
        assert set(first) == {"index", "id", "type", "function"}
        assert first["id"].startswith("call_")
        assert (first["type"], first["function"]["name"]) == ("function", name)
        assert rest
        assert all(set(call) == {"index", "function"} for call in rest)
        arguments = "".join(call["function"]["arguments"] for call in [first, *rest])
        assert json.loads(arguments) == TWO[index]["arguments"]


def block(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


THREE = [block("add", a=1), block("add", a=2), block("mul", text="a <b> {c}")]


@pytest.mark.parametrize("between", ["", "\n", " and then "])
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("number", [2, 3])
def test_c055_every_block_is_a_call_of_its_own(
    serve: Serve, between: str, size: int, number: int
) -> None:
    text = "First: " + between.join(THREE[:number])
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    server = serve({"tokens": pieces})
    message = server.chat(tools=TOOLS).json()["choices"][0]["message"]
    made: dict[int, list[str]] = {}
    content = ""
    for delta in deltas(server.chat(tools=TOOLS, stream=True).text):
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            one = made.setdefault(call["index"], ["", ""])
            one[0] += call["function"].get("name", "")
            one[1] += call["function"]["arguments"]
    wanted = [("add", {"a": 1}), ("add", {"a": 2}), ("mul", {"text": "a <b> {c}"})][:number]
    calls = [call["function"] for call in message["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == wanted
    assert sorted(made) == list(range(number))
    assert [(made[n][0], json.loads(made[n][1])) for n in sorted(made)] == wanted
    assert len({call["id"] for call in message["tool_calls"]}) == number
    for shown in (message["content"], content):
        assert shown.startswith("First:")
        assert shown.count("and then") == (number - 1 if between.strip() else 0)
        assert "tool_call" not in shown


@pytest.mark.parametrize("stream", [False, True])
def test_c054_finish_reasons(serve: Serve, stream: bool) -> None:
    called = serve({"tool_calls": TWO})
    assert '"finish_reason":"tool_calls"' in called.chat(tools=TOOLS, stream=stream).text
    not_called = serve({"text": "no need"})
    assert '"finish_reason":"stop"' in not_called.chat(tools=TOOLS, stream=stream).text
    no_tools = called.chat(stream=stream).text
    assert '"finish_reason":"stop"' in no_tools
    assert '"tool_calls"' not in no_tools


def test_parameters_that_are_no_schema_are_refused(serve: Serve) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": [1]}}
    for choice in ("auto", "required"):
        answer = serve({"text": "x"}).chat(tools=[tool], tool_choice=choice)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools[0].function.parameters"


def test_arguments_are_streamed_as_they_are_written(serve: Serve) -> None:
    long = {"text": " ".join(f"word{n}" for n in range(40))}
    server = serve({"tool_calls": [{"name": "add", "arguments": long}]})
    found = deltas(server.chat(tools=TOOLS, stream=True).text)
    pieces = [
        call["function"]["arguments"]
        for delta in found
        for call in delta.get("tool_calls", [])
        if "name" not in call["function"]
    ]
    assert len(pieces) >= 30
    assert json.loads("".join(pieces)) == long


def test_c056_a_streamed_call_that_is_cut_is_a_beginning(serve: Serve) -> None:
    server = serve({"tool_calls": [{"name": "add", "arguments": {"text": "a b c d"}}]})
    answer = server.chat(tools=TOOLS, stream=True, max_tokens=7)
    assert '"finish_reason":"length"' in answer.text
    calls = [c for delta in deltas(answer.text) for c in delta.get("tool_calls", [])]
    written = "".join(call["function"]["arguments"] for call in calls)
    assert '{"text": "a b c d"}'.startswith(written)
    assert written


@pytest.mark.parametrize("stream", [False, True])
def test_c056_a_call_cut_by_the_limit_is_text(serve: Serve, stream: bool) -> None:
    server = serve({"tool_calls": TWO})
    answer = server.chat(tools=TOOLS, stream=stream, max_tokens=3)
    assert answer.status_code == 200
    assert '"finish_reason":"length"' in answer.text
    assert "<tool_call>" in answer.text


@pytest.mark.parametrize(("parallel", "number"), [(None, 2), (True, 2), (False, 1)])
def test_c057_parallel_calls(serve: Serve, parallel: bool | None, number: int) -> None:
    server = serve({"tool_calls": TWO, "repeat": True} if number == 1 else {"tool_calls": TWO})
    for stream in (False, True):
        answer = server.chat(tools=TOOLS, parallel_tool_calls=parallel, stream=stream)
        assert answer.text.count('"type":"function"') == number
        assert '"finish_reason":"tool_calls"' in answer.text


def test_c058_tool_choice(serve: Serve) -> None:
    forced = '<tool_call>\n{"name": "add", "arguments": '
    any_call, end = '<tool_call>\n{"name": "', "</tool_call>"
    server = serve(
        {"match": forced.replace("{", r"\{") + "$", "tokens": ['{"a": ', "7}}\n</tool_call>"]},
        {"match": any_call.replace("{", r"\{") + "$", "tokens": ['mul", "arguments": {}}', end]},
        {"match": "<tools>", "tool_calls": TWO},
        {"text": "plain"},
    )  # fmt: skip

    def call(choice: Any, tools: Any = TOOLS) -> dict[str, Any]:
        answer = server.chat(tools=tools, tool_choice=choice)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    assert call("none")["message"]["content"] == "plain"
    named = call({"type": "function", "function": {"name": "add"}})
    assert named["finish_reason"] == "tool_calls"
    (made,) = named["message"]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"a": 7}'}
    (made,) = call("required")["message"]["tool_calls"]
    assert made["function"] == {"name": "mul", "arguments": "{}"}
    for tools in ([], None):
        assert call("auto", tools)["message"]["content"] == "plain"
    for choice in ("maybe", {"type": "function", "function": {"name": "sub"}}, {}):
        answer = server.chat(tools=TOOLS, tool_choice=choice)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tool_choice"
    assert server.chat(tool_choice="required").status_code == 400


def test_c058_only_the_allowed_tools_are_there(serve: Serve) -> None:
    server = serve({"match": "<tools>", "tool_calls": TWO[1:]}, {"text": "plain"})
    allowed = [{"type": "function", "function": {"name": "mul"}}]

    def ask(mode: str, tools: Any) -> Any:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        return server.chat(tools=TOOLS, tool_choice=choice)

    answer = ask("auto", allowed)
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "mul"
    prompt = server.front.text.tokenizer.decode(server.prompts[answer.headers["x-request-id"]])
    assert '"mul"' in prompt
    assert '"add"' not in prompt
    assert ask("auto", []).json()["choices"][0]["message"]["content"] == "plain"
    assert ask("required", []).json()["error"]["param"] == "tool_choice"
    assert ask("maybe", allowed).json()["error"]["param"] == "tool_choice"
    flat = [{"type": "function", "name": tool["function"]["name"]} for tool in TOOLS]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": flat[1:]}
    body = {"input": "x", "tools": flat, "tool_choice": choice}
    made = server.post("/v1/responses", body)
    assert made.json()["tool_choice"] == choice
    prompt = server.front.text.tokenizer.decode(server.prompts[made.headers["x-request-id"]])
    assert '"add"' not in prompt


def test_a_tool_without_a_name_is_refused(serve: Serve) -> None:
    server = serve({"text": "x"})
    for tool in ({}, {"type": "function"}, {"function": {}}, {"function": {"name": [3]}}):
        answer = server.chat(tools=[TOOLS[0], tool])
        assert answer.json()["error"]["param"] == "tools[1]"


def test_c060_malformed_calls_are_text(serve: Serve) -> None:
    server = serve({"text": "<tool_call>{oops</tool_call>"})
    choice = server.chat(tools=TOOLS).json()["choices"][0]
    assert choice["message"]["content"] == "<tool_call>{oops</tool_call>"
    assert choice["finish_reason"] == "stop"


def test_a_round_trip_with_the_released_client(serve: Serve) -> None:
    server = serve(
        {"turn": 0, "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]},
        {"turn": 1, "match": "<tool_response>\n5\n</tool_response>", "text": "It is 5."},
    )
    messages: list[Any] = [{"role": "user", "content": "2+3?"}]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x") as api:
        tools: Any = TOOLS
        first = api.chat.completions.create(model="m", messages=messages, tools=tools)
        call = (first.choices[0].message.tool_calls or [])[0]
        messages += [
            first.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "5"},
        ]
        second = api.chat.completions.create(model="m", messages=messages, tools=tools)
    assert second.choices[0].message.content == "It is 5."

"""Clients in versions that cannot stand beside those of this environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.npm import python_folder
from tests.server.script import EMBEDDING_SCRIPT, REPLIES, assert_all_was_done

Serve = Callable[..., Any]

COMMON = """
import json, sys
url, embedding_url = sys.argv[1:]
schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
          "additionalProperties": False}
def say(text):
    return [{"role": "user", "content": text}]
"""
ANTHROPIC = (
    COMMON
    + """
import anthropic
assert int(anthropic.__version__.split(".")[0]) == 0
client = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
tools = [{"name": "add", "input_schema": {"type": "object"}}]
def ask(text, **fields):
    return dict(model="m", max_tokens=99, messages=say(text), **fields)
assert client.messages.create(**ask("hello")).content[0].text == "Hello there."
with client.messages.stream(**ask("hello")) as stream:
    assert "".join(stream.text_stream) == "Hello there."
with client.messages.stream(**ask("call", tools=tools)) as stream:
    message = stream.get_final_message()
assert [block.type for block in message.content] == ["thinking", "text", "tool_use"], message
assert message.content[0].thinking == "hm"
assert message.content[2].input == {"a": 1}
result = {"type": "tool_result", "tool_use_id": message.content[2].id, "content": "5"}
turns = [*say("call"), {"role": "assistant", "content": message.content},
         {"role": "user", "content": [result]}]
second = client.messages.create(**{**ask("", tools=tools), "messages": turns})
assert second.content[0].text == "It is 5."
form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
answer = client.messages.create(**ask("form"), extra_body=form)
assert json.loads(answer.content[0].text) == {"a": 7}
for text, kind, more in (("x", anthropic.BadRequestError, {"temperature": -1}),
                         ("busy", anthropic.RateLimitError, {})):
    try:
        client.messages.create(**ask(text, **more))
    except kind:
        continue
    raise AssertionError(text)
endless = client.messages.create(**ask("endless", stream=True))
next(iter(endless))
endless.close()
print("ok")
"""
)
LITELLM = (
    COMMON
    + """
import litellm
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
for model, base in (("openai/m", url + "/v1"), ("anthropic/m", url), ("ollama_chat/m", url)):
    def ask(messages, **fields):
        return litellm.completion(model=model, api_base=base, api_key="x", messages=messages,
                                  num_retries=0, max_retries=0, **fields)
    assert ask(say("hello")).choices[0].message.content == "Hello there.", model
    parts = [p.choices[0].delta.content or "" for p in ask(say("hello"), stream=True)]
    assert "".join(parts) == "Hello there.", (model, parts)
    first = ask(say("call"), tools=tools).choices[0].message
    (call,) = first.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1}, model
    result = {"role": "tool", "tool_call_id": call.id, "name": "add", "content": "5"}
    second = ask([*say("call"), first.model_dump(), result], tools=tools)
    assert second.choices[0].message.content == "It is 5.", (model, second)
    thought = ask(say("think")).choices[0].message
    assert thought.content == "I thought." and thought.reasoning_content == "hm", (model, thought)
    if model != "anthropic/m":  # litellm turns a schema into a tool there
        answer = ask(say("form"), response_format=form)
        assert json.loads(answer.choices[0].message.content) == {"a": 7}, model
    try:
        ask(say("busy"))
    except litellm.RateLimitError:
        pass
    else:
        raise AssertionError(model)
    endless = ask(say("endless"), stream=True)
    next(iter(endless))
    del endless  # and with it the connection
for model, base in (("openai/m", embedding_url + "/v1"), ("ollama/m", embedding_url)):
    made = litellm.embedding(model=model, api_base=base, api_key="x", input=["one", "two"])
    assert [len(item["embedding"]) for item in made.data] == [8, 8], model
try:
    litellm.completion(model="openai/m", api_base=url + "/v1", api_key="x",
                       messages=say("x" * 5000), max_retries=0)
except litellm.ContextWindowExceededError:
    print("ok")
"""
)


def run_with(packages: str, program: str, serve: Serve, **script: Any) -> None:
    """Run a program that sees these packages before all others."""
    folder = python_folder(packages)
    server, embedding = serve(*REPLIES, script=script), serve(script=EMBEDDING_SCRIPT)
    done = subprocess.run(
        [sys.executable, "-c", program, server.url, embedding.url],
        capture_output=True, text=True, timeout=180, check=False,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin",
             "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("ok")
    assert_all_was_done(server)


@pytest.mark.slow
def test_anthropic_below_one(serve: Serve) -> None:
    run_with("anthropic<1", ANTHROPIC, serve)


@pytest.mark.slow
def test_litellm(serve: Serve) -> None:
    run_with("litellm", LITELLM, serve, max_model_len=4000)

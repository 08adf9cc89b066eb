"""Released Python clients of this environment: each thing that a client has to be able to do.

One test per client and ability, so that a hole in the table shows as a missing row. Clients whose
API has no such thing (embeddings in Anthropic's) have no row.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.server.script import EMBEDDING_SCRIPT, REPLIES

Serve = Callable[..., Any]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOL: Any = {"name": "add", "input_schema": {"type": "object"}}


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def server(serve: Serve) -> Any:
    return serve(*REPLIES)


def aborted(server: Any) -> bool:
    server.wait_until_idle(10)
    return any(p.finish_reason == "abort" for p in server.engine.played.values())


def has_grammar(server: Any) -> bool:
    return any(p.params.grammar is not None for p in server.engine.played.values())


class TestOpenAI:
    @pytest.fixture
    def api(self, server: Any) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as made:
            yield made

    def test_chat(self, api: openai.OpenAI) -> None:
        answer = api.chat.completions.create(model="m", messages=say("hello"))
        assert answer.choices[0].message.content == "Hello there."
        assert api.responses.create(model="m", input="hello").output_text == "Hello there."

    def test_streaming(self, api: openai.OpenAI) -> None:
        chunks = api.chat.completions.create(model="m", messages=say("hello"), stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(pieces) == "Hello there."
        assert sum(map(bool, pieces)) > 1

    def test_tools(self, api: openai.OpenAI) -> None:
        asked = say("call")
        first = api.chat.completions.create(model="m", messages=asked, tools=[FUNCTION])
        (call,) = first.choices[0].message.tool_calls or []
        result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        history: Any = [*asked, first.choices[0].message, result]
        second = api.chat.completions.create(model="m", messages=history, tools=[FUNCTION])
        assert second.choices[0].message.content == "It is 5."

    def test_schema(self, api: openai.OpenAI, server: Any) -> None:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        answer = api.chat.completions.create(
            model="m", messages=say("form"), response_format=wanted
        )
        assert json.loads(answer.choices[0].message.content or "") == {"a": 7}
        assert has_grammar(server)

    def test_reasoning(self, api: openai.OpenAI) -> None:
        answer = api.chat.completions.create(model="m", messages=say("think"))
        assert answer.choices[0].message.reasoning_content == "hm"  # type: ignore[attr-defined]
        items = api.responses.create(model="m", input="think").output
        assert [item.type for item in items] == ["reasoning", "message"]

    def test_embeddings(self, serve: Serve) -> None:
        url = serve(script=EMBEDDING_SCRIPT).url
        with openai.OpenAI(base_url=url + "/v1", api_key="x") as api:
            made = api.embeddings.create(model="m", input=["a", "b"])
        assert [len(item.embedding) for item in made.data] == [8, 8]

    def test_errors(self, api: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as bad:
            api.chat.completions.create(model="m", messages=say("x"), temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.RateLimitError):
            api.chat.completions.create(model="m", messages=say("busy"))

    def test_cancellation(self, api: openai.OpenAI, server: Any) -> None:
        stream = api.chat.completions.create(model="m", messages=say("endless"), stream=True)
        next(iter(stream))
        stream.close()
        assert aborted(server)


class TestAnthropic:
    @pytest.fixture
    def api(self, server: Any) -> Iterator[anthropic.Anthropic]:
        with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as made:
            yield made

    def ask(self, api: anthropic.Anthropic, text: str, **fields: Any) -> Any:
        return api.messages.create(model="m", max_tokens=99, messages=say(text), **fields)

    def test_chat(self, api: anthropic.Anthropic) -> None:
        assert self.ask(api, "hello").content[0].text == "Hello there."

    def test_streaming(self, api: anthropic.Anthropic) -> None:
        asked: Any = {"model": "m", "max_tokens": 99, "messages": say("hello")}
        with api.messages.stream(**asked) as stream:
            pieces = list(stream.text_stream)
        assert "".join(pieces) == "Hello there."
        assert len(pieces) > 1

    def test_tools(self, api: anthropic.Anthropic) -> None:
        first = self.ask(api, "call", tools=[TOOL])
        assert first.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "5"}
        history: Any = [
            *say("call"),
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        second = api.messages.create(model="m", max_tokens=99, messages=history, tools=[TOOL])
        assert second.content[0].text == "It is 5."  # type: ignore[union-attr]

    def test_schema(self, api: anthropic.Anthropic, server: Any) -> None:
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        answer = self.ask(api, "form", output_config=form)
        assert json.loads(answer.content[0].text) == {"a": 7}
        assert has_grammar(server)

    def test_reasoning(self, api: anthropic.Anthropic) -> None:
        answer = self.ask(api, "think", thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert answer.content[0].thinking == "hm"

    def test_errors(self, api: anthropic.Anthropic) -> None:
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            self.ask(api, "x", extra_body={"temperature": -1})
        with pytest.raises(anthropic.RateLimitError):
            self.ask(api, "busy")

    def test_cancellation(self, api: anthropic.Anthropic, server: Any) -> None:
        stream = self.ask(api, "endless", stream=True)
        next(iter(stream))
        stream.close()
        assert aborted(server)


class TestOllama:
    @pytest.fixture
    def api(self, server: Any) -> Iterator[ollama.Client]:
        client = ollama.Client(host=server.url)
        yield client
        client.close()

    def test_chat(self, api: ollama.Client) -> None:
        assert api.chat(model="m", messages=say("hello")).message.content == "Hello there."
        assert api.generate(model="m", prompt="hello").response == "Hello there."

    def test_streaming(self, api: ollama.Client) -> None:
        parts = api.chat(model="m", messages=say("hello"), stream=True)
        pieces = [part.message.content or "" for part in parts]
        assert "".join(pieces) == "Hello there."
        assert sum(map(bool, pieces)) > 1

    def test_tools(self, api: ollama.Client) -> None:
        first = api.chat(model="m", messages=say("call"), tools=[FUNCTION])
        (call,) = first.message.tool_calls or []
        assert (call.function.name, call.function.arguments) == ("add", {"a": 1})
        result = {"role": "tool", "tool_name": "add", "content": "5"}
        second = api.chat(
            model="m", messages=[*say("call"), first.message, result], tools=[FUNCTION]
        )
        assert second.message.content == "It is 5."

    def test_schema(self, api: ollama.Client, server: Any) -> None:
        answer = api.chat(model="m", messages=say("form"), format=SCHEMA)
        assert json.loads(answer.message.content or "") == {"a": 7}
        assert has_grammar(server)

    def test_reasoning(self, api: ollama.Client) -> None:
        assert api.chat(model="m", messages=say("think"), think=True).message.thinking == "hm"

    def test_embeddings(self, serve: Serve) -> None:
        client = ollama.Client(host=serve(script=EMBEDDING_SCRIPT).url)
        assert len(client.embed(model="m", input="a").embeddings[0]) == 8
        client.close()

    def test_errors(self, api: ollama.Client) -> None:
        with pytest.raises(ollama.ResponseError, match="temperature") as bad:
            api.chat(model="m", messages=say("x"), options={"temperature": -1})
        assert bad.value.status_code == 400
        with pytest.raises(ollama.ResponseError) as busy:
            api.chat(model="m", messages=say("busy"))
        assert busy.value.status_code == 429

    def test_cancellation(self, server: Any) -> None:
        async def leave() -> None:
            client = ollama.AsyncClient(host=server.url)
            parts = await client.chat(model="m", messages=say("endless"), stream=True)
            await anext(parts)
            await parts.aclose()
            await client.close()

        asyncio.run(leave())
        assert aborted(server)


LLM = Path(sys.executable).with_name("llm")


@pytest.mark.skipif(not LLM.exists(), reason="llm is not installed")
class TestLlm:
    @pytest.fixture
    def start(self, server: Any, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
        (tmp_path / "extra-openai-models.yaml").write_text(
            f"- model_id: mlx\n  model_name: m\n  api_base: {server.url}/v1\n"
            "  supports_tools: true\n  supports_schema: true\n"
        )

        def run(*arguments: str) -> subprocess.Popen[str]:
            return subprocess.Popen(
                [str(LLM), "-m", "mlx", "--key", "x", *arguments],
                env={**os.environ, "LLM_USER_PATH": str(tmp_path)},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                # A shell's background job ignores interrupts, and hands that on to all it starts.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip

        return run

    def said(self, running: subprocess.Popen[str]) -> str:
        out, error = running.communicate(timeout=60)
        assert running.returncode == 0, error
        return out.strip()

    def test_chat_and_streaming(self, start: Any, server: Any) -> None:
        assert self.said(start("hello")) == "Hello there."
        assert self.said(start("hello", "--no-stream")) == "Hello there."

    def test_tools(self, start: Any) -> None:
        code = "def add(a: int) -> str:\n    'adds four'\n    return str(a + 4)"
        assert self.said(start("call", "--functions", code)).endswith("It is 5.")

    def test_schema(self, start: Any, server: Any) -> None:
        assert json.loads(self.said(start("form", "--schema", json.dumps(SCHEMA)))) == {"a": 7}
        assert has_grammar(server)

    def test_reasoning(self, start: Any) -> None:
        assert self.said(start("think")).endswith("I thought.")

    def test_errors(self, start: Any) -> None:
        running = start("x", "-o", "temperature", "-0.5")
        _, error = running.communicate(timeout=60)
        assert running.returncode != 0
        assert "temperature" in error

    def test_cancellation(self, start: Any, server: Any) -> None:
        running = start("endless")
        assert running.stdout.read(1)  # it streams, so it is past all that may swallow an interrupt
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=60)
        assert aborted(server)

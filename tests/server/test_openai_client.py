"""The released `openai` client against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

Serve = Callable[..., Any]
HELLO = [{"role": "user", "content": "hello"}]


def client(server: Any, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="x", **options)


def test_chat_streamed_and_whole(serve: Serve) -> None:
    server = serve({"text": "Hello, you two."})
    with client(server) as api:
        whole = api.chat.completions.create(model="any", messages=HELLO, temperature=0)
        assert whole.choices[0].message.content == "Hello, you two."
        assert whole.usage is not None
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + 3
        assert whole._request_id in server.engine.played
        chunks = list(
            api.chat.completions.create(
                model="any", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
        )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello, you two."
    assert chunks[-1].usage == whole.usage


def test_the_accumulating_stream_of_the_client(serve: Serve) -> None:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]
    server = serve({"reasoning": "hm", "text": "Adding.", "tool_calls": calls})
    with (
        client(server) as api,
        api.chat.completions.stream(model="m", messages=HELLO, tools=tools) as stream,
    ):
        stream.until_done()
        message = stream.get_final_completion().choices[0]
    assert message.finish_reason == "tool_calls"
    assert message.message.content == "Adding."
    made = message.message.tool_calls or []
    assert [(c.function.name, c.function.arguments) for c in made] == [
        ("add", '{"a": 1}'), ("add", '{"a": 2}')
    ]  # fmt: skip
    assert made[0].id != made[1].id


def test_completions_and_models(serve: Serve) -> None:
    server = serve({"text": "two three"}, script={"model": "org/name"})
    with client(server) as api:
        answer = api.completions.create(model="m", prompt="one ", echo=True)
        assert answer.choices[0].text == "one two three"
        texts = [
            c.choices[0].text for c in api.completions.create(model="m", prompt="1", stream=True)
        ]
        assert "".join(texts) == "two three"
        assert [model.id for model in api.models.list()] == ["org/name"]
        assert api.models.retrieve("org/name").id == "org/name"
        with pytest.raises(openai.NotFoundError) as caught:
            api.models.retrieve("other/name")
    assert caught.value.code == "model_not_found"


def test_errors_are_the_clients_own_classes(serve: Serve) -> None:
    server = serve(
        {"match": "busy", "refuse": 429},
        {"match": "down", "refuse": 503},
        {"match": "breaks", "tokens": ["a"], "finish": "error"},
        script={"max_model_len": 100},
    )

    def ask(text: str, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": text}]
        return api.chat.completions.create(model="m", messages=messages, **fields)

    with client(server, max_retries=0) as api:
        with pytest.raises(openai.RateLimitError):
            ask("busy")
        with pytest.raises(openai.InternalServerError) as down:
            ask("down")
        assert down.value.status_code == 503
        with pytest.raises(openai.BadRequestError) as long:
            ask("x" * 200)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as bad:
            ask("x", temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.APIError, match="ends in an error"):
            list(ask("breaks", stream=True))


def test_a_retry_after_a_busy_answer_succeeds(serve: Serve) -> None:
    server = serve({"refuse": 429, "times": 1, "retry_after": 0.1}, {"text": "now"})
    with client(server, max_retries=2) as api:
        answer = api.chat.completions.create(model="m", messages=HELLO)
    assert answer.choices[0].message.content == "now"


def test_closing_a_stream_early_frees_the_engine(serve: Serve) -> None:
    server = serve({"tokens": ["x"], "repeat": True, "delay_s": 0.01})
    with client(server) as api:
        stream = api.chat.completions.create(model="m", messages=HELLO, stream=True)
        next(iter(stream))
        stream.close()
    server.wait_until_idle()


def test_many_streams_at_once_each_get_their_own_text(serve: Serve) -> None:
    replies = [
        {"match": f"ask {n}!", "tokens": [f"{n}-{k} " for k in range(40)], "delay_s": 0.002}
        for n in range(24)
    ]
    server = serve(*replies)

    async def one(api: openai.AsyncOpenAI, n: int) -> str:
        messages: Any = [{"role": "user", "content": f"ask {n}!"}]
        stream = await api.chat.completions.create(model="m", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as api:
            return list(await asyncio.gather(*(one(api, n) for n in range(24))))

    assert asyncio.run(all_of_them()) == [
        "".join(f"{n}-{k} " for k in range(40)) for n in range(24)
    ]

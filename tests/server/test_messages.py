"""Message shapes on the chat route: cases C022 to C030, C061, C080."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Serve = Callable[..., Any]
OK = {"text": "fine"}


def prompt_tokens(server: Any, *messages: Any, **fields: Any) -> int:
    """Rendered size of a chat; the scripted tokenizer has one token per byte."""
    answer = server.post("/v1/chat/completions", {"messages": list(messages), **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens"]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_c022_every_role_takes_parts(serve: Serve, role: str) -> None:
    server = serve(OK)
    user = {"role": "user", "content": "hi"}
    plain = prompt_tokens(server, {"role": role, "content": "ab"}, user)
    assert prompt_tokens(server, {"role": role, "content": parts("a", "b")}, user) == plain
    refusal = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert prompt_tokens(server, {"role": role, "content": refusal}, user) == plain
    empty = prompt_tokens(server, {"role": role, "content": ""}, user)
    assert prompt_tokens(server, {"role": role, "content": []}, user) == empty


def test_c022_an_image_for_a_text_model_is_refused_by_name(serve: Serve) -> None:
    server = serve(OK)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer = server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [*parts("look"), image]}]},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[1]"
    assert "image_url" in answer.json()["error"]["message"]


def test_c023_all_parts_reach_the_model(serve: Serve) -> None:
    server = serve({"match": "user\nABC<", "text": "all three"}, {"text": "not all"})
    answer = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": parts("A", "B", "C")}]}
    )
    assert answer.json()["choices"][0]["message"]["content"] == "all three"


@pytest.mark.parametrize("stream", [False, True])
def test_c024_an_assistant_message_that_only_calls(serve: Serve, stream: bool) -> None:
    server = serve(OK)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}}
    sizes = []
    for content in ({"content": None}, {}, {"content": ""}):
        messages = [
            {"role": "user", "content": "2+3?"},
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "c1", "content": "5"},
        ]
        body = {"messages": messages, "stream": stream}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200
        sizes.append(server.engine.played[answer.headers["x-request-id"]].num_prompt_tokens)
    assert len(set(sizes)) == 1


def test_c025_developer_is_system_and_strangers_are_refused(serve: Serve) -> None:
    server = serve(OK)
    user = {"role": "user", "content": "hi"}
    system = prompt_tokens(server, {"role": "system", "content": "be"}, user)
    assert prompt_tokens(server, {"role": "developer", "content": "be"}, user) == system
    both = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, user]
    assert prompt_tokens(server, *both) > system
    assert prompt_tokens(server, user, {"role": "developer", "content": "be"}, user) > system
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "banana", "content": ""}]})
    assert answer.status_code == 400
    assert "banana" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "messages", [[], None, ..., {}, "hi", [None], [{}], [{"role": "user"}], [3], [[]]]
)
def test_c026_messages_that_are_none(serve: Serve, messages: Any) -> None:
    server = serve(OK)
    body = {} if messages is ... else {"messages": messages}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages")
    assert server.chat("").status_code == 200
    assert server.chat("still there").status_code == 200


@pytest.mark.parametrize("arguments", ["null", "", "{}", "[1]", "{bad", {"a": 1}, None, "3", " "])
def test_c027_arguments_of_any_kind_can_be_replayed(serve: Serve, arguments: Any) -> None:
    iterating = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% if c.function.arguments is mapping %}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
        "{% else %}{{ c.function.arguments }}{% endif %}"
        "{% endfor %}{{ m.content }}{% endfor %}{{ tools }}"
    )
    server = serve(OK, script={"chat_template": iterating})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    assert server.post("/v1/chat/completions", {"messages": messages}).status_code == 200


def test_reasoning_of_earlier_turns_reaches_the_template(serve: Serve) -> None:
    server = serve({"match": "<think>\nbecause", "text": "seen"}, {"text": "lost"})
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "because"},
        {"role": "user", "content": "c"},
    ]
    answer = server.post("/v1/chat/completions", {"messages": messages})
    assert answer.json()["choices"][0]["message"]["content"] == "seen"


@pytest.mark.parametrize("start", ["The capital is", "The capital is ", ""])
def test_c030_a_trailing_assistant_message_is_continued(serve: Serve, start: str) -> None:
    server = serve({"match": f"assistant\n{start}$", "tokens": [" Paris", "."]}, {"text": "no"})
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": start}]
    answer = server.post("/v1/chat/completions", {"messages": messages})
    assert answer.json()["choices"][0]["message"]["content"] == " Paris."


def test_c028_a_template_error_is_a_short_400(serve: Serve) -> None:
    template = "{{ raise_exception('Only odd days are supported.\\n  Sorry.') }}"
    server = serve(OK, script={"chat_template": template})
    answer = server.chat()
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "Only odd days are supported." in error["message"]
    assert len(answer.content) < 1000


def test_c080_what_was_sent_is_taken_back_as_it_was_sent(serve: Serve) -> None:
    """A replayed answer with all its keys, and those that other servers put into theirs."""
    server = serve({"turn": 0, "reasoning": "hm", "text": "b"})
    first = server.chat("a").json()["choices"][0]["message"]
    more = {"annotations": [], "refusal": None, "audio": None, "function_call": None, "extra": {}}
    user = {"role": "user", "content": "a"}
    short = [user, {"role": "assistant", "content": "b", "reasoning_content": "hm"}, user]
    size = prompt_tokens(server, *short)
    assert prompt_tokens(server, user, {**first, **more}, user) == size
    assert prompt_tokens(server, user, {**first, "tool_calls": None}, user) == size
    fields = {"reasoning_effort": "none", "temprature": 3, "store": True, "service_tier": "x"}
    assert prompt_tokens(server, *short, **fields) == size


OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n%s{% endif %}"
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("opened", "tokens"),
    [("<think>\n", ["plan", "</think>", "\nanswer"]),
     ("", ["<think>", "\nplan", "</think>", "\n\nanswer"])],
    ids=["opened by the template", "opened by the model"],
)  # fmt: skip
def test_c061_no_mark_of_reasoning_is_seen_or_doubled(
    serve: Serve, opened: str, tokens: list[str], stream: bool
) -> None:
    server = serve({"tokens": tokens}, script={"chat_template": OPENED.replace("%s", opened)})
    answer = server.chat("a", stream=stream)
    if stream:
        lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
        found = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
        message = {
            key: "".join(delta.get(key) or "" for delta in found)
            for key in ("content", "reasoning_content")
        }
    else:
        message = answer.json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("answer", "plan")
    user = {"role": "user", "content": "a"}
    again = server.post(
        "/v1/chat/completions", {"messages": [user, {"role": "assistant", **message}, user]}
    )
    ids = server.prompts[again.headers["x-request-id"]]
    prompt = server.front.text.tokenizer.decode(ids, skip_special_tokens=False)
    assert prompt.count("<think>") == 1 + bool(opened)
    assert prompt.count("</think>") == 1

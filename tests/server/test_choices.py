"""n, log-probabilities, echo and token-id prompts: C043, C044, C122."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Serve = Callable[..., Any]
EMOJI = {
    "tokens": [
        {"text": "Hi ", "logprob": -0.5, "top": [["Hi ", -0.5], ["Yo ", -1.5], ["Oh ", -2.5]]},
        {"hex": "F09F"},
        {"hex": "918D"},
        "!",
    ]
}


def chunks(text: str) -> list[dict[str, Any]]:
    """The JSON of every event but [DONE]."""
    lines = [line for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


@pytest.mark.parametrize("stream", [False, True])
def test_c043_n_choices(serve: Serve, stream: bool) -> None:
    server = serve({"tokens": ["a", "b"]})
    answer = server.chat(n=3, stream=stream, stream_options={"include_usage": True})
    if stream:
        made = chunks(answer.text)
        texts, ends = dict.fromkeys(range(3), ""), []
        for chunk in made[:-1]:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
                ends += [choice["index"]] if choice["finish_reason"] else []
        assert sorted(ends) == [0, 1, 2]
        assert texts == {0: "ab", 1: "ab", 2: "ab"}
        usage = made[-1]["usage"]
        assert made[-1]["choices"] == []
    else:
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        assert [choice["message"]["content"] for choice in choices] == ["ab"] * 3
        assert {choice["finish_reason"] for choice in choices} == {"stop"}
        usage = answer.json()["usage"]
    single = server.chat().json()["usage"]
    assert usage["completion_tokens"] == 3 * single["completion_tokens"] == 6
    assert usage["prompt_tokens"] == single["prompt_tokens"]


@pytest.mark.parametrize("n", [0, -1, 129, "2", 1.5])
def test_c043_n_out_of_range(serve: Serve, n: Any) -> None:
    answer = serve({"text": "a"}).chat(n=n)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [None, 0, 2, 3])
def test_c044_one_entry_per_token(serve: Serve, stream: bool, top: int | None) -> None:
    answer = serve(EMOJI).chat(logprobs=True, top_logprobs=top, stream=stream)
    if stream:
        choices = [c for chunk in chunks(answer.text) for c in chunk["choices"]]
        entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
        text = "".join(c["delta"].get("content", "") for c in choices)
    else:
        choice = answer.json()["choices"][0]
        entries, text = choice["logprobs"]["content"], choice["message"]["content"]
    assert text == "Hi 👍!"
    assert len(entries) == 4
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == text
    for entry in entries:
        assert entry["logprob"] <= 0
        others = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(others) == (top or 0)
        assert others == sorted(others, reverse=True)
    if top:
        assert entries[0]["top_logprobs"][1] == {
            "token": "Yo ", "logprob": -1.5, "bytes": list(b"Yo ")
        }  # fmt: skip


def test_c044_null_when_not_asked(serve: Serve) -> None:
    server = serve(EMOJI)
    assert server.chat().json()["choices"][0]["logprobs"] is None
    assert server.chat(logprobs=False).json()["choices"][0]["logprobs"] is None
    refused = server.chat(top_logprobs=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")
    assert server.chat(logprobs=True, top_logprobs=21).status_code == 400


def test_logprobs_stop_where_the_text_stops(serve: Serve) -> None:
    server = serve({"tokens": ["a", {"hex": "F09F"}, {"hex": "918D"}, "b"]})
    choice = server.chat(logprobs=True, stop=["👍"]).json()["choices"][0]
    assert choice["message"]["content"] == "a"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_the_prompt(serve: Serve, stream: bool) -> None:
    server = serve({"tokens": ["!"]})
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    answer = server.post("/v1/completions", {**body, "seed": 1234})
    made = chunks(answer.text) if stream else [answer.json()]
    choices = [choice for chunk in made for choice in chunk["choices"]]
    logprobs: dict[str, list[Any]] = {}
    for choice in choices:
        for key, values in choice["logprobs"].items():
            logprobs.setdefault(key, []).extend(values)
    assert "".join(choice["text"] for choice in choices) == "abc!"
    assert logprobs["tokens"] == ["a", "b", "c", "!"]
    assert logprobs["token_logprobs"] == [None, 0.0, 0.0, 0.0]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"][0] is None
    assert set(logprobs["top_logprobs"][1]) == {"b"}


def test_echo_without_generating(serve: Serve) -> None:
    server = serve({"tokens": ["!"]})
    answer = server.post("/v1/completions", {"prompt": "abc", "echo": True, "max_tokens": 0})
    choice = answer.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert answer.json()["usage"]["completion_tokens"] == 0


def test_token_id_prompts(serve: Serve) -> None:
    server = serve({"match": "^hi$", "text": "yes"}, {"text": "no"})
    ids = list(b"hi")
    for prompt, texts in (
        (ids, ["yes"]), ([ids, ids], ["yes", "yes"]), ("hi", ["yes"]), (["hi", "ho"], ["yes", "no"])
    ):  # fmt: skip
        answer = server.post("/v1/completions", {"prompt": prompt})
        assert [choice["text"] for choice in answer.json()["choices"]] == texts
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(len(texts)))
    for prompt in ([], [[]], "", [1, "a"], [-1], [10**6], [1.5], None, {}):
        answer = server.post("/v1/completions", {"prompt": prompt})
        assert answer.status_code == 400, prompt
        assert "prompt" in answer.json()["error"]["param"]


def test_prompts_times_n(serve: Serve) -> None:
    server = serve({"match": "^b", "text": "B"}, {"text": "A"})
    answer = server.post("/v1/completions", {"prompt": ["a", "b"], "n": 2})
    assert [choice["text"] for choice in answer.json()["choices"]] == ["A", "A", "B", "B"]
    assert answer.json()["usage"]["prompt_tokens"] == 2


def test_c122_the_completion_object(serve: Serve) -> None:
    answer = serve({"text": "a"}).post("/v1/completions", {"prompt": "x"}).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "scripted"
    assert answer["choices"] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}
    ]


@pytest.mark.parametrize("path", ["/v1/completions", "/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "number"), [("x", 1), (["x"], 1), (["x", "y", "z"], 3), ([65, 66], 1)]
)
def test_c122_every_shape_of_prompt(
    serve: Serve, path: str, stream: bool, prompt: Any, number: int
) -> None:
    answer = serve({"text": "a"}).post(path, {"prompt": prompt, "stream": stream, "model": " "})
    made = chunks(answer.text) if stream else [answer.json()]
    for one in made:
        assert one["id"].startswith("cmpl-")
        assert (one["object"], one["model"]) == ("text_completion", "scripted")
        assert one["created"] > 0
    choices = [choice for one in made for choice in one["choices"]]
    assert {choice["index"] for choice in choices} == set(range(number))
    assert all(set(choice) == {"index", "text", "logprobs", "finish_reason"} for choice in choices)
    assert sum(choice["finish_reason"] == "stop" for choice in choices) == number


def test_best_of_is_refused_clearly(serve: Serve) -> None:
    server = serve({"text": "a"})
    answer = server.post("/v1/completions", {"prompt": "x", "best_of": 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")
    assert server.post("/v1/completions", {"prompt": "x", "best_of": 1}).status_code == 200

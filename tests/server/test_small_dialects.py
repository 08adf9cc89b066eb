"""llama.cpp's endpoints, LM Studio's listing, root probes, fill-in-the-middle: C121."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

Serve = Callable[..., Any]
HELLO = [{"role": "user", "content": "hello"}]
FIM = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<repo_name>"]


def test_tokenize_and_back(serve: Serve) -> None:
    server = serve({"text": "x"})
    tokens = server.post("/tokenize", {"content": "héllo"}).json()["tokens"]
    assert tokens == list("héllo".encode())
    assert server.post("/detokenize", {"tokens": tokens}).json()["content"] == "héllo"
    pieces = server.post("/tokenize", {"content": "ab", "with_pieces": True}).json()["tokens"]
    assert [piece["piece"] for piece in pieces] == ["a", "b"]
    counted = server.post("/tokenize", {"messages": HELLO}).json()
    assert (
        counted["count"] == len(counted["tokens"]) == server.chat().json()["usage"]["prompt_tokens"]
    )
    assert counted["max_model_len"] == 262144
    assert server.post("/tokenize", {"prompt": "abc"}).json()["count"] == 3
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": [10**9]})):
        assert server.post(path, body).status_code == 400


def test_apply_template_and_props(serve: Serve) -> None:
    server = serve({"text": "x"})
    prompt = server.post("/apply-template", {"messages": HELLO}).json()["prompt"]
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    props = server.get("/props?model=x&autoload=false").json()
    assert props["default_generation_settings"]["n_ctx"] == 262144
    assert props["modalities"]["vision"] is False
    assert props["chat_template_caps"]["supports_tools"] is True
    assert props["total_slots"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_llamacpp_completion(serve: Serve, stream: bool) -> None:
    server = serve({"tokens": ["a", "b", "STOP", "c"]})
    answer = server.post("/completion", {"prompt": "x", "stop": ["STOP"], "stream": stream})
    if stream:
        made = [json.loads(event[6:]) for event in answer.text.strip().split("\n\n")]
    else:
        made = [answer.json()]
    assert "".join(part["content"] for part in made) == "ab"
    assert [part["stop"] for part in made] == [False] * (len(made) - 1) + [True]
    assert made[-1]["stopping_word"] == "STOP"
    assert made[-1]["timings"]["predicted_n"] == made[-1]["tokens_predicted"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_llamacpp_several_answers(serve: Serve, stream: bool) -> None:
    server = serve({"tokens": ["a", "b"]})
    answer = server.post("/completion", {"prompt": "x", "n_cmpl": 3, "stream": stream})
    if stream:
        made = [json.loads(event[6:]) for event in answer.text.strip().split("\n\n")]
    else:
        made = answer.json()
        assert len(made) == 3
    for index in range(3):
        own = [part for part in made if part["index"] == index]
        assert "".join(part["content"] for part in own) == "ab"
        assert [part["stop"] for part in own].count(True) == 1
        assert own[-1]["tokens_predicted"] == 2
    for wrong in (0, 129):
        refused = server.post("/completion", {"prompt": "x", "n_cmpl": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n_cmpl")


def test_llamacpp_constraints_bind_or_are_refused(serve: Serve) -> None:
    server = serve({"text": "{}"})
    bound = server.post("/completion", {"prompt": "x", "json_schema": {"type": "object"}})
    assert server.engine.played[bound.headers["x-request-id"]].params.grammar is not None
    for fields, param in (
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"json_schema": {"not": {}}}, "json_schema"),
    ):
        refused = server.post("/completion", {"prompt": "x", **fields})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    free = server.post("/completion", {"prompt": "x", "grammar": "", "json_schema": None})
    assert server.engine.played[free.headers["x-request-id"]].params.grammar is None


def with_fim_tokens(serve: Serve, *replies: Any) -> Any:
    """A scripted model whose vocabulary has fill-in-the-middle tokens."""
    return serve(*replies, {"match": "^never$", "tokens": FIM})


def test_c121_suffix_and_infill(serve: Serve) -> None:
    server = with_fim_tokens(
        serve,
        {"match": "^<fim_prefix>def f<fim_suffix>end<fim_middle>$", "text": "(x):"},
        {"match": "^<repo_name><file_sep>a.py\nA\n<fim_prefix>pre<fim_suffix>suf<fim_middle>$",
         "text": "mid"},
        {"match": "^plain$", "text": "!"},
    )  # fmt: skip
    for stream in (False, True):
        for path in ("/v1/completions", "/v1/fim/completions"):
            body = {"prompt": "def f", "suffix": "end", "max_tokens": 32, "stream": stream}
            answer = server.post(path, body)
            assert '"text":"(x):"' in answer.text
    for suffix in ("", None):
        body = {"prompt": "plain", "suffix": suffix}
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == "!"
    extra = [{"filename": "a.py", "text": "A"}]
    infill = {"input_prefix": "p", "prompt": "re", "input_suffix": "suf", "input_extra": extra}
    answer = server.post("/infill", infill).json()
    assert answer["content"] == "mid"
    assert answer["tokens_cached"] == 0
    warm = server.post("/infill", {**infill, "n_predict": 0})
    assert warm.json()["content"] == ""
    ollama = {"model": "m", "prompt": "def f", "suffix": "end", "stream": False}
    assert server.post("/api/generate", ollama).json()["response"] == "(x):"
    shown = server.post("/api/show", {"model": "m"}).json()
    assert "insert" in shown["capabilities"]
    assert ".Suffix" in shown["template"]  # Continue looks for it


def test_c121_thirty_completions_that_are_overtaken_free_their_places(serve: Serve) -> None:
    """An editor asks at every keystroke and leaves before the answer is there."""
    endless = {"tokens": ["x"], "repeat": True, "delay_s": 0.01}
    server = serve({"match": "^last$", "text": "done"}, endless, script={"max_num_seqs": 2})
    for number in range(30):
        body = {"prompt": f"line {number}", "max_tokens": 5000, "stream": bool(number % 2)}
        with (
            contextlib.suppress(httpx2.TimeoutException),
            httpx2.stream("POST", server.url + "/v1/completions", json=body, timeout=0.05),
        ):
            pass
    assert server.post("/v1/completions", {"prompt": "last"}).json()["choices"][0]["text"] == "done"
    server.wait_until_idle(10)
    assert all(played.status == "finished" for played in server.engine.played.values())


def test_c121_without_the_tokens_suffix_is_refused(serve: Serve) -> None:
    server = serve({"text": "x"})
    answer = server.post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
    assert server.post("/infill", {"input_prefix": "a"}).status_code == 400
    shown = server.post("/api/show", {"model": "m"}).json()
    assert "insert" not in shown["capabilities"]
    assert ".Suffix" not in shown["template"]


def test_lm_studio(serve: Serve) -> None:
    server = serve({"text": "x"}, script={"model": "org/m"})
    (entry,) = server.get("/api/v0/models").json()["data"]
    assert entry["id"] == "org/m"
    assert entry["state"] == "loaded"
    assert entry["max_context_length"] == entry["loaded_context_length"] == 262144
    assert server.get("/api/v0/models/org/m").json() == entry
    assert server.get("/api/v0/models/x/y").status_code == 404
    assert server.post("/api/v0/chat/completions", {"messages": HELLO}).status_code == 200
    assert server.post("/api/v0/completions", {"prompt": "x"}).status_code == 200


def test_what_clients_knock_on(serve: Serve) -> None:
    server = serve({"text": "x"})
    for method, path in (
        ("GET", "/"), ("HEAD", "/"), ("GET", "/v1"), ("HEAD", "/api/hello"), ("GET", "/api/hello"),
        ("POST", "/api/event_logging/batch"), ("GET", "/v1/models?limit=1000"),
    ):  # fmt: skip
        assert server.request(method, path).status_code == 200, path
    assert server.get("/").text == "Ollama is running"


def test_embeddings_are_refused_clearly(serve: Serve) -> None:
    answer = serve({"text": "x"}).post("/v1/embeddings", {"input": "a", "model": "m"})
    assert answer.status_code == 400
    assert "embedding" in answer.json()["error"]["message"]

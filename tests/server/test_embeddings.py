"""Embeddings in both APIs that have them, with the released clients and on the wire."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable
from typing import Any

import ollama
import openai
import pytest

Serve = Callable[..., Any]
SCRIPT = {"embedding_size": 12, "max_model_len": 64}
PATH = "/v1/embeddings"


@pytest.fixture
def server(serve: Serve) -> Any:
    return serve(script=SCRIPT)


def length(vector: list[float]) -> float:
    return math.sqrt(sum(value * value for value in vector))


def test_the_released_openai_client(server: Any) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x") as api:
        made = api.embeddings.create(model="m", input=["one", "two", "one"])
        short = api.embeddings.create(model="m", input="one", dimensions=5)
        plain = api.embeddings.create(model="m", input="one", encoding_format="float")
    one, two, again = [item.embedding for item in made.data]
    assert [item.index for item in made.data] == [0, 1, 2]
    assert one == again != two
    assert length(one) == pytest.approx(1.0, abs=1e-6)
    assert plain.data[0].embedding == pytest.approx(one)
    cut = short.data[0].embedding
    assert len(cut) == 5
    assert length(cut) == pytest.approx(1.0, abs=1e-6)
    assert cut[1] / cut[0] == pytest.approx(one[1] / one[0], rel=1e-4)
    assert made.usage.prompt_tokens == made.usage.total_tokens == 9


def test_the_released_ollama_client(server: Any) -> None:
    client = ollama.Client(host=server.url)
    made = client.embed(model="scripted", input=["one", "two"])
    assert len(made.embeddings) == 2
    assert made.prompt_eval_count == 6
    single = client.embed(model="scripted", input="one", dimensions=3)
    assert [len(vector) for vector in single.embeddings] == [3]
    older = client.embeddings(model="scripted", prompt="one")
    assert list(older.embedding) == pytest.approx(list(made.embeddings[0]))
    assert client.show("scripted").capabilities == ["embedding"]
    client.close()


def test_base64_is_little_endian_float32(server: Any) -> None:
    plain = server.post(PATH, {"input": "a"}).json()["data"][0]["embedding"]
    asked = {"input": "a", "encoding_format": "base64"}
    packed = base64.b64decode(server.post(PATH, asked).json()["data"][0]["embedding"])
    assert list(struct.unpack("<12f", packed)) == pytest.approx(plain)


def test_token_ids_and_many_texts(server: Any) -> None:
    ids = server.post("/tokenize", {"content": "abc"}).json()["tokens"]
    by_ids = server.post(PATH, {"input": ids}).json()["data"][0]["embedding"]
    lists = server.post(PATH, {"input": [ids, ids]}).json()["data"]
    assert by_ids == lists[1]["embedding"]
    many = server.post(PATH, {"input": [f"text {n}" for n in range(300)]})
    assert many.status_code == 200
    assert len({tuple(item["embedding"]) for item in many.json()["data"]}) == 300
    assert server.get("/api/v0/models").json()["data"][0]["type"] == "embeddings"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [99999999]}, "input"),
        ({"input": None}, "input"),
        ({}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 13}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": ["a"] * 3000}, "input"),
        ({"input": "a" * 100}, "input"),
    ],
)
def test_bad_requests_name_the_field(server: Any, fields: dict[str, Any], param: str) -> None:
    answer = server.post(PATH, fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_ollama_cuts_what_is_too_long_unless_told_not_to(server: Any) -> None:
    body = {"model": "m", "input": "a" * 100}
    cut = server.post("/api/embed", body)
    assert cut.status_code == 200
    assert cut.json()["prompt_eval_count"] == 63
    assert server.post("/api/embed", {**body, "truncate": False}).status_code == 400
    assert server.post("/api/embed", {"model": "m", "input": []}).json()["embeddings"] == []


def test_each_kind_of_model_refuses_the_others_work(serve: Serve, server: Any) -> None:
    generating = serve({"text": "x"})
    for path, body in (
        (PATH, {"input": "a"}),
        ("/api/embed", {"model": "m", "input": "a"}),
        ("/api/embeddings", {"model": "m", "prompt": "a"}),
    ):
        answer = generating.post(path, body)
        assert answer.status_code == 400
        assert "--embeddings" in answer.text
    refused = server.chat()
    assert refused.status_code == 400
    assert "/v1/embeddings" in refused.json()["error"]["message"]


def test_a_request_counts_as_one_answer_of_its_user(serve: Serve) -> None:
    server = serve(script=SCRIPT)
    made = []
    place_for = server.front.accounts.place_for

    def noting(user: Any, generation: Any) -> Any:
        made.append(generation.places)
        return place_for(user, generation)

    server.front.accounts.place_for = noting
    assert server.post(PATH, {"input": ["a"] * 50}).status_code == 200
    assert made == [1]

"""What a model cannot do is said, and what its makers chose is left to it, in every dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlx_cb.sampling_params import MODEL_DEFAULTS

Serve = Callable[..., Any]
DATA = "data:image/png;base64,AAAA"


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}]}


IMAGE_URL = {"type": "image_url", "image_url": {"url": DATA}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
ANTHROPIC = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
}
RESPONSES = {"type": "input_image", "image_url": DATA}

#: Path and body of a question with a picture (or sound) in it, in the words of each API.
WITH_MEDIA: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", chat(IMAGE_URL)),
    ("/v1/chat/completions", chat(SOUND)),
    ("/api/v0/chat/completions", chat(IMAGE_URL)),
    ("/v1/messages", chat(ANTHROPIC) | {"max_tokens": 5, "model": "m"}),
    ("/v1/messages/count_tokens", chat(ANTHROPIC) | {"model": "m"}),
    ("/v1/responses", {"input": [{"role": "user", "content": [RESPONSES]}]}),
    (
        "/api/chat",
        {"model": "m", "messages": [{"role": "user", "content": "look", "images": ["AAAA"]}]},
    ),
    ("/api/generate", {"model": "m", "prompt": "look", "images": ["AAAA"]}),
    ("/completion", {"prompt": "look [img-1]", "image_data": [{"data": "AAAA", "id": 1}]}),
    ("/completion", {"prompt": {"prompt_string": "<__media__>", "multimodal_data": ["AAAA"]}}),
    ("/tokenize", chat(IMAGE_URL)),
    ("/apply-template", chat(IMAGE_URL)),
]


@pytest.mark.parametrize(
    ("path", "body"), WITH_MEDIA, ids=[f"{path} {n}" for n, (path, _) in enumerate(WITH_MEDIA)]
)
def test_a_picture_for_a_text_model_is_refused_by_what_it_can_do(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    server = serve({"text": "x"})
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    assert "this model takes text only" in answer.text
    assert not server.engine.played, "nothing of it may reach the model"


def test_an_empty_frame_for_pictures_is_a_prompt(serve: Serve) -> None:
    body = {"prompt": {"prompt_string": "abc", "multimodal_data": []}, "image_data": []}
    answer = serve({"text": "x"}).post("/completion", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tokens_evaluated"] == 3


#: Path, body, and where its sampling parameters stand.
ASKING: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/chat/completions", chat(), None),
    ("/v1/completions", {"prompt": "a"}, None),
    ("/v1/messages", chat() | {"max_tokens": 5}, None),
    ("/v1/responses", {"input": "a"}, None),
    ("/api/chat", {"model": "m", "messages": [{"role": "user", "content": "a"}]}, "options"),
    ("/api/generate", {"model": "m", "prompt": "a"}, "options"),
    ("/completion", {"prompt": "a"}, None),
]


@pytest.mark.parametrize(("path", "body", "place"), ASKING, ids=[path for path, *_ in ASKING])
def test_only_what_a_client_names_is_not_left_to_the_makers(
    serve: Serve, path: str, body: dict[str, Any], place: str | None
) -> None:
    server = serve({"text": "x"})

    def received(**fields: Any) -> Any:
        asked = body | ({place: fields} if place else fields)
        answer = server.post(path, asked)
        assert answer.status_code == 200, answer.text
        return server.engine.played[answer.headers["x-request-id"]].params

    nothing = received()
    assert set(nothing.left_to_model) == set(MODEL_DEFAULTS)
    makers = nothing.with_defaults({"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    assert (makers.temperature, makers.top_k, makers.top_p) == (0.6, 20, 0.95)
    some = received(temperature=0.5, top_p=0.8)
    assert set(some.left_to_model) == set(MODEL_DEFAULTS) - {"temperature", "top_p"}
    mixed = some.with_defaults({"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    assert (mixed.temperature, mixed.top_k, mixed.top_p) == (0.5, 20, 0.8)

"""Ollama's listing and managing endpoints: version, tags, show, ps, pull, delete."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mlx_cb.errors import InvalidRequest, MlxCbError, ModelNotFound
from mlx_cb.server.answering import JsonEndpoint
from mlx_cb.server.body import decode_json
from mlx_cb.server.dialects.answer_types import OllamaModel, OllamaModels, OllamaStatus
from mlx_cb.server.dialects.ollama_wire import (
    encode,
    error_answer,
    plain_name,
    tagged_name,
    timestamp,
)
from mlx_cb.server.front import Front
from mlx_cb.server.openapi import answers
from mlx_cb.server.streaming import JSON, NDJSON, Whole
from mlx_cb.text.fill_in_middle import FillInMiddle, find_fill_in_middle
from mlx_cb.text.model_text import ModelText

# The version whose API is spoken here; editors refuse versions below 0.6.4, Codex below 0.13.4.
VERSION = "0.30.0"
_YEAR_S = 365 * 86400


class ModelRequest(msgspec.Struct):
    """Older clients say `name`, newer ones `model`."""

    model: str | None = None
    name: str | None = None
    stream: bool = True


def _details(front: Front) -> dict[str, Any]:
    info = front.model_info
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": _short(info.num_parameters),
        "quantization_level": info.quantization or info.dtype,
    }


def _short(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _entry(front: Front) -> dict[str, Any]:
    info, name = front.model_info, tagged_name(front)
    digest = hashlib.sha256(f"{name} {info.created} {info.weights_bytes}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(info.created),
        "size": info.weights_bytes,
        "digest": digest,
        "details": _details(front),
    }


def tags(front: Front) -> dict[str, Any]:
    """The models that can be used: the one that is loaded, nothing while it loads."""
    try:
        return {"models": [_entry(front)]}
    except MlxCbError:
        return {"models": []}


def running(front: Front) -> dict[str, Any]:
    """The models in memory. Ours does not expire; a year from now says so to every client."""
    try:
        info = front.model_info
    except MlxCbError:
        return {"models": []}
    more = {
        "expires_at": timestamp(time.time() + _YEAR_S),
        "size_vram": info.weights_bytes,
        "context_length": info.max_model_len,
    }
    return {"models": [{**_entry(front), **more}]}


async def show(body: bytes, front: Front) -> bytes:
    """One model in detail. Raises ModelNotFound for another one's name, if names are strict."""
    asked = decode_json(body, ModelRequest)
    front.resolve_name(plain_name(asked.model or asked.name))
    info, text = front.model_info, front.text
    fill = find_fill_in_middle(text.tokenizer)
    capabilities = ["completion", "tools"] + (["thinking"] if text.reasoning else [])
    capabilities += ["insert"] if fill else []
    if info.pooling is not None:
        capabilities = ["embedding"]
    shown = {
        "modelfile": f"FROM {front.served_name}\n",
        "parameters": f"num_ctx {info.max_model_len}",
        "template": _template(text, fill),
        "details": _details(front),
        "model_info": {
            "general.architecture": info.architecture,
            "general.basename": front.served_name,
            "general.parameter_count": info.num_parameters,
            f"{info.architecture}.context_length": info.max_model_len,
            f"{info.architecture}.block_count": info.num_layers,
            f"{info.architecture}.embedding_length": info.hidden_size,
        },
        "capabilities": capabilities,
        "modified_at": timestamp(info.created),
    }
    return encode(shown)


def _template(text: ModelText, fill: FillInMiddle | None) -> str:
    """The chat template; before it, in Ollama's form, how the gap before a suffix is filled.

    Continue looks for `.Suffix` in it before it offers to complete code.
    """
    shown = text.chat_template.source if text.chat_template else "{{ .Prompt }}"
    if fill is None:
        return shown
    gap = fill.prompt("{{ .Prompt }}", "{{ .Suffix }}")
    return f"{{{{- if .Suffix }}}}{gap}{{{{- end }}}}\n{shown}"


async def pull(body: bytes, front: Front) -> Whole:
    """Pulling the model that is here succeeds at once; this server loads no other."""
    asked = decode_json(body, ModelRequest)
    name = plain_name(asked.model or asked.name)
    if name not in front.names():
        raise ModelNotFound(
            f"pull model manifest: {name!r} is not served here; start mlx-cb with it instead"
        )
    steps = ("pulling manifest", "verifying sha256 digest", "success")
    shown = steps if asked.stream else steps[-1:]
    lines = b"".join(encode({"status": step}) + b"\n" for step in shown)
    return Whole(lines, media_type=NDJSON if asked.stream else JSON)


async def change(body: bytes, front: Front) -> bytes:
    """Deleting and copying models is the command line's, not the network's."""
    raise InvalidRequest("models cannot be changed over the network; use mlx-cb rm")


def routes(front: Front) -> list[BaseRoute]:
    """GET for the listings, POST for the rest."""

    async def version(request: Request) -> Response:
        return Response(encode({"version": VERSION}), media_type="application/json")

    @answers(OllamaModels)
    async def all_tags(request: Request) -> Response:
        return Response(encode(tags(front)), media_type="application/json")

    @answers(OllamaModels)
    async def all_running(request: Request) -> Response:
        return Response(encode(running(front)), media_type="application/json")

    posts: dict[str, tuple[Any, type]] = {
        "/api/show": (show, OllamaModel),
        "/api/copy": (change, OllamaStatus),
    }
    pulling = JsonEndpoint(front, pull, error_answer, ModelRequest, OllamaStatus)
    pulling.stream_media_type = NDJSON.decode()
    return [
        Route("/api/pull", pulling, methods=["POST"]),
        Route("/api/version", version),
        Route("/api/tags", all_tags),
        Route("/api/ps", all_running),
        Route("/api/delete", JsonEndpoint(front, change, error_answer), methods=["DELETE"]),
        *(
            Route(
                path,
                JsonEndpoint(front, answer, error_answer, ModelRequest, kind),
                methods=["POST"],
            )
            for path, (answer, kind) in posts.items()
        ),
    ]

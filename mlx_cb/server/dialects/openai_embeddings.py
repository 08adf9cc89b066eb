"""OpenAI embeddings: `POST /v1/embeddings`, as numbers or as base64 of little-endian float32."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from mlx_cb.errors import InvalidRequest
from mlx_cb.server.answering import Answering, Dialect, Endpoint
from mlx_cb.server.body import decode_json
from mlx_cb.server.dialects.answer_types import EmbeddingList
from mlx_cb.server.dialects.openai_wire import encode, error_answer, prompt_inputs, stream_error
from mlx_cb.server.embedding import embedding_input, usage, vectors
from mlx_cb.server.front import Front
from mlx_cb.server.generate_input import GenerateInput

PATHS = ("/v1/embeddings", "/embeddings", "/api/v0/embeddings")


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body; keys not named here are ignored. OpenAI's own clients ask for base64."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None


def parse(body: bytes, front: Front) -> GenerateInput:
    """The body as a `GenerateInput`. Raises InvalidRequest naming the field."""
    asked = decode_json(body, EmbeddingRequest)
    if asked.encoding_format not in (None, "float", "base64"):
        raise InvalidRequest(
            f"encoding_format must be float or base64, not {asked.encoding_format!r}",
            param="encoding_format",
        )
    prompts = prompt_inputs(asked.input, "input")
    given = embedding_input(front, asked.model, prompts, asked.dimensions)
    given.details["base64"] = asked.encoding_format == "base64"
    return given


async def whole(answering: Answering) -> bytes:
    """The complete answer."""
    is_packed = answering.given.details["base64"]
    data = [
        {"object": "embedding", "index": index, "embedding": _shown(vector, is_packed)}
        for index, vector in enumerate(await vectors(answering))
    ]
    head = {"object": "list", "model": answering.given.model}
    return encode({**head, "data": data, "usage": usage(answering)})


def _shown(vector: array[float], is_packed: bool) -> Any:
    if not is_packed:
        return vector.tolist()
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()


async def _no_stream(answering: Answering) -> AsyncIterator[bytes]:
    """Embeddings are never streamed: `parse` asks for none."""
    yield await whole(answering)


DIALECT = Dialect(
    parse,
    whole,
    _no_stream,
    error_answer,
    stream_error,
    request_type=EmbeddingRequest,
    answer_type=EmbeddingList,
)


def endpoints(front: Front) -> dict[str, Endpoint]:
    """Path → endpoint, all of them POST."""
    return dict.fromkeys(PATHS, Endpoint(front, DIALECT))

"""Ollama's embeddings: `POST /api/embed` for many texts, `/api/embeddings` for one."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from mlx_cb.errors import InvalidRequest
from mlx_cb.server.answering import Answering, Dialect, Endpoint
from mlx_cb.server.body import decode_json
from mlx_cb.server.dialects.answer_types import OllamaEmbedding, OllamaEmbeddings
from mlx_cb.server.dialects.ollama_wire import encode, error_answer, plain_name, stream_error
from mlx_cb.server.embedding import embedding_input, vectors
from mlx_cb.server.front import Front
from mlx_cb.server.generate_input import GenerateInput, PromptInput
from mlx_cb.server.streaming import Whole

NANOSECONDS = 10**9


class EmbedRequest(msgspec.Struct, kw_only=True):
    """The body; unknown keys are ignored, too long texts cut unless `truncate` is off."""

    model: str
    input: str | list[str]
    truncate: bool = True
    dimensions: int | None = None


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """The body of the older path; keys not named here are ignored."""

    model: str
    prompt: str


def parse_embed(body: bytes, front: Front) -> GenerateInput | Whole:
    """The body as a `GenerateInput`; no texts are answered at once.

    Raises InvalidRequest naming the field.
    """
    asked = decode_json(body, EmbedRequest)
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    name = plain_name(asked.model)
    if not texts:
        return Whole(encode({"model": asked.model, "embeddings": []}))
    prompts = [_cut(front, text) if asked.truncate else text for text in texts]
    return embedding_input(front, name, prompts, asked.dimensions)


def parse_embeddings(body: bytes, front: Front) -> GenerateInput:
    """The body as a `GenerateInput`. Raises InvalidRequest naming the field."""
    asked = decode_json(body, EmbeddingsRequest)
    if not asked.prompt:
        raise InvalidRequest("prompt is empty", param="prompt")
    prompts = [_cut(front, asked.prompt)]
    return embedding_input(front, plain_name(asked.model), prompts, None)


def _cut(front: Front, text: str) -> PromptInput:
    """A text that fits: its beginning, and the token that ends every text."""
    limit = front.model_info.max_model_len - 1
    if len(text) <= limit:  # a token has at least one character
        return text
    ids = front.text.tokenizer.encode(text)
    return text if len(ids) <= limit else [*ids[: limit - 1], ids[-1]]


async def whole_embed(answering: Answering) -> bytes:
    """The vectors of all texts, and times in nanoseconds."""
    made = [vector.tolist() for vector in await vectors(answering)]
    generation = answering.generation
    return encode(
        {
            "model": answering.given.model,
            "embeddings": made,
            "total_duration": int((time.monotonic() - generation.arrived) * NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": generation.usage.prompt_tokens,
        }
    )


async def whole_embeddings(answering: Answering) -> bytes:
    """The vector of the one text."""
    (vector,) = await vectors(answering)
    return encode({"embedding": vector.tolist()})


def _dialect(
    parse: Callable[[bytes, Front], GenerateInput | Whole],
    whole: Callable[[Answering], Awaitable[bytes]],
    request_type: type,
    answer_type: type,
) -> Dialect:
    async def no_stream(answering: Answering) -> AsyncIterator[bytes]:
        yield await whole(answering)

    options: dict[str, Any] = {"request_type": request_type, "answer_type": answer_type}
    return Dialect(parse, whole, no_stream, error_answer, stream_error, **options)


def endpoints(front: Front) -> dict[str, Endpoint]:
    """Path → endpoint, all of them POST."""
    return {
        "/api/embed": Endpoint(
            front, _dialect(parse_embed, whole_embed, EmbedRequest, OllamaEmbeddings)
        ),
        "/api/embeddings": Endpoint(
            front, _dialect(parse_embeddings, whole_embeddings, EmbeddingsRequest, OllamaEmbedding)
        ),
    }

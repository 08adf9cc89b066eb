"""The HTTP APIs that clients speak: siblings over `OutputEvent`, one file each.

To add one: write its file, name it here. No dialect calls or inherits another.
"""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from mlx_cb.errors import MlxCbError
from mlx_cb.server.dialects import (
    anthropic_messages,
    llamacpp,
    models,
    ollama,
    ollama_embed,
    ollama_models,
    ollama_wire,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_responses,
    openai_wire,
    probes,
)
from mlx_cb.server.dialects.answer_types import AnthropicError, OllamaError, OpenAIError
from mlx_cb.server.front import Front
from mlx_cb.server.streaming import Whole

_GENERATING = (
    openai_chat,
    openai_completions,
    openai_responses,
    openai_embeddings,
    anthropic_messages,
    ollama,
    ollama_embed,
)
_LISTING = (models, ollama_models, llamacpp, probes)
# Whose words an error has before its route is known; the first match counts.
_ERRORS = (
    ("/v1/messages", anthropic_messages.error_answer, AnthropicError),
    ("/api/v0/", openai_wire.error_answer, OpenAIError),
    ("/api/", ollama_wire.error_answer, OllamaError),
    ("", openai_wire.error_answer, OpenAIError),
)


def routes(front: Front) -> list[BaseRoute]:
    """Every dialect's routes."""
    found: list[BaseRoute] = []
    for dialect in _GENERATING:
        for path, endpoint in dialect.endpoints(front).items():
            found.append(Route(path, endpoint, methods=["POST"]))
    for dialect in _LISTING:
        found += dialect.routes(front)
    return found


def error_answer(path: str, error: MlxCbError, request_id: str) -> Whole:
    """An error in the words of the dialect that this path belongs to."""
    own = next(answer for start, answer, _ in _ERRORS if path.startswith(start))
    return own(error, request_id)


def error_type(path: str) -> type:
    """The form of the errors of this path, for the API's description."""
    return next(kind for start, _, kind in _ERRORS if path.startswith(start))

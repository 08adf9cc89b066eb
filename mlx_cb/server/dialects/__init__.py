"""The HTTP APIs that clients speak: siblings over `OutputEvent`, one file each.

To add one: write its file, name it here. No dialect calls or inherits another.
"""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from mlx_cb.server.dialects import (
    anthropic_messages,
    llamacpp,
    models,
    ollama,
    ollama_models,
    openai_chat,
    openai_completions,
    openai_responses,
    probes,
)
from mlx_cb.server.front import Front

_GENERATING = (openai_chat, openai_completions, openai_responses, anthropic_messages, ollama)
_LISTING = (models, ollama_models, llamacpp, probes)


def routes(front: Front) -> list[BaseRoute]:
    """Every dialect's routes."""
    found: list[BaseRoute] = []
    for dialect in _GENERATING:
        for path, endpoint in dialect.endpoints(front).items():
            found.append(Route(path, endpoint, methods=["POST"]))
    for dialect in _LISTING:
        found += dialect.routes(front)
    return found

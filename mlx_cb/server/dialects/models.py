"""The model listing: one object per name that satisfies every API's clients at once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mlx_cb.errors import EngineDead, ModelNotFound
from mlx_cb.server.dialects.answer_types import ModelList
from mlx_cb.server.dialects.openai_wire import error_answer
from mlx_cb.server.front import Front
from mlx_cb.server.openapi import answers


def model_object(front: Front, name: str) -> dict[str, Any]:
    """OpenAI's, Anthropic's, vLLM's and llama.cpp's fields of one model.

    Never waits for a model that still loads: what is not known yet is null.
    """
    try:
        info = front.model_info
    except EngineDead:
        info = None
    limit = info.max_model_len if info else None
    created = info.created if info else 0
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "mlx-cb",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "max_input_tokens": limit,
        "max_model_len": limit,
        "context_length": limit,
        "root": front.config.engine.model.model,
        "parent": None,
        "meta": {
            "n_ctx": limit,
            "n_ctx_train": limit,
            "n_params": info.num_parameters if info else None,
        },
        "status": {"value": "loaded" if front.is_ready else "loading"},
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
    }


def listing(front: Front) -> dict[str, Any]:
    """All names of the loaded model."""
    data = [model_object(front, name) for name in _listed(front)]
    return {
        "object": "list",
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"],
        "last_id": data[-1]["id"],
    }


def _listed(front: Front) -> list[str]:
    return list(dict.fromkeys([front.served_name, *(name for name, _ in front.config.aliases)]))


def codex_catalogue(front: Front) -> list[dict[str, Any]]:
    """Codex's own description of models; one missing field and it ignores all of them."""
    return [
        {
            "slug": name,
            "display_name": name,
            "context_window": model_object(front, name)["max_model_len"],
            "shell_type": "unified_exec",
            "visibility": "list",
            "supported_in_api": True,
            "priority": 1,
            "truncation_policy": {"mode": "bytes", "limit": 10000},
            "input_modalities": ["text"],
            "base_instructions": "You are a coding agent. Use the tools to do the user's task.",
            "support_verbosity": False,
            "default_verbosity": None,
            "supports_parallel_tool_calls": True,
            "supports_reasoning_summaries": False,
            "supported_reasoning_levels": [],
            "experimental_supported_tools": [],
        }
        for name in _listed(front)
    ]


def routes(front: Front) -> list[BaseRoute]:
    """The listing and one model, with and without `/v1`."""

    @answers(ModelList)
    async def all_models(request: Request) -> Response:
        found = listing(front)
        if "client_version" in request.query_params:
            found["models"] = codex_catalogue(front)
        return JSONResponse(found)

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name in front.names():
            return JSONResponse(model_object(front, name))
        known = ", ".join(front.names())
        error = ModelNotFound(f"the model {name!r} is not here; this server has {known}")
        answer = error_answer(error, "")
        return Response(answer.body, answer.status, media_type="application/json")

    return [
        route
        for prefix in ("/v1/models", "/models")
        for route in (Route(prefix, all_models), Route(prefix + "/{name:path}", one_model))
    ]

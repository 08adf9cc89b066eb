"""The small paths that clients knock on before or beside the real ones, and LM Studio's listing."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mlx_cb.errors import EngineDead, ModelNotFound
from mlx_cb.server.dialects.answer_types import ModelList
from mlx_cb.server.dialects.openai_wire import error_answer
from mlx_cb.server.front import Front
from mlx_cb.server.openapi import answers


def lm_studio_model(front: Front, name: str) -> dict[str, Any]:
    """One entry of LM Studio's listing."""
    entry: dict[str, Any] = {
        "id": name,
        "object": "model",
        "type": "llm",
        "publisher": name.split("/")[0] if "/" in name else "mlx-cb",
        "compatibility_type": "mlx",
        "state": "not-loaded",
        "capabilities": ["tool_use"],
    }
    try:
        info = front.model_info
    except EngineDead:
        return entry
    if info.pooling is not None:
        entry |= {"type": "embeddings", "capabilities": []}
    return entry | {
        "arch": info.architecture,
        "quantization": info.quantization or info.dtype,
        "state": "loaded",
        "max_context_length": info.max_model_len,
        "loaded_context_length": info.max_model_len,
    }


def routes(front: Front) -> list[BaseRoute]:
    """Everything small."""

    async def nothing(request: Request) -> Response:
        return JSONResponse({})

    @answers(ModelList)
    async def lm_studio(request: Request) -> Response:
        data = [lm_studio_model(front, front.served_name)]
        return JSONResponse({"object": "list", "data": data})

    async def lm_studio_one(request: Request) -> Response:
        name = request.path_params["name"]
        if name in front.names():
            return JSONResponse(lm_studio_model(front, name))
        answer = error_answer(ModelNotFound(f"the model {name!r} is not here"), "")
        return Response(answer.body, answer.status, media_type="application/json")

    return [
        Route("/v1", nothing),
        Route("/api/hello", nothing, methods=["GET", "HEAD", "POST"]),
        Route("/api/event_logging/batch", nothing, methods=["POST"]),
        Route("/api/v0/models", lm_studio),
        Route("/api/v0/models/{name:path}", lm_studio_one),
    ]

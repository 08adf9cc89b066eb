"""The small paths that clients knock on before or beside the real ones, and LM Studio's listing."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mlx_cb.errors import EngineDead, InvalidRequest, ModelNotFound
from mlx_cb.server.answering import JsonEndpoint
from mlx_cb.server.dialects.openai_wire import error_answer
from mlx_cb.server.front import Front


def lm_studio_model(front: Front, name: str) -> dict[str, Any]:
    """One entry of LM Studio's listing."""
    entry = {
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
    return entry | {
        "arch": info.architecture,
        "quantization": info.quantization or info.dtype,
        "state": "loaded",
        "max_context_length": info.max_model_len,
        "loaded_context_length": info.max_model_len,
    }


async def no_embeddings(body: bytes, front: Front) -> bytes:
    """No text model makes embeddings."""
    raise InvalidRequest(
        f"{front.served_name} is a text model and makes no embeddings; serve an embedding model "
        f"for that",
        param="model",
    )


def routes(front: Front) -> list[BaseRoute]:
    """Everything small."""

    async def nothing(request: Request) -> Response:
        return JSONResponse({})

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
        Route("/v1/embeddings", JsonEndpoint(front, no_embeddings, error_answer), methods=["POST"]),
    ]

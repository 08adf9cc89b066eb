"""The API's description, made from the types that requests are decoded with: `/openapi.json`.

Walks the routes, so a new dialect is described without a line here. `/docs` shows it as a page.
"""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from mlx_cb.server.safe_headers import inline_policy

_SCHEMAS = "#/components/schemas/{name}"
_FAILURES = {
    "400": "A field is wrong; the error names it.",
    "401": "No key, or a wrong one, where one is needed.",
    "403": "The Host is not this machine, the page is another site's, or the key lacks the right.",
    "404": "No such model or id.",
    "408": "The body comes too slowly, or the request's time was over before the first token.",
    "413": "The body is too large.",
    "415": "The body is compressed in a way that is not read here.",
    "429": "Too much work is waiting; see Retry-After.",
    "503": "The engine is loading or starting again; see Retry-After.",
}


def answers(kind: type) -> Callable[[Any], Any]:
    """Say what a plain route function answers with, for its description."""

    def mark(function: Any) -> Any:
        function.answer_type = kind
        return function

    return mark


def describe(routes: Sequence[BaseRoute], error_type: Callable[[str], type]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of these routes; `error_type` gives a path's form of errors."""
    found = [route for route in routes if isinstance(route, Route)]
    types = [_type(route, name) for route in found for name in ("request_type", "answer_type")]
    types += [error_type(route.path) for route in found]
    unique = [kind for kind in dict.fromkeys(types) if kind is not None]
    schemas, components = msgspec.json.schema_components(unique, ref_template=_SCHEMAS)
    references = dict(zip(unique, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in found:
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = _operation(route, references, error_type(route.path))
            paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlx-cb",
            "version": "1",
            "description": "OpenAI, Anthropic, Ollama, llama.cpp and LM Studio APIs of one server.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }


def _type(route: Route, name: str) -> type | None:
    return getattr(route.endpoint, name, None)


def _answer(route: Route, references: dict[type, dict[str, Any]]) -> dict[str, Any]:
    """The description of a 200: its body's schema, and that it may be a stream."""
    kind = _type(route, "answer_type")
    if kind is None:
        return {"description": "The answer."}
    content: dict[str, Any] = {"application/json": {"schema": references[kind]}}
    streamed = getattr(route.endpoint, "stream_media_type", None)
    if streamed is not None:
        content[streamed] = {}
    return {
        "description": "The answer; a stream if the request asks for one.", "content": content
    }  # fmt: skip


def _operation(route: Route, references: dict[type, dict[str, Any]], error: type) -> dict[str, Any]:
    kind = _type(route, "request_type")
    refused = {"application/json": {"schema": references[error]}}
    source = kind if kind is not None else route.endpoint
    summary = (inspect.getdoc(source) or route.path).split("\n")[0]
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": _answer(route, references),
            **{
                status: {"description": text, "content": refused}
                for status, text in _FAILURES.items()
            },
        },
    }
    if kind is not None:
        content = {"application/json": {"schema": references[kind]}}
        operation["requestBody"] = {"required": True, "content": content}
    names = route.param_convertors
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation


def _page(document: dict[str, Any]) -> str:
    """A small page that lists the paths and the fields of their bodies."""
    parts = []
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h3><code>{method.upper()} {html.escape(path)}</code></h3>")
            parts.append(f"<p>{html.escape(operation['summary'])}</p>")
            body = operation.get("requestBody")
            if body:
                name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
                fields = ", ".join(schemas[name].get("properties", {}))
                parts.append(f"<p><small>{html.escape(fields)}</small></p>")
    style = "body{font:16px system-ui;max-width:50rem;margin:2rem auto;padding:0 1rem}"
    head = f"<!doctype html><meta charset=utf-8><title>mlx-cb API</title><style>{style}</style>"
    return (
        head + '<h1>mlx-cb API</h1><p><a href="openapi.json">openapi.json</a></p>' + "".join(parts)
    )


def routes(described: Sequence[BaseRoute], error_type: Callable[[str], type]) -> list[BaseRoute]:
    """`/openapi.json` and `/docs` for these routes."""
    document = describe(described, error_type)
    encoded, page = msgspec.json.encode(document), _page(document)
    policy = inline_policy(page)

    async def openapi(request: Request) -> Response:
        return Response(encoded, media_type="application/json")

    async def docs(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": policy})

    return [Route("/openapi.json", openapi), Route("/docs", docs)]

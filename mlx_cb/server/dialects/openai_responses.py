"""OpenAI Responses: `POST /v1/responses`, the dialect of Codex and of newer clients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from mlx_cb.errors import InvalidRequest, MlxCbError
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.server.answering import Answering, Dialect, Endpoint
from mlx_cb.server.body import decode_json
from mlx_cb.server.dialects.answer_types import Response
from mlx_cb.server.dialects.openai_wire import encode, error_answer
from mlx_cb.server.dialects.responses_events import ItemEvents
from mlx_cb.server.dialects.responses_wire import (
    Item,
    flat_name,
    known_tools,
    template_messages,
)
from mlx_cb.server.effort import effort_variables
from mlx_cb.server.front import Front
from mlx_cb.server.generate_input import GenerateInput
from mlx_cb.server.generation import Usage
from mlx_cb.server.structured import schema_grammar, with_grammar
from mlx_cb.server.tool_choice import ToolChoice, choose_tools
from mlx_cb.text.chat_template import ChatInput
from mlx_cb.text.events import EndReason

PATHS = ("/v1/responses", "/responses")
REMEMBERED = 256
LARGEST_MEMORY = 64 * 2**20  # characters of remembered items, all together


class PreviousResponseNotFound(InvalidRequest):
    """The response was never here, was not stored, or is forgotten."""

    code = "previous_response_not_found"


class Reasoning(msgspec.Struct):
    """`reasoning`."""

    effort: str | None = None


class Text(msgspec.Struct):
    """`text`."""

    format: dict[str, Any] | None = None


class NamedTool(msgspec.Struct, omit_defaults=True):
    """A tool by its name."""

    type: str | None = None
    name: str | None = None
    namespace: str | None = None


class WireToolChoice(NamedTool, omit_defaults=True):
    """`tool_choice`, where it is more than a word."""

    mode: str | None = None
    tools: list[NamedTool] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The body; keys not named here are ignored."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | WireToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None


class Memory:
    """The newest responses' conversations, so that a client need not send them again."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[Item], int]] = OrderedDict()
        self._size = 0

    def recall(self, response_id: str) -> list[Item]:
        """All items up to and with this response. Raises PreviousResponseNotFound."""
        if response_id not in self._kept:
            raise PreviousResponseNotFound(
                f"no response {response_id!r} is remembered; send the whole input",
                param="previous_response_id",
            )
        self._kept.move_to_end(response_id)
        return self._kept[response_id][0]

    def keep(self, response_id: str, items: list[Item]) -> None:
        """Remember a conversation, and forget the oldest ones."""
        size = len(encode(items))
        self._kept[response_id] = (items, size)
        self._size += size
        while len(self._kept) > REMEMBERED or self._size > LARGEST_MEMORY:
            _, (_, forgotten) = self._kept.popitem(last=False)
            self._size -= forgotten


class Responses:
    """The dialect over one server's memory."""

    def __init__(self) -> None:
        self._memory = Memory()

    def parse(self, body: bytes, front: Front) -> GenerateInput:
        """The body as a `GenerateInput`. Raises InvalidRequest naming the field."""
        asked = decode_json(body, ResponsesRequest)
        items = self._items(asked)
        tools = known_tools(asked.tools or [], items)
        choice = _tool_choice(asked, [tool.function for tool in tools.values()])
        variables = effort_variables(asked.reasoning.effort if asked.reasoning else None)
        messages = template_messages(asked.instructions, items)
        if not messages:
            raise InvalidRequest("input must hold at least one message", param="input")
        return GenerateInput(
            prompts=(ChatInput(messages, choice.tools, variables),),
            params=_params(asked),
            model=front.resolve_name(asked.model),
            stream=bool(asked.stream),
            streams_calls=bool(asked.stream),
            prompt_field="input",
            tool_choice=choice,
            details={"asked": asked, "items": items, "tools": tools},
        )

    def _items(self, asked: ResponsesRequest) -> list[Item]:
        earlier: list[Item] = []
        if asked.previous_response_id:
            earlier = self._memory.recall(asked.previous_response_id)
        if asked.input is None:
            raise InvalidRequest("input is missing", param="input")
        if isinstance(asked.input, str):
            return [*earlier, {"type": "message", "role": "user", "content": asked.input}]
        return [*earlier, *asked.input]

    async def whole(self, answering: Answering) -> bytes:
        """The complete response."""
        events = ItemEvents(answering.given.details["tools"])
        async for _, outputs in answering.generation.events():
            for output in outputs:
                events.read(output)
        return encode(self._finished(answering, events))

    async def stream(self, answering: Answering) -> AsyncIterator[bytes]:
        """Named events from `response.created` to a terminal one."""
        events = ItemEvents(answering.given.details["tools"])
        begun = _response(answering, "in_progress", [], None)
        yield events.frame("response.created", {"response": begun}) + events.frame(
            "response.in_progress", {"response": begun}
        )
        try:
            async for _, outputs in answering.generation.events():
                frames = [events.read(output) for output in outputs]
                yield b"".join(frames)
        except MlxCbError as error:
            failed = _failed(_response(answering, "failed", events.output, None), error)
            yield events.close() + events.frame("response.failed", {"response": failed})
            return
        made = self._finished(answering, events)
        yield events.frame(f"response.{made['status']}", {"response": made})

    def _finished(self, answering: Answering, events: ItemEvents) -> dict[str, Any]:
        is_cut = events.finish is EndReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        made = _response(answering, status, events.output, answering.generation.usage)
        if is_cut:
            made["incomplete_details"] = {"reason": "max_output_tokens"}
        details = answering.given.details
        if details["asked"].store is not False:
            self._memory.keep(made["id"], [*details["items"], *events.output])
        return made


def _params(asked: ResponsesRequest) -> SamplingParams:
    given = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "max_tokens": asked.max_output_tokens,
    }
    params = SamplingParams.asked(given)
    wanted = (asked.text.format if asked.text else None) or {"type": "text"}
    if wanted.get("type") == "json_object":
        return with_grammar(params, schema_grammar({}, "text.format"))
    if wanted.get("type") == "json_schema":
        grammar = schema_grammar(wanted.get("schema"), "text.format.schema")
        return with_grammar(params, grammar)
    if wanted.get("type") != "text":
        raise InvalidRequest("text.format: unknown type", param="text.format")
    return params


def _tool_choice(asked: ResponsesRequest, functions: list[dict[str, Any]]) -> ToolChoice:
    wanted = asked.tool_choice or "auto"
    name: str | None = None
    allowed: list[str | None] | None = None
    if isinstance(wanted, WireToolChoice) and wanted.type == "allowed_tools":
        allowed = [_flat_name(tool) for tool in wanted.tools or []]
        wanted = wanted.mode or "auto"
    elif isinstance(wanted, WireToolChoice):
        name = _flat_name(wanted)
        wanted = "named"
    most = 1 if asked.parallel_tool_calls is False else None
    return choose_tools(functions, wanted, name, most_calls=most, allowed=allowed)


def _flat_name(tool: NamedTool) -> str | None:
    return None if tool.name is None else flat_name(tool.name, tool.namespace)


def _response(
    answering: Answering, status: str, output: list[Item], usage: Usage | None
) -> dict[str, Any]:
    asked: ResponsesRequest = answering.given.details["asked"]
    return {
        "id": f"resp_{answering.request_id}",
        "object": "response",
        "created_at": answering.created,
        "status": status,
        "model": answering.given.model,
        "output": output,
        "usage": None if usage is None else _usage(usage),
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "temperature": answering.given.params.temperature,
        "top_p": answering.given.params.top_p,
        "max_output_tokens": asked.max_output_tokens,
        "previous_response_id": asked.previous_response_id,
        "metadata": asked.metadata or {},
        "store": asked.store is not False,
        "truncation": "disabled",
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _failed(response: dict[str, Any], error: MlxCbError) -> dict[str, Any]:
    message = error.message
    if error.status in (429, 503):
        # Codex reads the time to wait out of this sentence.
        message = f"{message}; try again in {error.retry_after or 1:.1f}s"
    code = "rate_limit_exceeded" if error.status in (429, 503) else error.code
    return {**response, "error": {"code": code, "message": message}}


def stream_error(error: MlxCbError, request_id: str) -> bytes:
    """The last event of a stream that the server itself ends."""
    response = {"id": f"resp_{request_id}", "object": "response", "status": "failed", "output": []}
    body = {"type": "response.failed", "response": _failed(response, error)}
    return b"event: response.failed\ndata: %s\n\n" % encode(body)


def _keep_alive(answering: Answering) -> bytes:
    """A real event: comments do not count for Codex, which gives up after 300 silent seconds."""
    return b'event: keepalive\ndata: {"type":"keepalive"}\n\n'


def endpoints(front: Front) -> dict[str, Endpoint]:
    """Path → endpoint, all of them POST."""
    responses = Responses()
    dialect = Dialect(
        responses.parse,
        responses.whole,
        responses.stream,
        error_answer,
        stream_error,
        keep_alive=_keep_alive,
        request_type=ResponsesRequest,
        answer_type=Response,
    )
    return dict.fromkeys(PATHS, Endpoint(front, dialect))

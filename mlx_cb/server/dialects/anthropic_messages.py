"""Anthropic Messages: `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mlx_cb.errors import MlxCbError
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.server.answering import Answering, Dialect, Endpoint, JsonEndpoint
from mlx_cb.server.body import decode_json
from mlx_cb.server.dialects.answer_types import Message, TokenCount
from mlx_cb.server.dialects.anthropic_wire import (
    Block,
    WireMessage,
    WireTool,
    template_messages,
    template_tools,
)
from mlx_cb.server.dialects.replayed_calls import arguments_object
from mlx_cb.server.effort import effort_variables
from mlx_cb.server.front import Front, PromptTooLong
from mlx_cb.server.generate_input import GenerateInput
from mlx_cb.server.generation import Usage
from mlx_cb.server.streaming import Whole
from mlx_cb.server.structured import schema_grammar, with_grammar
from mlx_cb.server.tool_choice import ToolChoice, choose_tools
from mlx_cb.text.chat_template import ChatInput
from mlx_cb.text.events import (
    EndReason,
    Finish,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)

STOP_REASONS = {
    EndReason.STOP: "end_turn",
    EndReason.STOP_STRING: "stop_sequence",
    EndReason.LENGTH: "max_tokens",
    EndReason.TOOL_CALLS: "tool_use",
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Real signatures prove where thinking came from; here it only has to be there, clients keep it.
SIGNATURE = "mlx-cb"
encode = msgspec.json.Encoder().encode


class WireToolChoice(msgspec.Struct):
    """`tool_choice`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """`thinking`: enabled, adaptive or disabled."""

    type: str | None = None


class OutputConfig(msgspec.Struct):
    """`output_config`: a JSON schema for the answer, and how much to think."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """The body of count_tokens; keys not named here are ignored."""

    messages: list[WireMessage]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[WireTool] | None = None
    tool_choice: WireToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """The body of a message; keys not named here are ignored."""

    max_tokens: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None


def parse(body: bytes, front: Front) -> GenerateInput:
    """The body as a `GenerateInput`. Raises InvalidRequest naming the field."""
    asked = decode_json(body, MessagesRequest)
    chat, choice = _chat(asked)
    given = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "max_tokens": asked.max_tokens,
    }
    params = SamplingParams.asked(
        given,
        stop=tuple(text for text in asked.stop_sequences or () if text),
    )
    wanted = asked.output_config.format if asked.output_config else None
    grammar = None
    if wanted is not None and wanted.get("type") == "json_schema":
        grammar = schema_grammar(wanted.get("schema"), "output_config.format.schema")
    return GenerateInput(
        prompts=(chat,),
        params=with_grammar(params, grammar),
        model=front.resolve_name(asked.model),
        stream=bool(asked.stream),
        streams_calls=bool(asked.stream),
        prompt_field="messages",
        tool_choice=choice,
    )


def _chat(asked: CountRequest) -> tuple[ChatInput, ToolChoice]:
    tools, head = template_tools(asked.tools or [])
    wanted = asked.tool_choice or WireToolChoice("auto")
    words = {"any": "required", "tool": "named"}
    most = 1 if wanted.disable_parallel_tool_use else None
    word = words.get(wanted.type, wanted.type)
    choice = choose_tools(tools, word, wanted.name, most_calls=most)
    variables = effort_variables(asked.output_config.effort if asked.output_config else None)
    if asked.thinking is not None and asked.thinking.type in ("enabled", "disabled"):
        variables["enable_thinking"] = asked.thinking.type == "enabled"
    messages = template_messages(asked.system, asked.messages, tools)
    return ChatInput(messages, head if choice.tools else None, variables), choice


async def count_tokens(body: bytes, front: Front) -> bytes:
    """Size of a prompt: never waits for the engine."""
    chat, _ = _chat(decode_json(body, CountRequest))
    prompt = await front.encode(chat)
    return encode({"input_tokens": len(prompt.ids)})


@dataclass(slots=True)
class _Blocks:
    """Turns events into Anthropic's blocks: one open at a time, each started and stopped."""

    number: int = -1
    kind: str | None = None
    arguments: str = ""
    blocks: list[dict[str, Any]] = field(default_factory=list)
    finish: Finish = field(default_factory=lambda: Finish(EndReason.STOP))

    def read(self, event: OutputEvent) -> list[tuple[str, dict[str, Any]]]:
        """The stream events of one output event; `blocks` grows alongside."""
        match event:
            case ReasoningDelta(text):
                made = self._open("thinking", {"thinking": "", "signature": ""})
                self.blocks[-1]["thinking"] += text
                return [*made, self._delta({"type": "thinking_delta", "thinking": text})]
            case TextDelta(text):
                made = self._open("text", {"text": ""})
                self.blocks[-1]["text"] += text
                return [*made, self._delta({"type": "text_delta", "text": text})]
            case ToolCallStart(_, call_id, name):
                tool_id = "toolu_" + call_id.removeprefix("call_")
                start = {"id": tool_id, "name": name, "input": {}}
                return [*self.close(), *self._open("tool_use", start)]
            case ToolCallDelta(_, arguments):
                self.arguments += arguments
                return [self._delta({"type": "input_json_delta", "partial_json": arguments})]
            case Finish():
                self.finish = event
                return self.close()

    def close(self) -> list[tuple[str, dict[str, Any]]]:
        """Stop the open block, if there is one."""
        if self.kind is None:
            return []
        made = []
        if self.kind == "thinking":
            self.blocks[-1]["signature"] = SIGNATURE
            made.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        elif self.kind == "tool_use":
            self.blocks[-1]["input"] = arguments_object(self.arguments)
            self.arguments = ""
        self.kind = None
        return [*made, ("content_block_stop", {"index": self.number})]

    def _open(self, kind: str, start: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        if self.kind == kind and kind != "tool_use":
            return []
        made = self.close()
        self.kind = kind
        self.number += 1
        block = {"type": kind, **start}
        self.blocks.append(dict(block))
        return [*made, ("content_block_start", {"index": self.number, "content_block": block})]

    def _delta(self, delta: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "content_block_delta", {"index": self.number, "delta": delta}


def _frame(name: str, content: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode({"type": name, **content}))


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _message(answering: Answering) -> dict[str, Any]:
    return {
        "id": f"msg_{answering.request_id}",
        "type": "message",
        "role": "assistant",
        "model": answering.given.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _end(finish: Finish) -> dict[str, Any]:
    return {"stop_reason": STOP_REASONS[finish.reason], "stop_sequence": finish.stop}


async def whole(answering: Answering) -> bytes:
    """The complete message."""
    blocks = _Blocks()
    async for _, events in answering.generation.events():
        for event in events:
            blocks.read(event)
    end = _end(blocks.finish)
    usage = _usage(answering.generation.usage)
    return encode({**_message(answering), "content": blocks.blocks, **end, "usage": usage})


async def stream(answering: Answering) -> AsyncIterator[bytes]:
    """Named SSE events. `message_start` waits for the first token: only then is it known how
    much of the prompt was cached; until then pings keep the connection alive."""
    blocks = _Blocks()
    is_started = False
    async for _, events in answering.generation.events():
        frames = []
        if not is_started:
            is_started = True
            usage = {**_usage(answering.generation.usage), "output_tokens": 0}
            message = {**_message(answering), "usage": usage}
            frames = [_frame("message_start", {"message": message}), _frame("ping", {})]
        frames += [_frame(*made) for event in events for made in blocks.read(event)]
        yield b"".join(frames)
    usage = _usage(answering.generation.usage)
    delta = {"delta": _end(blocks.finish), "usage": usage}
    yield _frame("message_delta", delta) + _frame("message_stop", {})


def _error_object(error: MlxCbError, request_id: str) -> dict[str, Any]:
    message = error.message
    if isinstance(error, PromptTooLong):
        # Claude Code reads both numbers out of this sentence and then compacts.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.limit} maximum"
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, other)
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def error_answer(error: MlxCbError, request_id: str) -> Whole:
    """An error before anything was sent."""
    return Whole(encode(_error_object(error, request_id)), error.status)


def stream_error(error: MlxCbError, request_id: str) -> bytes:
    """An error as the last event of a stream."""
    return b"event: error\ndata: %s\n\n" % encode(_error_object(error, request_id))


DIALECT = Dialect(
    parse,
    whole,
    stream,
    error_answer,
    stream_error,
    keep_alive=lambda answering: _frame("ping", {}),
    request_type=MessagesRequest,
    answer_type=Message,
)


def endpoints(front: Front) -> dict[str, Endpoint | JsonEndpoint]:
    """Path → endpoint, all of them POST."""
    return {
        "/v1/messages": Endpoint(front, DIALECT),
        "/v1/messages/count_tokens": JsonEndpoint(
            front, count_tokens, error_answer, CountRequest, TokenCount
        ),
    }

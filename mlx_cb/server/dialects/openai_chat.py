"""OpenAI Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from msgspec import Struct

from mlx_cb.errors import InvalidRequest
from mlx_cb.server.answering import Answering, Dialect, Endpoint
from mlx_cb.server.body import decode_json
from mlx_cb.server.dialects.answer_types import ChatCompletion
from mlx_cb.server.dialects.chat_reasoning import ReasoningForm
from mlx_cb.server.dialects.openai_messages import WireMessage, template_messages
from mlx_cb.server.dialects.openai_wire import (
    DONE,
    FINGERPRINT,
    FINISH_WORDS,
    SamplingFields,
    choices_wanted,
    encode,
    error_answer,
    sampling_params,
    stream_error,
    usage_object,
    wants_usage,
)
from mlx_cb.server.effort import effort_variables
from mlx_cb.server.front import Front
from mlx_cb.server.generate_input import GenerateInput
from mlx_cb.server.tool_choice import ToolChoice, choose_tools
from mlx_cb.text.chat_template import ChatInput
from mlx_cb.text.events import (
    Finish,
    OutputEvent,
    ReasoningDelta,
    ScoredToken,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)

PATHS = ("/v1/chat/completions", "/chat/completions", "/api/v0/chat/completions")


class NamedFunction(Struct):
    """The function that a choice means."""

    name: str | None = None


class NamedTool(Struct):
    """A tool by its name."""

    function: NamedFunction | None = None


class AllowedTools(Struct):
    """`tool_choice.allowed_tools`: those of the tools that may be called now."""

    mode: str = "auto"
    tools: list[NamedTool] = []


class WireToolChoice(NamedTool):
    """`tool_choice`, where it is more than a word."""

    allowed_tools: AllowedTools | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """The body; keys not named here are ignored."""

    messages: list[WireMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | WireToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


def parse(body: bytes, front: Front) -> GenerateInput:
    """The body as a `GenerateInput`. Raises InvalidRequest naming the field."""
    asked = decode_json(body, ChatRequest)
    if asked.top_logprobs and not asked.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    params = sampling_params(asked, logprobs=logprobs)
    if params.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    choice = _tool_choice(asked)
    variables = effort_variables(asked.reasoning_effort) | (asked.chat_template_kwargs or {})
    chat = ChatInput(
        template_messages(asked.messages), choice.tools, variables, asked.continue_final_message
    )
    return GenerateInput(
        prompts=(chat,),
        params=params,
        n=choices_wanted(asked),
        model=front.resolve_name(asked.model),
        stream=bool(asked.stream),
        streams_calls=bool(asked.stream),
        prompt_field="messages",
        tool_choice=choice,
        details={"include_usage": wants_usage(asked)},
    )


def _tool_choice(asked: ChatRequest) -> ToolChoice:
    wanted = asked.tool_choice or "auto"
    name: str | None = None
    allowed: list[str | None] | None = None
    if isinstance(wanted, WireToolChoice) and wanted.allowed_tools is not None:
        allowed = [_name(tool) for tool in wanted.allowed_tools.tools]
        wanted = wanted.allowed_tools.mode
    elif isinstance(wanted, WireToolChoice):
        name = _name(wanted)
        wanted = "named"
    most = 1 if asked.parallel_tool_calls is False else None
    return choose_tools(asked.tools, wanted, name, most_calls=most, allowed=allowed)


def _name(tool: NamedTool) -> str | None:
    return tool.function.name if tool.function is not None else None


async def whole(answering: Answering) -> bytes:
    """The complete answer."""
    generation = answering.generation
    key = answering.front.config.reasoning_key
    gathered = {choice.index: _Message(ReasoningForm(key)) for choice in generation.choices}
    async for choice, events in generation.events():
        gathered[choice.index].add(events)
    head = _head(answering, "chat.completion")
    choices = [gathered[index].as_choice(index) for index in sorted(gathered)]
    return encode({**head, "choices": choices, "usage": usage_object(generation.usage)})


class _Message:
    """An assistant message while its events come in."""

    def __init__(self, form: ReasoningForm) -> None:
        self._form = form
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] | None = None
        self.finish = "stop"

    def add(self, events: list[OutputEvent]) -> None:
        for event in self._form.shown(events):
            self._add(event)

    def _add(self, event: OutputEvent) -> None:
        match event:
            case TextDelta(text, scores):
                self.text.append(text)
                if scores is not None:
                    self.logprobs = (self.logprobs or []) + [_logprob(s) for s in scores]
            case ReasoningDelta(text):
                self.reasoning.append(text)
            case ToolCallStart(_, call_id, name):
                function = {"name": name, "arguments": ""}
                self.calls.append({"id": call_id, "type": "function", "function": function})
            case ToolCallDelta(index, arguments):
                self.calls[index]["function"]["arguments"] += arguments
            case Finish(reason):
                self.finish = FINISH_WORDS[reason]

    def as_choice(self, index: int) -> dict[str, Any]:
        text = "".join(self.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.reasoning:
            message |= self._form.fields("".join(self.reasoning))
        if self.calls:
            message["content"] = text or None
            message["tool_calls"] = self.calls
        logprobs = None if self.logprobs is None else {"content": self.logprobs, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self.finish,
        }


async def stream(answering: Answering) -> AsyncIterator[bytes]:
    """The answer as SSE chunks, ended by [DONE]."""
    generation = answering.generation
    include_usage = answering.given.details["include_usage"]
    frames = [_Frames(answering, choice.index, include_usage) for choice in generation.choices]
    yield b"".join([frame.role() for frame in frames])
    async for choice, events in generation.events():
        yield frames[choice.index].events(events)
    end = DONE
    if include_usage:
        head = _head(answering, "chat.completion.chunk")
        usage = {**head, "choices": [], "usage": usage_object(generation.usage)}
        end = b"data: " + encode(usage) + b"\n\n" + DONE
    yield end


class _Frames:
    """Chunks of one choice: all that does not change is encoded once."""

    def __init__(self, answering: Answering, index: int, include_usage: bool) -> None:
        head = encode(_head(answering, "chat.completion.chunk"))[:-1]
        self._form = ReasoningForm(answering.front.config.reasoning_key)
        self._before = b'data: %s,"choices":[{"index":%d,"delta":' % (head, index)
        tail = b"}]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._after = b',"logprobs":null,"finish_reason":null' + tail
        self._tail = tail

    def role(self) -> bytes:
        return self._before + b'{"role":"assistant","content":""}' + self._after

    def events(self, events: list[OutputEvent]) -> bytes:
        return b"".join([self._event(event) for event in self._form.shown(events)])

    def _event(self, event: OutputEvent) -> bytes:
        match event:
            case TextDelta(text, None):
                return self._before + b'{"content":' + encode(text) + b"}" + self._after
            case TextDelta(text, scores):
                logprobs = {"content": [_logprob(s) for s in scores or ()], "refusal": None}
                return self._chunk({"content": text}, logprobs)
            case ReasoningDelta(text):
                return self._chunk(self._form.fields(text))
            case ToolCallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                return self._chunk({"tool_calls": [call]})
            case ToolCallDelta(index, arguments):
                call = {"index": index, "function": {"arguments": arguments}}
                return self._chunk({"tool_calls": [call]})
            case Finish(reason):
                return self._chunk({}, None, FINISH_WORDS[reason])

    def _chunk(self, delta: Any, logprobs: Any = None, finish: str | None = None) -> bytes:
        rest = b',"logprobs":%s,"finish_reason":%s' % (encode(logprobs), encode(finish))
        return self._before + encode(delta) + rest + self._tail


def _head(answering: Answering, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answering.request_id}",
        "object": kind,
        "created": answering.created,
        "model": answering.given.model,
        "system_fingerprint": FINGERPRINT,
    }


def _logprob(score: ScoredToken) -> dict[str, Any]:
    return {**_token(score), "top_logprobs": [_token(other) for other in score.top]}


def _token(score: ScoredToken) -> dict[str, Any]:
    value = None if score.bytes is None else list(score.bytes)
    return {"token": score.text, "logprob": score.logprob, "bytes": value}


DIALECT = Dialect(
    parse,
    whole,
    stream,
    error_answer,
    stream_error,
    request_type=ChatRequest,
    answer_type=ChatCompletion,
)


def endpoints(front: Front) -> dict[str, Endpoint]:
    """Path → endpoint, all of them POST."""
    endpoint = Endpoint(front, DIALECT)
    return dict.fromkeys(PATHS, endpoint)

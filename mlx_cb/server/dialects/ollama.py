"""Ollama's generating endpoints: `POST /api/chat` and `/api/generate`, NDJSON by default."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mlx_cb.server.answering import Answering, Dialect, Endpoint
from mlx_cb.server.body import decode_json
from mlx_cb.server.dialects.answer_types import OllamaChat, OllamaGeneration
from mlx_cb.server.dialects.ollama_wire import (
    Options,
    WireMessage,
    encode,
    error_answer,
    plain_name,
    refuse_images,
    sampling_params,
    stream_error,
    template_messages,
    timestamp,
)
from mlx_cb.server.effort import effort_variables
from mlx_cb.server.front import Front
from mlx_cb.server.generate_input import GenerateInput, PromptInput
from mlx_cb.server.streaming import NDJSON, Whole
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

NANOSECONDS = 10**9


class _Fields(msgspec.Struct, kw_only=True):
    """What both endpoints take."""

    model: str
    stream: bool = True
    options: Options | None = None
    think: bool | str | None = None
    keep_alive: int | float | str | None = None
    format: Any = None


class ChatRequest(_Fields, kw_only=True):
    """The body of a chat; keys not named here are ignored."""

    messages: list[WireMessage] = []
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(_Fields, kw_only=True):
    """The body of a generation; keys not named here are ignored."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool = False
    images: list[Any] | None = None


def parse_chat(body: bytes, front: Front) -> GenerateInput | Whole:
    """The body as a `GenerateInput`; an empty prompt is answered at once.

    Raises InvalidRequest naming the field.
    """
    asked = decode_json(body, ChatRequest)
    choice = choose_tools(asked.tools or None, "auto", None, most_calls=None)
    if not asked.messages:
        return _loaded(asked, front, _chat_content("", "", []))
    chat = ChatInput(template_messages(asked.messages), choice.tools, _variables(asked.think))
    return _given(asked, front, chat, choice)


def parse_generate(body: bytes, front: Front) -> GenerateInput | Whole:
    """The body as a `GenerateInput`; an empty prompt is answered at once.

    Raises InvalidRequest naming the field.
    """
    asked = decode_json(body, GenerateRequest)
    refuse_images(asked.images, "generate")
    if asked.suffix:
        gap = front.fill_in_middle().prompt(asked.prompt, asked.suffix)
        return _given(asked, front, gap, ToolChoice())
    if not asked.prompt:
        return _loaded(asked, front, _generate_content("", "", []))
    if asked.raw:
        return _given(asked, front, asked.prompt, ToolChoice())
    messages = [{"role": "system", "content": asked.system}] if asked.system else []
    messages.append({"role": "user", "content": asked.prompt})
    return _given(asked, front, ChatInput(messages, None, _variables(asked.think)), ToolChoice())


def _given(asked: _Fields, front: Front, prompt: PromptInput, choice: ToolChoice) -> GenerateInput:
    grammar = None
    if asked.format not in (None, ""):
        schema = {} if asked.format == "json" else asked.format
        grammar = schema_grammar(schema, "format")
    return GenerateInput(
        prompts=(prompt,),
        params=with_grammar(sampling_params(asked.options), grammar),
        model=_name(asked, front),
        stream=asked.stream,
        tool_choice=choice,
        prompt_field="messages" if isinstance(asked, ChatRequest) else "prompt",
    )


def _name(asked: _Fields, front: Front) -> str:
    """The name to answer with: the client's own, if it means this model."""
    plain = plain_name(asked.model)
    return asked.model if plain in front.names() else front.resolve_name(plain)


def _variables(think: bool | str | None) -> dict[str, Any]:
    if isinstance(think, str):
        return {"enable_thinking": True, **effort_variables(think)}
    return {} if think is None else {"enable_thinking": think}


def _loaded(asked: _Fields, front: Front, empty: dict[str, Any]) -> Whole:
    """The answer to an empty prompt, which only asks that the model be loaded or unloaded."""
    reason = "unload" if asked.keep_alive in (0, "0", "0s") else "load"
    head = {"model": _name(asked, front), "created_at": timestamp()}
    line = encode({**head, **empty, "done": True, "done_reason": reason})
    return Whole(line + b"\n", media_type=NDJSON) if asked.stream else Whole(line)


@dataclass(slots=True)
class _Lines:
    """Turns events into lines; `wrap` puts a text and a thought into the endpoint's own keys."""

    answering: Answering
    wrap: Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]
    name: str = ""
    finish: EndReason = EndReason.STOP
    first_token: float | None = None
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def read(self, event: OutputEvent) -> dict[str, Any] | None:
        """The content of one event's line, None if it has none."""
        self.first_token = self.first_token or time.monotonic()
        match event:
            case TextDelta(text):
                self.texts.append(text)
                return self.wrap(text, "", [])
            case ReasoningDelta(text):
                self.thoughts.append(text)
                return self.wrap("", text, [])
            case ToolCallStart(_, _, name):
                self.name = name
            case ToolCallDelta(index, arguments):
                function = {"index": index, "name": self.name, "arguments": json.loads(arguments)}
                self.calls.append({"function": function})
                return self.wrap("", "", self.calls[-1:])
            case Finish(reason):
                self.finish = reason
        return None

    def line(self, content: dict[str, Any], **more: Any) -> bytes:
        """One line: model, time, content, whether it is the last."""
        head = {"model": self.answering.given.model, "created_at": timestamp()}
        return encode({**head, **content, "done": False, **more})

    def last(self, content: dict[str, Any]) -> bytes:
        """The line that ends the answer, with its counts and times in nanoseconds."""
        generation = self.answering.generation
        now = time.monotonic()
        first = self.first_token or now
        usage = generation.usage
        return self.line(
            content,
            done=True,
            done_reason="length" if self.finish is EndReason.LENGTH else "stop",
            total_duration=int((now - generation.arrived) * NANOSECONDS),
            load_duration=0,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=int((first - generation.arrived) * NANOSECONDS),
            eval_count=usage.completion_tokens,
            eval_duration=int((now - first) * NANOSECONDS),
        )


def _chat_content(text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["thinking"] = thought
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def _generate_content(text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"response": text, "thinking": thought} if thought else {"response": text}


def _dialect(
    parse: Callable[[bytes, Front], GenerateInput | Whole],
    wrap: Callable[[str, str, list[dict[str, Any]]], dict[str, Any]],
    request_type: type,
    answer_type: type,
) -> Dialect:
    async def whole(answering: Answering) -> bytes:
        lines = _Lines(answering, wrap)
        async for _, events in answering.generation.events():
            for event in events:
                lines.read(event)
        return lines.last(wrap("".join(lines.texts), "".join(lines.thoughts), lines.calls))

    async def stream(answering: Answering) -> AsyncIterator[bytes]:
        lines = _Lines(answering, wrap)
        async for _, events in answering.generation.events():
            contents = [content for event in events if (content := lines.read(event))]
            if contents:
                yield b"".join(lines.line(content) + b"\n" for content in contents)
        yield lines.last(wrap("", "", [])) + b"\n"

    def keep_alive(answering: Answering) -> bytes:
        return _Lines(answering, wrap).line(wrap("", "", [])) + b"\n"

    return Dialect(
        parse,
        whole,
        stream,
        error_answer,
        stream_error,
        NDJSON,
        keep_alive,
        request_type,
        answer_type,
    )


def endpoints(front: Front) -> dict[str, Endpoint]:
    """Path → endpoint, all of them POST."""
    return {
        "/api/chat": Endpoint(front, _dialect(parse_chat, _chat_content, ChatRequest, OllamaChat)),
        "/api/generate": Endpoint(
            front, _dialect(parse_generate, _generate_content, GenerateRequest, OllamaGeneration)
        ),
    }

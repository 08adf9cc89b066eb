"""Ollama's messages, options and errors on the wire. Knows nothing about endpoints."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from mlx_cb.errors import InvalidRequest, MlxCbError
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.server.dialects.replayed_calls import WireToolCall
from mlx_cb.server.front import Front
from mlx_cb.server.streaming import Whole
from mlx_cb.text.chat_template import Message

encode = msgspec.json.Encoder().encode


class Options(msgspec.Struct):
    """`options`; a context size (`num_ctx`) is the server's to decide and ignored."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class WireMessage(msgspec.Struct):
    """A message as clients send it."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[WireToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def sampling_params(options: Options | None) -> SamplingParams:
    """Parameters of a request. Raises InvalidRequest naming the option."""
    given = options or Options()
    named = {
        "temperature": given.temperature,
        "top_k": 0 if given.top_k == -1 else given.top_k,
        "top_p": given.top_p,
        "min_p": given.min_p,
        "repetition_penalty": given.repeat_penalty,
        "presence_penalty": given.presence_penalty,
        "frequency_penalty": given.frequency_penalty,
    }
    stop = [given.stop] if isinstance(given.stop, str) else given.stop or []
    return SamplingParams.asked(
        named,
        # -1 and -2 both mean "as long as there is room"
        max_tokens=None if given.num_predict in (-1, -2) else given.num_predict,
        seed=None if given.seed == -1 else given.seed,
        stop=tuple(text for text in stop if text),
    )


def template_messages(messages: list[WireMessage]) -> list[Message]:
    """Messages as templates take them. Raises InvalidRequest naming the message at fault."""
    made: list[Message] = []
    last_ids: list[str] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role not in ("system", "user", "assistant", "tool"):
            raise InvalidRequest(f"{where}.role is {message.role!r}", param=f"{where}.role")
        refuse_images(message.images, where)
        one: Message = {"role": message.role, "content": message.content or ""}
        if message.thinking and message.role == "assistant":
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            one["tool_calls"] = [
                _call(c, f"call_{number}_{k}") for k, c in enumerate(message.tool_calls)
            ]
            last_ids = [call["id"] for call in one["tool_calls"]]
        if message.role == "tool":
            # Results come in the order of the calls, mostly without ids.
            one["tool_call_id"] = message.tool_call_id or (last_ids.pop(0) if last_ids else "")
            if message.tool_name:
                one["name"] = message.tool_name
        made.append(one)
    return made


def _call(call: WireToolCall, fallback_id: str) -> dict[str, Any]:
    arguments = call.function.arguments
    function = {
        "name": call.function.name,
        "arguments": {} if arguments is None else arguments,
    }
    return {"id": call.id or fallback_id, "type": "function", "function": function}


def refuse_images(images: list[Any] | None, where: str) -> None:
    """Raises InvalidRequest when there are images: the model takes text only."""
    if images:
        raise InvalidRequest(f"{where}.images: this model takes text only", param=f"{where}.images")


def plain_name(name: str | None) -> str | None:
    """A model's name without the `:latest` that Ollama's clients add."""
    return name.removesuffix(":latest") if name else None


def tagged_name(front: Front) -> str:
    """The served name as Ollama's clients expect it: with a tag."""
    name = front.served_name
    return name if ":" in name else f"{name}:latest"


def timestamp(seconds: float | None = None) -> str:
    """RFC 3339, UTC."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


def error_answer(error: MlxCbError, request_id: str) -> Whole:
    """`{"error": "…"}`: an object instead of a string is shown raw by clients."""
    return Whole(encode({"error": error.message}), error.status)


def stream_error(error: MlxCbError, request_id: str) -> bytes:
    """An error as the last line of a stream."""
    return encode({"error": error.message}) + b"\n"

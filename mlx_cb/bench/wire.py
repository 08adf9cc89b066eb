"""The OpenAI wire format as the load generator uses it: bodies out, chunks in.

Speaks `/v1/completions` and `/v1/chat/completions`, streaming only. Knows nothing about timing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from mlx_cb.bench.calls import Scalar


class Api(Enum):
    """Which endpoint the prompts go to."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Path below the server's base URL."""
        return "/v1/completions" if self is Api.COMPLETIONS else "/v1/chat/completions"


def body(
    api: Api,
    prompt: str | list[int],
    *,
    model: str | None,
    max_tokens: int,
    fields: Iterable[tuple[str, Scalar]] = (),
) -> bytes:
    """JSON of one streaming request.

    Temperature is 0 unless `fields` says otherwise, and no seed is sent: a seed makes
    mlx_lm.server drain its batch.
    """
    content: dict[str, object] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": max_tokens,
        **dict(fields),
    }
    if model is not None:
        content["model"] = model
    if api is Api.COMPLETIONS:
        content["prompt"] = prompt
    else:
        content["messages"] = [{"role": "user", "content": prompt}]
    return msgspec.json.encode(content)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def said(self) -> str:
        """Visible text of this chunk, answer or reasoning."""
        if self.delta is None:
            return self.text or ""
        delta = self.delta
        return (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Answer:
    """A stream read to its end. `chunk_times` are arrivals of chunks with content."""

    chunk_times: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int | None = None
    cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


def read_stream(pieces: Iterable[tuple[float, bytes]]) -> Answer:
    """Read SSE from body pieces; a chunk's time is that of the piece that completed it.

    Raises msgspec.DecodeError (or ValidationError) for a data line that is not a chunk.
    """
    answer, texts, pending = Answer(), [], b""
    for arrived, piece in pieces:
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload and payload != b"[DONE]":
                said = _read_chunk(answer, _decode_chunk(payload))
                if said:
                    answer.chunk_times.append(arrived)
                    texts.append(said)
    answer.text = "".join(texts)
    return answer


def _read_chunk(answer: Answer, chunk: _Chunk) -> str:
    if chunk.error is not None:
        answer.error = msgspec.json.encode(chunk.error).decode()
    if chunk.usage is not None:
        answer.prompt_tokens = chunk.usage.prompt_tokens
        answer.output_tokens = chunk.usage.completion_tokens
        details = chunk.usage.prompt_tokens_details
        answer.cached_tokens = (details.cached_tokens or 0) if details else 0
    said = ""
    for choice in chunk.choices:
        said += choice.said
        answer.finish_reason = choice.finish_reason or answer.finish_reason
    return said

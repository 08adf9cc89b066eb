"""The answers of all APIs as types, for the API's description; the dialects write them as they go.

A test holds every answer against its type here. Fields that an answer may lack have a default.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class ErrorDetails(Struct):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(Struct):
    """The body of a refused request."""

    error: ErrorDetails


class AnthropicErrorDetails(Struct):
    """What went wrong, in Anthropic's words."""

    type: str
    message: str


class AnthropicError(Struct):
    """The body of a refused request."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str


class OllamaError(Struct):
    """The body of a refused request."""

    error: str


class CachedTokens(Struct):
    """How much of a prompt was in the prefix cache."""

    cached_tokens: int


class ReasoningTokens(Struct):
    """How much of an answer was reasoning."""

    reasoning_tokens: int


class Usage(Struct):
    """Tokens taken."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class CalledFunction(Struct):
    """A call; arguments are JSON text."""

    name: str
    arguments: str


class ToolCall(Struct):
    """One call of an answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Struct):
    """The answer; `content` is null when there are only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Struct):
    """One of the answers."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class _OpenAIAnswer(Struct, kw_only=True):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatCompletion(_OpenAIAnswer, kw_only=True):
    """A chat's answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextChoice(Struct):
    """One of the texts."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class Completion(_OpenAIAnswer, kw_only=True):
    """A text's continuation."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class OneEmbedding(Struct):
    """A text's vector, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct):
    """Tokens taken."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    """The vectors of all texts."""

    object: Literal["list"]
    model: str
    data: list[OneEmbedding]
    usage: EmbeddingUsage


class ResponseUsage(Struct):
    """Tokens taken."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Response(Struct):
    """A response and its items."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage
    error: None
    incomplete_details: dict[str, str] | None


class MessageUsage(Struct):
    """Tokens taken; `input_tokens` does not count the cached ones."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class Message(Struct):
    """A message and its blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "stop_sequence", "max_tokens", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Struct):
    """Size of a prompt."""

    input_tokens: int


class OllamaMessage(Struct):
    """The answer."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _OllamaAnswer(Struct, kw_only=True):
    model: str
    created_at: str
    done: bool
    done_reason: str
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChat(_OllamaAnswer, kw_only=True):
    """A chat's answer; durations in nanoseconds."""

    message: OllamaMessage


class OllamaGeneration(_OllamaAnswer, kw_only=True):
    """A generation's answer; durations in nanoseconds."""

    response: str
    thinking: str | None = None


class OllamaEmbeddings(Struct):
    """The vectors of all texts."""

    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int | None = None


class OllamaEmbedding(Struct):
    """The vector of one text."""

    embedding: list[float]


class OllamaStatus(Struct):
    """A step of pulling."""

    status: str


class OllamaModel(Struct):
    """A model in detail."""

    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    template: str
    modified_at: str


class LlamaCompletion(Struct):
    """llama.cpp's answer."""

    index: int
    content: str
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    timings: dict[str, float]


#: One answer, or as many as `n_cmpl` says.
LlamaAnswer = LlamaCompletion | list[LlamaCompletion]


class Tokens(Struct):
    """Token ids, or with pieces asked for, objects."""

    tokens: list[int | dict[str, Any]]
    count: int | None = None
    max_model_len: int | None = None


class DetokenizedText(Struct):
    """A text under both APIs' keys."""

    content: str
    prompt: str


class RenderedPrompt(Struct):
    """A chat as the model reads it."""

    prompt: str


class ModelList(Struct):
    """The models that can be used."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class OllamaModels(Struct):
    """The models that can be used, or are loaded."""

    models: list[dict[str, Any]]

"""What OpenAI's APIs have in common on the wire: error bodies, sampling fields, usage.

Plain functions and types that the OpenAI dialects use side by side; no dialect lives here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mlx_cb.errors import InvalidRequest, MlxCbError, Overloaded
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.server.generate_input import PromptInput
from mlx_cb.server.generation import Usage
from mlx_cb.server.streaming import Whole
from mlx_cb.server.structured import (
    choice_grammar,
    lark_grammar,
    regex_grammar,
    schema_grammar,
    with_grammar,
)
from mlx_cb.text.events import EndReason

FINGERPRINT = "mlx-cb"
DONE = b"data: [DONE]\n\n"
FINISH_WORDS = {
    EndReason.STOP: "stop",
    EndReason.STOP_STRING: "stop",
    EndReason.LENGTH: "length",
    EndReason.TOOL_CALLS: "tool_calls",
}
encode = msgspec.json.Encoder().encode


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields of every OpenAI generation request; null means default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None


def sampling_params(
    fields: SamplingFields, *, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """The request's parameters. Raises InvalidRequest naming the field."""
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    repetition = fields.repetition_penalty
    if repetition is None:
        repetition = fields.repeat_penalty
    given = {
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        # llama.cpp's clients send -1 for "no limit"
        "top_k": 0 if fields.top_k == -1 else fields.top_k,
        "min_p": fields.min_p,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "repetition_penalty": repetition,
        "min_tokens": fields.min_tokens,
        "ignore_eos": fields.ignore_eos,
    }
    params = SamplingParams.asked(
        given,
        # -1 is a habit of llama.cpp's clients: any seed, unlimited tokens.
        seed=None if fields.seed == -1 else fields.seed,
        max_tokens=_max_tokens(fields),
        stop=tuple(text for text in stop if text),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logit_bias=_logit_bias(fields.logit_bias or {}),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return with_grammar(params, _grammar(fields))


def _grammar(fields: SamplingFields) -> str | None:
    """What the answer has to follow."""
    if fields.guided_regex:
        return regex_grammar(fields.guided_regex, "guided_regex")
    if fields.guided_grammar:
        return lark_grammar(fields.guided_grammar, "guided_grammar")
    if fields.guided_choice:
        return choice_grammar(fields.guided_choice, "guided_choice")
    if fields.guided_json:
        return schema_grammar(fields.guided_json, "guided_json")
    wanted = fields.response_format or {"type": "text"}
    kind, param = wanted.get("type"), "response_format"
    if kind == "json_object":
        return schema_grammar({}, param)
    if kind == "json_schema":
        inner = wanted.get("json_schema")
        if not isinstance(inner, dict) or "schema" not in inner:
            raise InvalidRequest("response_format.json_schema.schema is missing", param=param)
        return schema_grammar(inner["schema"], "response_format.json_schema.schema")
    if kind != "text":
        raise InvalidRequest(f"response_format: type {kind!r} is not known", param=param)
    return None


def prompt_inputs(given: str | list[str | int | list[int]], param: str) -> tuple[PromptInput, ...]:
    """One or more texts or lists of token ids. Raises InvalidRequest naming `param`."""
    if isinstance(given, str):
        return (given,)
    if not given:
        raise InvalidRequest(f"{param} must not be an empty list", param=param)
    if all(isinstance(part, int) for part in given):
        return ([part for part in given if isinstance(part, int)],)
    if any(isinstance(part, int) for part in given):
        raise InvalidRequest(f"{param}: token ids and texts cannot be mixed", param=param)
    return tuple(part for part in given if not isinstance(part, int))


def choices_wanted(fields: SamplingFields) -> int:
    """`n`. Raises InvalidRequest below 1; the upper bound is `GenerateInput`'s."""
    n = 1 if fields.n is None else fields.n
    if n < 1:
        raise InvalidRequest(f"n must be at least 1, not {n}", param="n")
    return n


def wants_usage(fields: SamplingFields) -> bool:
    """True when the stream must end with a usage chunk."""
    return bool(fields.stream_options and fields.stream_options.include_usage)


def _max_tokens(fields: SamplingFields) -> int | None:
    newer = fields.max_completion_tokens
    value = fields.max_tokens if newer is None else newer
    return None if value == -1 else value


def _logit_bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, bias in given.items():
        if not key.isdecimal():
            raise InvalidRequest(f"logit_bias: {key!r} is not a token id", param="logit_bias")
        pairs.append((int(key), bias))
    return tuple(pairs)


def error_type(error: MlxCbError) -> str:
    """OpenAI's `type` for an error."""
    if isinstance(error, Overloaded):
        return "rate_limit_error"
    if error.status == 401:
        return "authentication_error"
    if error.status == 403:
        return "permission_error"
    return "invalid_request_error" if error.status < 500 else "server_error"


def error_object(error: MlxCbError) -> dict[str, Any]:
    """The body of an error answer."""
    return {
        "error": {
            "message": error.message,
            "type": error_type(error),
            "param": error.param,
            "code": error.code,
        }
    }


def error_answer(error: MlxCbError, request_id: str) -> Whole:
    """An error before anything was sent."""
    return Whole(encode(error_object(error)), error.status)


def stream_error(error: MlxCbError, request_id: str) -> bytes:
    """An error as the last event of a stream; no [DONE] follows, the answer is not complete."""
    return b"data: " + encode(error_object(error)) + b"\n\n"


def usage_object(usage: Usage) -> dict[str, Any]:
    """`usage` of an answer."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }

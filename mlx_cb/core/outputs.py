"""What the engine says about a request's progress; plain data that crosses process borders.

Structs of msgspec and not dataclasses, since thousands are made, sent and read per second: each
costs a tenth to make and, as an array without its fields' names, to send.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class FinishReason(Enum):
    """Why a request ended. Every accepted request ends with exactly one of these.

    DEADLINE: its time was over; what it had produced by then is its answer.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position, from the unmodified logits.

    Attributes:
        token_id: the token at this position.
        logprob: its natural log-probability.
        rank: 1 for the most probable token.
        top_ids, top_logprobs: the most probable alternatives, best first, as many as asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class SampledToken(msgspec.Struct, array_like=True, gc=False):
    """One token chosen by a step for one request. Not changed once made."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes | None = None


class RequestOutput(msgspec.Struct, array_like=True, gc=False):
    """What one step added to one request. Not changed once made.

    Attributes:
        token_ids: new tokens, without the token that ended the request.
        logprobs: one entry per new token when asked for.
        prompt_logprobs: with the first output when asked for; entry i belongs to prompt token
            i + 1.
        finish_reason: set on the last output of the request, and only there.
        stop_token_id: the end-of-sequence or stop token that ended it.
        num_prompt_tokens, num_cached_tokens: prompt length, and how much of it was in the cache.
        error: what went wrong, for FinishReason.ERROR.
        embedding: an embedding model's vector, of length 1, as little-endian float32.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None
    embedding: bytes | None = None

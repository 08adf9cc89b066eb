"""OpenAI text completions: `POST /v1/completions`, with echo, log-probabilities, token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from mlx_cb.errors import InvalidRequest
from mlx_cb.sampling_params import MAX_LOGPROBS
from mlx_cb.server.answering import Answering, Dialect, Endpoint
from mlx_cb.server.body import decode_json
from mlx_cb.server.dialects import openai_wire as wire
from mlx_cb.server.dialects.answer_types import Completion
from mlx_cb.server.front import Front
from mlx_cb.server.generate_input import GenerateInput, PromptInput
from mlx_cb.server.generation import Choice
from mlx_cb.text.events import Finish, OutputEvent, ScoredToken, TextDelta
from mlx_cb.text.output_parser import scored_token
from mlx_cb.text.tokenizer import Tokenizer

PATHS = ("/v1/completions", "/completions", "/api/v0/completions", "/v1/fim/completions")


class CompletionRequest(wire.SamplingFields, kw_only=True):
    """The body; keys not named here are ignored."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


def parse(body: bytes, front: Front) -> GenerateInput:
    """The body as a `GenerateInput`. Raises InvalidRequest naming the field."""
    asked = decode_json(body, CompletionRequest)
    n = wire.choices_wanted(asked)
    if asked.best_of not in (None, n):
        raise InvalidRequest(
            "best_of is not supported: ask for n answers and choose yourself", param="best_of"
        )
    prompts = wire.prompt_inputs(asked.prompt, "prompt")
    if asked.suffix:
        prompts = tuple(_around(prompt, asked.suffix, front) for prompt in prompts)
    echo = bool(asked.echo)
    if asked.logprobs is not None and not 0 <= asked.logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs must be between 0 and {MAX_LOGPROBS}", param="logprobs")
    return GenerateInput(
        prompts=prompts,
        params=wire.sampling_params(
            asked, logprobs=asked.logprobs, prompt_logprobs=asked.logprobs if echo else None
        ),
        n=n,
        model=front.resolve_name(asked.model),
        stream=bool(asked.stream),
        echo=echo,
        details={"include_usage": wire.wants_usage(asked)},
    )


def _around(prompt: PromptInput, suffix: str, front: Front) -> str:
    """The prompt for what belongs between prompt and suffix. Raises InvalidRequest."""
    if not isinstance(prompt, str):
        raise InvalidRequest("suffix needs a prompt that is a text", param="suffix")
    return front.fill_in_middle().prompt(prompt, suffix)


@dataclass(slots=True)
class _Logprobs:
    """OpenAI's older form: four parallel lists."""

    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, score: ScoredToken) -> None:
        top = {other.text: other.logprob for other in score.top}
        self.append(score.text, score.logprob, {**top, score.text: score.logprob})

    def append(self, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        self.tokens.append(text)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(self.offset)
        self.offset += len(text)

    def take(self) -> dict[str, Any]:
        """The lists so far; the next ones go on at the offset reached."""
        taken = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self.tokens, self.token_logprobs, self.top_logprobs = [], [], []
        self.text_offset = []
        return taken


class _Text:
    """One choice while its events come in; the same for whole and streamed answers."""

    def __init__(self, answering: Answering, choice: Choice) -> None:
        self._choice = choice
        self._tokenizer = answering.front.text.tokenizer
        self._echoes = answering.given.echo
        self._logprobs = _Logprobs() if choice.params.logprobs is not None else None

    def read(
        self, events: list[OutputEvent], first_of_prompt: Choice
    ) -> tuple[str, Any, str | None]:
        """Text, logprobs and finish reason of these events, the prompt before the first."""
        texts: list[str] = []
        finish = None
        if self._echoes:
            self._echoes = False
            texts.append(self._choice.prompt_text)
            if self._logprobs is not None:
                _add_prompt(self._logprobs, self._tokenizer, first_of_prompt)
        for event in events:
            match event:
                case TextDelta(text, scores):
                    texts.append(text)
                    for score in scores or ():
                        assert self._logprobs is not None
                        self._logprobs.add(score)
                case Finish(reason):
                    finish = wire.FINISH_WORDS[reason]
        logprobs = None if self._logprobs is None else self._logprobs.take()
        return "".join(texts), logprobs, finish


def _add_prompt(logprobs: _Logprobs, tokenizer: Tokenizer, choice: Choice) -> None:
    first = choice.prompt_ids[0]
    # The first token has nothing before it, so it has no probability.
    logprobs.append(_shown(tokenizer, first), None, None)
    for known in choice.prompt_logprobs or ():
        logprobs.add(scored_token(tokenizer, known))


def _shown(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes[token_id].decode("utf-8", "replace")


async def whole(answering: Answering) -> bytes:
    """The complete answer."""
    generation = answering.generation
    gathered: dict[int, list[OutputEvent]] = {choice.index: [] for choice in generation.choices}
    async for choice, events in generation.events():
        gathered[choice.index] += events
    choices = []
    for choice in generation.choices:
        reader = _Text(answering, choice)
        text, logprobs, finish = reader.read(
            gathered[choice.index], _first_of_prompt(answering, choice)
        )
        choices.append(_choice(choice.index, text, logprobs, finish))
    usage = wire.usage_object(generation.usage)
    return wire.encode({**_head(answering), "choices": choices, "usage": usage})


async def stream(answering: Answering) -> AsyncIterator[bytes]:
    """The answer as SSE chunks, ended by [DONE]."""
    generation = answering.generation
    include_usage = answering.given.details["include_usage"]
    head = wire.encode(_head(answering))[:-1]
    tail = b"]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
    readers = [_Text(answering, choice) for choice in generation.choices]
    async for choice, events in generation.events():
        reader = readers[choice.index]
        text, logprobs, finish = reader.read(events, _first_of_prompt(answering, choice))
        made = wire.encode(_choice(choice.index, text, logprobs, finish))
        yield b'data: %s,"choices":[%s%s' % (head, made, tail)
    end = wire.DONE
    if include_usage:
        usage = wire.encode(wire.usage_object(generation.usage))
        end = b'data: %s,"choices":[],"usage":%s}\n\n%s' % (head, usage, wire.DONE)
    yield end


def _first_of_prompt(answering: Answering, choice: Choice) -> Choice:
    """The choice whose generation was asked for the prompt's log-probabilities."""
    n = answering.given.n
    return answering.generation.choices[choice.index // n * n]


def _choice(index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _head(answering: Answering) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answering.request_id}",
        "object": "text_completion",
        "created": answering.created,
        "model": answering.given.model,
        "system_fingerprint": wire.FINGERPRINT,
    }


DIALECT = Dialect(
    parse,
    whole,
    stream,
    wire.error_answer,
    wire.stream_error,
    request_type=CompletionRequest,
    answer_type=Completion,
)


def endpoints(front: Front) -> dict[str, Endpoint]:
    """Path → endpoint, all of them POST."""
    return dict.fromkeys(PATHS, Endpoint(front, DIALECT))

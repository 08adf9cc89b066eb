"""llama.cpp's own endpoints, as editors' plugins use them: props, tokenize, templates, infill.

`/infill` needs fill-in-the-middle tokens; a model without them refuses by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mlx_cb.errors import InvalidRequest
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.server.answering import Answering, Dialect, Endpoint, JsonEndpoint
from mlx_cb.server.body import decode_json
from mlx_cb.server.dialects.answer_types import (
    DetokenizedText,
    LlamaAnswer,
    RenderedPrompt,
    Tokens,
)
from mlx_cb.server.dialects.openai_messages import WireMessage, template_messages
from mlx_cb.server.dialects.openai_wire import encode, error_answer, stream_error
from mlx_cb.server.front import Front
from mlx_cb.server.generate_input import MOST_CHOICES, GenerateInput
from mlx_cb.server.structured import schema_grammar, with_grammar
from mlx_cb.server.tool_choice import ToolChoice
from mlx_cb.text.chat_template import ChatInput
from mlx_cb.text.events import EndReason, Finish, TextDelta


class InfillExtra(msgspec.Struct):
    """A piece of another file."""

    text: str = ""
    filename: str = ""


class MultimodalPrompt(msgspec.Struct):
    """llama.cpp's prompt with pictures or sounds in it."""

    prompt_string: str
    multimodal_data: list[Any] = []


class CompletionRequest(msgspec.Struct, kw_only=True):
    """llama.cpp's sampling fields; keys not named here are ignored."""

    prompt: str | list[int] | MultimodalPrompt = ""
    image_data: list[Any] | None = None
    n_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    stop: list[str] | None = None
    n_cmpl: int | None = None
    json_schema: Any = None
    grammar: str | None = None
    stream: bool | None = None


class InfillRequest(CompletionRequest, kw_only=True):
    """The body of `/infill`."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[InfillExtra] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """llama.cpp sends `content`; vLLM's clients `prompt` or `messages`."""

    content: str | None = None
    prompt: str | None = None
    messages: list[WireMessage] | None = None
    add_special: bool = False
    add_special_tokens: bool = True
    with_pieces: bool = False
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct):
    """Token ids back to text."""

    tokens: list[int]


class TemplateRequest(msgspec.Struct):
    """Messages to the text of a prompt."""

    messages: list[WireMessage]
    tools: list[dict[str, Any]] | None = None


async def tokenize(body: bytes, front: Front) -> bytes:
    """Token ids of a text or a chat, in the shape of the API that asked."""
    asked = decode_json(body, TokenizeRequest)
    tokenizer = front.text.tokenizer
    if asked.content is not None:
        ids = tokenizer.encode(asked.content, add_special_tokens=asked.add_special)
        if not asked.with_pieces:
            return encode({"tokens": ids})
        pieces = [{"id": i, "piece": tokenizer.decode([i], skip_special_tokens=False)} for i in ids]
        return encode({"tokens": pieces})
    if asked.messages is not None:
        chat = ChatInput(template_messages(asked.messages), asked.tools)
        ids = (await front.encode(chat)).ids
    elif asked.prompt is not None:
        ids = tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
    else:
        raise InvalidRequest("content is missing", param="content")
    limit = front.model_info.max_model_len
    return encode({"count": len(ids), "max_model_len": limit, "tokens": ids})


async def detokenize(body: bytes, front: Front) -> bytes:
    """Text of token ids. Both APIs' key for it is given."""
    ids = decode_json(body, DetokenizeRequest).tokens
    front.check_token_ids(ids, "tokens")
    text = front.text.tokenizer.decode(ids, skip_special_tokens=False)
    return encode({"content": text, "prompt": text})


async def apply_template(body: bytes, front: Front) -> bytes:
    """The rendered prompt of a chat."""
    asked = decode_json(body, TemplateRequest)
    chat = ChatInput(template_messages(asked.messages), asked.tools)
    return encode({"prompt": (await front.encode(chat)).text})


def props(front: Front) -> dict[str, Any]:
    """What Zed's llama.cpp provider reads to find models and their abilities."""
    info, template = front.model_info, front.text.chat_template
    return {
        "default_generation_settings": {"n_ctx": info.max_model_len},
        "total_slots": front.config.engine.scheduler.max_num_seqs,
        "model_path": front.served_name,
        "model_alias": front.served_name,
        "chat_template": template.source if template else "",
        "chat_template_caps": {
            "supports_tools": template is not None,
            "supports_tool_calls": template is not None,
            "supports_parallel_tool_calls": template is not None,
        },
        "modalities": {"vision": False, "audio": False},
        "build_info": "mlx-cb",
        "is_sleeping": False,
    }


def parse_completion(body: bytes, front: Front) -> GenerateInput:
    """`POST /completion`: a plain prompt."""
    asked = decode_json(body, CompletionRequest)
    return _given(asked, _text_prompt(asked), front)


def _text_prompt(asked: CompletionRequest) -> str | list[int]:
    """The prompt without an empty frame around it. Raises InvalidRequest for pictures."""
    prompt, field, media = asked.prompt, "image_data", asked.image_data
    if isinstance(prompt, MultimodalPrompt):
        field, media = "prompt.multimodal_data", prompt.multimodal_data or media
        prompt = prompt.prompt_string
    if media:
        raise InvalidRequest(f"{field}: this model takes text only", param=field)
    return prompt


def parse_infill(body: bytes, front: Front) -> GenerateInput:
    """`POST /infill`: what belongs between a prefix and a suffix."""
    asked = decode_json(body, InfillRequest)
    extra = [(part.filename, part.text) for part in asked.input_extra or []]
    fill = front.fill_in_middle()
    # llama.vim's `prompt` is the line before the cursor.
    prompt = _text_prompt(asked)
    prefix = asked.input_prefix + (prompt if isinstance(prompt, str) else "")
    return _given(asked, fill.prompt(prefix, asked.input_suffix, extra), front)


def _given(asked: CompletionRequest, prompt: str | list[int], front: Front) -> GenerateInput:
    n = 1 if asked.n_cmpl is None else asked.n_cmpl
    if not 1 <= n <= MOST_CHOICES:
        raise InvalidRequest(f"n_cmpl must be between 1 and {MOST_CHOICES}", param="n_cmpl")
    named = {
        "temperature": asked.temperature,
        "top_k": 0 if asked.top_k == -1 else asked.top_k,
        "top_p": asked.top_p,
        "min_p": asked.min_p,
        "repetition_penalty": asked.repeat_penalty,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "ignore_eos": asked.ignore_eos,
    }
    params = SamplingParams.asked(
        named,
        max_tokens=None if asked.n_predict in (-1, -2) else asked.n_predict,
        seed=None if asked.seed == -1 else asked.seed,
        stop=tuple(text for text in asked.stop or () if text),
    )
    return GenerateInput(
        prompts=(prompt,),
        params=with_grammar(params, _grammar(asked)),
        n=n,
        model=front.served_name,
        stream=bool(asked.stream),
        tool_choice=ToolChoice(),
    )


def _grammar(asked: CompletionRequest) -> str | None:
    """What the answer has to follow. Raises InvalidRequest for what would not be kept."""
    if asked.grammar:
        raise InvalidRequest(
            "grammar: llama.cpp's notation is not read here; send json_schema, or guided_grammar "
            "or guided_regex to /v1/completions",
            param="grammar",
        )
    return None if asked.json_schema is None else schema_grammar(asked.json_schema, "json_schema")


def _content(answering: Answering, index: int, text: str, finish: Finish | None) -> dict[str, Any]:
    """llama.cpp's answer object; with `finish` it is the last or only one of its choice."""
    made: dict[str, Any] = {"index": index, "content": text, "stop": finish is not None}
    if finish is None:
        return made
    usage, generation = answering.generation.usage, answering.generation
    kinds = {EndReason.LENGTH: "limit", EndReason.STOP_STRING: "word"}
    return {
        **made,
        "model": answering.given.model,
        "tokens_predicted": generation.choices[index].parser.num_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "tokens_cached": usage.cached_tokens,
        "truncated": False,
        "stop_type": kinds.get(finish.reason, "eos"),
        "stopping_word": finish.stop or "",
        "generation_settings": {"n_predict": answering.given.params.max_tokens},
        "timings": generation.timings(),
    }


async def whole(answering: Answering) -> bytes:
    """The complete answer; a list of them when several were asked for."""
    choices = answering.generation.choices
    texts: list[list[str]] = [[] for _ in choices]
    ends = [Finish(EndReason.STOP) for _ in choices]
    async for choice, events in answering.generation.events():
        for event in events:
            match event:
                case TextDelta(text):
                    texts[choice.index].append(text)
                case Finish():
                    ends[choice.index] = event
    made = [
        _content(answering, index, "".join(texts[index]), end) for index, end in enumerate(ends)
    ]
    return encode(made[0] if len(made) == 1 else made)


async def stream(answering: Answering) -> AsyncIterator[bytes]:
    """SSE chunks; the last one of each choice has `stop: true`."""
    async for choice, events in answering.generation.events():
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        finish = events[-1] if isinstance(events[-1], Finish) else None
        yield b"data: " + encode(_content(answering, choice.index, text, finish)) + b"\n\n"


def _dialect(parse: Callable[[bytes, Front], GenerateInput], kind: type) -> Dialect:
    return Dialect(
        parse,
        whole,
        stream,
        error_answer,
        stream_error,
        request_type=kind,
        answer_type=LlamaAnswer,
    )


def routes(front: Front) -> list[BaseRoute]:
    """All of llama.cpp's paths that are not OpenAI's."""

    async def get_props(request: Request) -> Response:
        return Response(encode(props(front)), media_type="application/json")

    posts: dict[str, tuple[Any, type, type]] = {
        "/tokenize": (tokenize, TokenizeRequest, Tokens),
        "/detokenize": (detokenize, DetokenizeRequest, DetokenizedText),
        "/apply-template": (apply_template, TemplateRequest, RenderedPrompt),
    }
    generating = {
        "/completion": (parse_completion, CompletionRequest),
        "/infill": (parse_infill, InfillRequest),
    }
    return [
        Route("/props", get_props),
        *(
            Route(path, JsonEndpoint(front, answer, error_answer, *kinds), methods=["POST"])
            for path, (answer, *kinds) in posts.items()
        ),
        *(
            Route(
                path,
                Endpoint(front, _dialect(parse, kind)),
                methods=["POST"],
            )
            for path, (parse, kind) in generating.items()
        ),
    ]

"""Chat messages to the prompt's token ids, by the checkpoint's own template.

Owns the shapes that templates accept: which roles exist and in what order, where tools go, how a
trailing assistant message is continued, and that text spelling a control token stays text. Knows
nothing about HTTP; the messages it is given have the OpenAI chat form, contents already strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mlx_cb.errors import InvalidRequest
from mlx_cb.text.template_engine import CompiledTemplate, TemplateRefusal
from mlx_cb.text.tokenizer import GUARD_CHARACTERS, Tokenizer
from mlx_cb.text.tool_prompt import messages_without_tool_roles

END_OF_PREFILL = "\ufdd0"
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatInput:
    """What a template is given.

    Attributes:
        messages: `role` one of system, user, assistant, tool; `content` a string or None;
            assistants may carry `tool_calls` (arguments as objects) and `reasoning_content`.
        tools: OpenAI function tools.
        variables: further template variables, such as `enable_thinking`.
        continue_last: the last message is the beginning of the answer; None continues it when it
            is an assistant's text without tool calls.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    continue_last: bool | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt: its ids, its text, and whether it ends inside the assistant's text."""

    ids: list[int]
    text: str
    continues: bool


def load_template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """The template of a model folder: its own file first, then tokenizer_config.json."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text("utf-8")
    source: Any = config.get("chat_template")
    if source is None and (folder / "chat_template.json").is_file():
        content = msgspec.json.decode((folder / "chat_template.json").read_bytes())
        source = content.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("tool_use") or named.get("default")
    return source if isinstance(source, str) else None


class ChatTemplate:
    """One checkpoint's template with its tokenizer."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = CompiledTemplate(source)
        self.source = source
        self.takes_tools = "tools" in self._template.variables
        tokens = tokenizer.added_tokens.values()
        self._special = _pattern(t.content for t in tokens if t.special)
        literals = self._template.literals
        self._control = _pattern(
            t.content for t in tokens if t.special or (t.content.strip() and t.content in literals)
        )

    @property
    def is_slow(self) -> bool:
        """True once a render took so long that it has no place on an event loop."""
        return self._template.is_slow

    def encode(self, chat: ChatInput) -> Prompt:
        """Render and encode. Raises InvalidRequest (also TemplateRefusal) naming `messages`."""
        if not chat.messages:
            raise InvalidRequest("messages must hold at least one message", param="messages")
        guard = _unused_guard(chat)
        continues = _continues(chat)
        messages = [self._guarded(message, guard) for message in chat.messages]
        if continues:
            messages[-1] = {
                **messages[-1],
                "content": (messages[-1].get("content") or "") + END_OF_PREFILL,
            }
        text = self._render(messages, chat, continues)
        if continues:
            text = _cut_at_prefill(text)
        ids = self._tokenizer.encode_guarded(text, guard)
        return Prompt(ids, text.replace(guard, ""), continues)

    def _render(self, messages: list[Message], chat: ChatInput, continues: bool) -> str:
        tools = chat.tools or None
        if not self.takes_tools:
            messages, tools = messages_without_tool_roles(messages, tools), None
        variables = self._variables(chat) | {
            "tools": tools,
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
        }
        refusal: TemplateRefusal | None = None
        for reshape in (_as_given, _reminders, _system_first, _system_in_user):
            try:
                text = self._template.render({**variables, "messages": reshape(messages)})
            except TemplateRefusal as error:
                refusal = refusal or error
                continue
            if reshape is not _as_given or _holds_system_texts(text, messages):
                return text
        assert refusal is not None
        raise refusal

    def _variables(self, chat: ChatInput) -> dict[str, Any]:
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        named = {name: self._tokenizer.token_name(name) for name in names}
        known = {name: text for name, text in named.items() if text is not None}
        return {"documents": None, **known, **chat.variables}

    def _guarded(self, message: Message, guard: str) -> Message:
        # An assistant's text is the model's own and may hold <think> marks that templates read.
        pattern = self._special if message["role"] == "assistant" else self._control

        def protect(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(lambda match: _broken(match[0], guard), value)
            if isinstance(value, dict):
                return {key: protect(part) for key, part in value.items()}
            return [protect(part) for part in value] if isinstance(value, list) else value

        return {key: value if key == "role" else protect(value) for key, value in message.items()}


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _broken(token: str, guard: str) -> str:
    return token[:1] + guard + token[1:]


def _unused_guard(chat: ChatInput) -> str:
    text = json.dumps([chat.messages, chat.tools], ensure_ascii=False, default=str)
    if END_OF_PREFILL in text:
        raise InvalidRequest("messages must not hold the noncharacter U+FDD0", param="messages")
    for character in GUARD_CHARACTERS:
        if character not in text:
            return character
    raise InvalidRequest("messages hold every Unicode noncharacter", param="messages")


def _continues(chat: ChatInput) -> bool:
    last = chat.messages[-1]
    is_text = last["role"] == "assistant" and not last.get("tool_calls")
    return is_text if chat.continue_last is None else chat.continue_last and is_text


def _cut_at_prefill(text: str) -> str:
    end = text.rfind(END_OF_PREFILL)
    if end < 0:
        raise TemplateRefusal(
            "the model's chat template drops a trailing assistant message, so it cannot be "
            "continued; end with a user message",
            param="messages",
        )
    return text[:end]


# What a strict template may want, from least to most change.


def _as_given(messages: list[Message]) -> list[Message]:
    return messages


def _holds_system_texts(text: str, messages: list[Message]) -> bool:
    """False when the template dropped a later system message without a word."""
    return all(
        str(message.get("content") or "").strip() in text
        for message in messages[1:]
        if message["role"] == "system"
    )


def _reminders(messages: list[Message]) -> list[Message]:
    """System messages after the first turn stay in their place, as the user's.

    Moving them to the front would change the head of the prompt at every turn, and with it lose
    all that the prefix cache holds.
    """
    start = next((n for n, m in enumerate(messages) if m["role"] != "system"), len(messages))
    made: list[Message] = []
    for message in messages[start:]:
        if message["role"] == "system":
            text = f"<system-reminder>\n{message.get('content') or ''}\n</system-reminder>"
            message = {**message, "role": "user", "content": text}
        made.append(message)
    return _system_first([*messages[:start], *made])


def _system_first(messages: list[Message]) -> list[Message]:
    """One system message, first; neighbours of the same role become one."""
    system = [m["content"] for m in messages if m["role"] == "system" and m.get("content")]
    rest = _merged([m for m in messages if m["role"] != "system"])
    return [{"role": "system", "content": "\n\n".join(system)}, *rest] if system else rest


def _system_in_user(messages: list[Message]) -> list[Message]:
    """No system message: its text opens the first user message."""
    first, *rest = _system_first(messages)
    if first["role"] != "system":
        return [first, *rest]
    if rest and rest[0]["role"] == "user":
        joined = f"{first['content']}\n\n{rest[0].get('content') or ''}"
        return [{**rest[0], "content": joined}, *rest[1:]]
    return [{"role": "user", "content": first["content"]}, *rest]


def _merged(messages: list[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        previous = merged[-1] if merged else None
        if previous and previous["role"] == message["role"] and _is_plain(previous, message):
            parts = [m["content"] for m in (previous, message) if m.get("content")]
            merged[-1] = {**previous, "content": "\n\n".join(parts)}
        else:
            merged.append(message)
    return merged


def _is_plain(*messages: Message) -> bool:
    return all(m["role"] != "tool" and not m.get("tool_calls") for m in messages)

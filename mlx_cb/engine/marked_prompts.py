"""Reads the prompts that the operator has marked as shared (`--shared-prompt FILE`).

A file ending in .json is what a client sends: `messages` (and `tools`, `chat_template_kwargs`) of a
chat, or the `prompt` of a completion. Any other file is the text of a system message.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlx_cb.errors import InvalidRequest
from mlx_cb.text.chat_template import ChatInput
from mlx_cb.text.model_text import ModelText

log = logging.getLogger("mlx_cb.engine")

#: Two ways to go on, that have no token in common.
_ENDINGS = ("A", "7")


def read_marked_prompts(files: Iterable[str], folder: Path) -> list[list[int]]:
    """Token ids of each file's prompt, by the tokenizer and template in the model's folder.

    Raises InvalidRequest for a file that cannot be used, naming it.
    """
    text = ModelText.load(folder)
    prompts = []
    for name in files:
        try:
            prompts.append(_read(Path(name), text))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, InvalidRequest) as error:
            reason = error.message if isinstance(error, InvalidRequest) else str(error)
            raise InvalidRequest(f"--shared-prompt {name}: {reason}") from error
        log.info("%s: the first %d tokens are shared by all users", name, len(prompts[-1]))
    return prompts


def _read(path: Path, text: ModelText) -> list[int]:
    content = path.read_text("utf-8")
    if path.suffix != ".json":
        return _beginning(ChatInput([{"role": "system", "content": content.rstrip("\n")}]), text)
    asked: Any = json.loads(content)
    if not isinstance(asked, dict):
        raise InvalidRequest("the file must hold an object with messages or a prompt")
    if isinstance(asked.get("prompt"), str):
        return text.tokenizer.encode(asked["prompt"])
    messages = asked.get("messages")
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role")
        for m in messages
    ):
        raise InvalidRequest(
            "the file must hold a prompt, or messages with a role and a text as content each"
        )
    variables = asked.get("chat_template_kwargs") or {}
    return _beginning(ChatInput(messages, asked.get("tools"), variables), text)


def _beginning(chat: ChatInput, text: ModelText) -> list[int]:
    """The tokens that all chats have in common that begin with these messages."""
    other = "assistant" if chat.messages[-1:] and chat.messages[-1]["role"] == "user" else "user"
    first, second = (
        text.encode_chat(
            ChatInput(
                [*chat.messages, {"role": other, "content": ending}], chat.tools, chat.variables
            )
        ).ids
        for ending in _ENDINGS
    )
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    return first[:common]

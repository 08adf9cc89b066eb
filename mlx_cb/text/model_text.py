"""All that one checkpoint says about text: tokenizer, chat template, markers of its output.

Owns nothing of its own; it joins the parts of this room for those who only want prompts and
parsers. Knows nothing about HTTP or the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_cb.errors import InvalidRequest
from mlx_cb.text.chat_template import ChatInput, ChatTemplate, Prompt, load_template_source
from mlx_cb.text.harmony import HarmonyFormat
from mlx_cb.text.reasoning import find_reasoning_markers, opens_reasoning
from mlx_cb.text.sections import Markers, OutputFormat
from mlx_cb.text.tokenizer import Tokenizer
from mlx_cb.text.tools import find_tool_syntax, tool_syntax


@dataclass(frozen=True, slots=True)
class ModelText:
    """A checkpoint's text side; safe to share between threads."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    reasoning: Markers | None
    tool_syntax_name: str

    @classmethod
    def load(cls, folder: Path) -> ModelText:
        """Read a model folder. Raises UnsupportedModel when it has no usable tokenizer."""
        tokenizer = Tokenizer.load(folder)
        source = load_template_source(folder, tokenizer.config)

        def vocabulary_has(text: str) -> bool:
            return tokenizer.token_id(text) is not None

        return cls(
            tokenizer,
            ChatTemplate(source, tokenizer) if source else None,
            find_reasoning_markers(vocabulary_has, source or ""),
            find_tool_syntax(source or "", vocabulary_has),
        )

    def encode_chat(self, chat: ChatInput) -> Prompt:
        """Messages to a prompt. Raises InvalidRequest."""
        if self.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions with a plain prompt",
                param="messages",
            )
        return self.chat_template.encode(chat)

    def opens_reasoning(self, prompt: Prompt) -> bool:
        """True when the model's first token continues reasoning that the prompt opened."""
        return opens_reasoning(prompt.text, self.reasoning)

    def output_format(
        self, tools: list[dict[str, Any]] | None, *, streams_calls: bool = False
    ) -> OutputFormat | HarmonyFormat | None:
        """What to look for in an answer; None for a model without markers and no tools."""
        if self.tool_syntax_name == "harmony":
            return HarmonyFormat(bool(tools), streams_calls)
        syntax = tool_syntax(self.tool_syntax_name, tools) if tools else None
        if syntax is None and self.reasoning is None:
            return None
        return OutputFormat(self.reasoning, syntax, streams_calls)

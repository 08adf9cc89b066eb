"""Finds the control token that a chat template writes behind an assistant's text.

For checkpoints whose files do not say where a turn ends: a model that is trained on the template
writes that token itself, and would else go on talking to itself. Knows nothing about the engine.
"""

from __future__ import annotations

from pathlib import Path

from mlx_cb.errors import InvalidRequest, UnsupportedModel
from mlx_cb.text.chat_template import load_template_source
from mlx_cb.text.template_engine import CompiledTemplate
from mlx_cb.text.tokenizer import Tokenizer

_ANSWER = "The answer"
_CHAT = [{"role": "user", "content": "A question"}, {"role": "assistant", "content": _ANSWER}]


def turn_endings(folder: Path) -> frozenset[int]:
    """The token's id; empty without a template, or when it writes no such token."""
    try:
        tokenizer = Tokenizer.load(folder)
        source = load_template_source(folder, tokenizer.config)
        if source is None:
            return frozenset()
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        tokens = {name: tokenizer.token_name(name) or "" for name in names}
        rendered = CompiledTemplate(source).render(
            {**tokens, "messages": _CHAT, "tools": None, "add_generation_prompt": False}
        )
    except (InvalidRequest, UnsupportedModel):
        return frozenset()
    behind = rendered.rpartition(_ANSWER)[2].lstrip()
    longest_first = sorted(tokenizer.added_tokens.values(), key=lambda token: -len(token.content))
    for token in longest_first:
        if token.special and behind.startswith(token.content):
            return frozenset([token.id])
    return frozenset()

"""What the scripted engine says to every client, so that each can show all that it has to do."""

from __future__ import annotations

from typing import Any

REPLIES: tuple[dict[str, Any], ...] = (
    {"match": "<tools>", "turn": 0, "reasoning": "hm", "text": "So.",
     "tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
    {"turn": 1, "text": "It is 5."},
    {"match": "busy", "refuse": 429},
    {"match": "endless", "tokens": ["x "], "repeat": True, "delay_s": 0.01},
    {"match": "form", "text": '{"a":7}'},
    {"match": "think", "reasoning": "hm", "text": "I thought."},
    {"text": "Hello there."},
)  # fmt: skip
EMBEDDING_SCRIPT = {"embedding_size": 8}


def assert_all_was_done(server: Any) -> None:
    """A schema reached the engine as a grammar, and the cancelled answer was closed."""
    server.wait_until_idle(10)
    played = server.engine.played.values()
    assert any(p.params.grammar is not None for p in played)
    assert any(p.finish_reason == "abort" for p in played)

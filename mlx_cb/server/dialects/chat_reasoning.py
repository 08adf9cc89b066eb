"""Where chat completions put reasoning: under which keys, or inside the text.

Clients disagree about the key; `--reasoning-key` chooses. Knows nothing about chunks.
"""

from __future__ import annotations

from mlx_cb.text.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta

_KEYS = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
    "inline": (),
}


class ReasoningForm:
    """One choice's reasoning on the wire."""

    def __init__(self, name: str) -> None:
        """`name` is a value of `--reasoning-key`."""
        self._keys = _KEYS[name]
        self._is_open = False

    def fields(self, text: str) -> dict[str, str]:
        """Keys of a delta or a message."""
        return dict.fromkeys(self._keys, text)

    def shown(self, events: list[OutputEvent]) -> list[OutputEvent]:
        """The events as they are, or with reasoning as text between <think> marks."""
        if self._keys:
            return events
        made: list[OutputEvent] = []
        for event in events:
            if isinstance(event, ReasoningDelta):
                made.append(TextDelta(event.text if self._is_open else f"<think>\n{event.text}"))
                self._is_open = True
                continue
            if self._is_open and not isinstance(event, ToolCallDelta):
                made.append(TextDelta("\n</think>\n\n"))
                self._is_open = False
            made.append(event)
        return made

"""Prompts and answers in the log, for operators who asked for that with `--log-prompts`.

Nothing else in the server ever logs what people write.
"""

from __future__ import annotations

import logging

from mlx_cb.text.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart

_log = logging.getLogger("mlx_cb.transcript")


class Transcript:
    """The texts of one choice; written to the log when it ends."""

    def __init__(self, request_id: str, prompt: str) -> None:
        self._request_id = request_id
        self._answer: list[str] = []
        _log.info("request_id=%s prompt=%r", request_id, prompt)

    def add(self, events: list[OutputEvent]) -> None:
        """Remember what the answer says."""
        for event in events:
            match event:
                case TextDelta(text) | ReasoningDelta(text):
                    self._answer.append(text)
                case ToolCallStart(_, _, name):
                    self._answer.append(name)
                case ToolCallDelta(_, arguments):
                    self._answer.append(arguments)

    def write(self) -> None:
        """Log the answer so far."""
        _log.info("request_id=%s answer=%r", self._request_id, "".join(self._answer))

"""gpt-oss's harmony form: an answer is messages in channels, each with a header.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>…<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

`analysis` is reasoning; a message to a function is a tool call; all other text is the answer.
Answers to the same calls as `sections.Sections`. Knows nothing about tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from mlx_cb.text.events import (
    EndReason,
    Finish,
    OutputEvent,
    ReasoningDelta,
    ScoredToken,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from mlx_cb.text.json_prefix import JsonPrefix
from mlx_cb.text.parsed_calls import new_call_id

MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """The output format of gpt-oss checkpoints. `has_tools` turns calls into events.

    `streams_calls` gives calls on as they are written.
    """

    has_tools: bool
    streams_calls: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Control tokens whose text must reach the parser."""
        return ("<|channel|>", "<|constrain|>", MESSAGE, *_ENDS)

    def new_sections(self, *, in_reasoning: bool) -> HarmonySections:
        """A state machine for one text; harmony says itself where reasoning begins."""
        return HarmonySections(self.has_tools, self.streams_calls)


@dataclass(slots=True)
class HarmonySections:
    """The state machine over one text. Counts calls as `sections.Sections` does."""

    has_tools: bool
    streams_calls: bool = False
    in_reasoning: bool = False
    num_calls: int = 0
    num_broken: int = 0
    _header: str | None = None  # None while a header is being read
    _held: str = ""
    _call: str | None = None
    _object: JsonPrefix | None = None  # of a call that has been given on and cannot be taken back
    _events: list[OutputEvent] = field(default_factory=list)

    def feed(self, text: str, scores: list[ScoredToken] | None = None) -> list[OutputEvent]:
        """Events that `text` completes."""
        self._held += text
        while self._read_header() if self._header is None else self._read_body():
            pass
        return self._take(scores)

    def finish(
        self, text: str, end: Finish, scores: list[ScoredToken] | None = None
    ) -> list[OutputEvent]:
        """The last events. `<|call|>` and `<|return|>` end the turn and are not in the text."""
        events = self.feed(text, scores)
        if self._header is None:
            leftover = self._held
            if leftover and "<|" not in leftover and leftover not in ("assistant",):
                self._events.append(TextDelta(leftover))  # no harmony at all: plain text
        else:
            # Half a control token is no part of a call's arguments.
            is_marker = self._object is not None and _may_be_end(self._held)
            self._write("" if is_marker else self._held)
            self._end_message(is_complete=end.reason is EndReason.STOP)
        self._held = ""
        if end.reason is EndReason.STOP:
            end = Finish(self.end_reason)
        return [*events, *self._take(None), end]

    @property
    def end_reason(self) -> EndReason:
        """What an end of the model's own means: calls, if there are any and all can be made."""
        can_call = self.num_calls > 0 and not self.num_broken
        return EndReason.TOOL_CALLS if can_call else EndReason.STOP

    def _read_header(self) -> bool:
        header, found, rest = self._held.partition(MESSAGE)
        if not found:
            return False
        self._header, self._held = header, rest
        recipient = _RECIPIENT.search(header)
        self._call = "" if recipient and self.has_tools else None
        self.in_reasoning = self._call is None and "analysis" in header
        return True

    def _read_body(self) -> bool:
        places = [(self._held.find(end), end) for end in _ENDS]
        found = min((place for place in places if place[0] >= 0), default=None)
        if found is None:
            keep = self._held.rfind("<")
            safe = keep if keep >= 0 and _may_be_end(self._held[keep:]) else len(self._held)
            self._write(self._held[:safe])
            self._held = self._held[safe:]
            return False
        self._write(self._held[: found[0]])
        self._held = self._held[found[0] + len(found[1]) :]
        self._end_message(is_complete=True)
        return True

    def _write(self, text: str) -> None:
        if self._call is not None:
            self._call += text
            self._stream_call(text)
        elif text:
            made = ReasoningDelta(text) if self.in_reasoning else TextDelta(text)
            self._events.append(made)

    def _stream_call(self, text: str) -> None:
        """Give on a call's arguments, from their opening brace on."""
        name = _RECIPIENT.search(self._header or "")
        if not self.streams_calls or name is None or self._call is None or not text:
            return
        if self._object is None:
            text = self._call.lstrip()
            if not text.startswith("{"):
                return
            self._object = JsonPrefix()
            self._events.append(ToolCallStart(self.num_calls, new_call_id(), name[1]))
        if end := self._object.feed(text):
            self._events.append(ToolCallDelta(self.num_calls, text[:end]))
        rest = text[end:]  # what is no JSON any more, or stands behind it
        if rest and (self._object.is_broken or rest.strip()):
            self._events.append(TextDelta(rest))

    def _end_message(self, *, is_complete: bool) -> None:
        if self._call is not None:
            name = _RECIPIENT.search(self._header or "")
            if self._object is not None:
                self.num_calls += 1
                self.num_broken += not self._object.is_whole
            elif name is not None and is_complete and _is_object(self._call):
                start = ToolCallStart(self.num_calls, new_call_id(), name[1])
                self._events += [start, ToolCallDelta(self.num_calls, self._call.strip() or "{}")]
                self.num_calls += 1
            else:
                self._events.append(TextDelta(self._call))
        self._header, self._call, self.in_reasoning = None, None, False
        self._object = None

    def _take(self, scores: list[ScoredToken] | None) -> list[OutputEvent]:
        events, self._events = self._events, []
        for number, event in enumerate(events):
            if scores and isinstance(event, TextDelta):
                events[number] = TextDelta(event.text, scores)
                break
        return [e for e in events if not isinstance(e, TextDelta) or e.text]


def _may_be_end(text: str) -> bool:
    return any(end.startswith(text) for end in _ENDS)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        return not text.strip()

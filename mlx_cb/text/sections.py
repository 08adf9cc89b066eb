"""Splits a model's text at its markers: reasoning, tool calls, and the answer between them.

Owns the state between pieces of text and what is held back while it could still be a marker.
Knows nothing about tokens. How a call's text becomes name and arguments is `tools`' business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

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
from mlx_cb.text.parsed_calls import ParseCalls, ParsedCall, new_call_id
from mlx_cb.text.streamed_calls import (
    CallStreaming,
    ElementArguments,
    ElementCallReader,
    JsonArguments,
    JsonCallReader,
)

_WHITESPACE = "\n\r\t "


@dataclass(frozen=True, slots=True)
class Markers:
    """What opens and closes a section; an empty `end` lasts to the end of the text."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How a family of models writes tool calls.

    Attributes:
        parse: the text between the markers to calls; raises ValueError for anything else.
        inner: further control tokens that `parse` needs to see.
        bare_start: how an answer begins that is a call without any marker, "" for never.
        streaming: how its calls can be given on while they are written, None for not at all.
    """

    markers: Markers
    parse: ParseCalls
    inner: tuple[str, ...] = ()
    bare_start: str = ""
    streaming: CallStreaming | None = None


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Markers to look for in one generation; `streams_calls` gives calls on as they are written."""

    reasoning: Markers | None = None
    tools: ToolSyntax | None = None
    streams_calls: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Every control token whose text must reach the parser."""
        texts = [self.reasoning.start, self.reasoning.end] if self.reasoning else []
        if self.tools:
            texts += [self.tools.markers.start, self.tools.markers.end, *self.tools.inner]
        return tuple(text for text in texts if text)

    def new_sections(self, *, in_reasoning: bool) -> Sections:
        """A state machine for one text."""
        return Sections(self, in_reasoning=in_reasoning)


class _State(Enum):
    TEXT = "text"
    REASONING = "reasoning"
    TOOL = "tool"


@dataclass(slots=True)
class Sections:
    """The state machine over one text.

    `num_calls` counts the calls that were given on; `num_broken` those of them whose arguments
    never became whole, because the model wrote no JSON or did not end them.
    """

    output_format: OutputFormat
    in_reasoning: bool = False
    num_calls: int = 0
    num_broken: int = 0
    _state: _State = _State.TEXT
    _held: str = ""
    _skips_blank: bool = False
    _has_answered: bool = False
    _opened_by: str = ""
    _json: JsonCallReader | None = None
    _elements: ElementCallReader | None = None
    _events: list[OutputEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.in_reasoning:
            self._state = _State.REASONING
            self._skips_blank = True

    def feed(self, text: str, scores: list[ScoredToken] | None = None) -> list[OutputEvent]:
        """Events that `text` completes. `scores` go with the answer's text."""
        if not self._held and self._is_plain(text):
            return [TextDelta(text, scores)]
        self._held += text
        while self._advance():
            pass
        return self._take_events(scores)

    def finish(
        self, text: str, end: Finish, scores: list[ScoredToken] | None = None
    ) -> list[OutputEvent]:
        """The last events; an unfinished tool call is given back as text, never dropped."""
        events = self.feed(text, scores)
        tools = self.output_format.tools
        if self._state is _State.TOOL and tools is not None:
            # A model that ends its turn may leave the end marker out; one that was cut off did not
            # finish the call.
            is_whole = end.reason is EndReason.STOP or not tools.markers.end
            self._close_calls(self._held, "", is_whole=is_whole)
        elif self._held.strip(_WHITESPACE) or not self.num_calls:
            self._write(self._held)
        self._held = ""
        if end.reason is EndReason.STOP:
            end = Finish(self.end_reason)
        return [*events, *self._take_events(None), end]

    @property
    def end_reason(self) -> EndReason:
        """What an end of the model's own means: calls, if there are any and all can be made."""
        can_call = self.num_calls > 0 and not self.num_broken
        return EndReason.TOOL_CALLS if can_call else EndReason.STOP

    def _is_plain(self, text: str) -> bool:
        """Most text: in mid-answer, and nothing in it can begin a marker."""
        if not text or self._state is not _State.TEXT:
            return False
        if self._skips_blank or not self._has_answered:
            return False
        tools = self.output_format.tools
        if tools is None:
            return True
        return tools.markers.start[0] not in text and text[-1] not in _WHITESPACE

    def _advance(self) -> bool:
        """Consume the held text up to the next marker; False when more text is needed."""
        if self._state is _State.TOOL:
            return self._advance_tool()
        if self._is_bare_call():
            self._open_calls("")
            return True
        position, marker = self._next_marker()
        if marker is None:
            keep = self._possible_marker()
            self._write(self._held[:keep])
            self._held = self._held[keep:]
            return False
        before = self._held[:position]
        self._write(before.rstrip(_WHITESPACE) if self._trims(marker) else before)
        self._held = self._held[position + len(marker) :]
        self._enter(marker)
        return True

    def _enter(self, marker: str) -> None:
        tools, reasoning = self.output_format.tools, self.output_format.reasoning
        if reasoning and self._state is _State.REASONING and marker == reasoning.end:
            self._state = _State.TEXT
        elif reasoning and marker == reasoning.start:
            self._state = _State.REASONING
        elif tools and marker == tools.markers.start:
            self._open_calls(marker)
        self.in_reasoning = self._state is _State.REASONING
        self._skips_blank = True

    def _open_calls(self, marker: str) -> None:
        tools = self.output_format.tools
        assert tools is not None
        self._state, self._opened_by = _State.TOOL, marker
        streaming = tools.streaming if self.output_format.streams_calls else None
        if isinstance(streaming, JsonArguments):
            self._json = JsonCallReader(streaming, self.num_calls, self.num_broken)
        elif isinstance(streaming, ElementArguments):
            self._elements = ElementCallReader(streaming, self._parsed, self.num_calls)

    def _advance_tool(self) -> bool:
        assert self.output_format.tools is not None
        if self._json is not None:
            events, self._held = self._json.feed(self._held)
            self._events += events
            self._count_json(self._json)
            if self._json.is_open:
                return False
        end = self.output_format.tools.markers.end
        if not end or end not in self._held:
            if self._elements is not None:
                self._events += self._elements.feed(self._held)
            return False
        inside, _, self._held = self._held.partition(end)
        self._state = _State.TEXT
        self._skips_blank = True
        self._close_calls(inside, end, is_whole=True)
        return True

    def _close_calls(self, text: str, marker: str, *, is_whole: bool) -> None:
        """The calls of a section that ends; what is not a call is given back as text."""
        if self._json is not None and self._json.num_begun:
            rest = self._json.close(text)
            self._count_json(self._json)
            if rest.strip(_WHITESPACE) and not (is_whole and self._call(rest)):
                self._write(rest)
        elif not (is_whole and self._call(text)):
            if self._elements is not None and self._elements.num_begun:
                self.num_calls = self._elements.first_index + self._elements.num_begun
                self.num_broken += 1
                self._write(text.rpartition(self._elements.form.closing)[2] + marker)
            else:
                self._write(self._opened_by + text + marker)
        self._json = self._elements = None

    def _count_json(self, reader: JsonCallReader) -> None:
        self.num_calls = reader.first_index + reader.num_ended
        self.num_broken = reader.broken_before + reader.num_broken

    def _is_bare_call(self) -> bool:
        tools = self.output_format.tools
        if not tools or not tools.bare_start or self._has_answered or self.in_reasoning:
            return False
        return self._held.lstrip(_WHITESPACE).startswith(tools.bare_start)

    def _parsed(self, text: str) -> list[ParsedCall]:
        assert self.output_format.tools is not None
        try:
            return self.output_format.tools.parse(text)
        except (ValueError, KeyError, TypeError, AttributeError, SyntaxError):
            return []  # parsers of foreign text fail in many ways; the text is shown instead

    def _call(self, text: str) -> bool:
        calls = self._parsed(text)
        if self._elements is not None and calls:
            self._events += self._elements.finish(calls)
            self.num_calls += len(calls)
            return True
        for call in calls:
            self._events.append(ToolCallStart(self.num_calls, call.id or new_call_id(), call.name))
            self._events.append(ToolCallDelta(self.num_calls, call.arguments))
            self.num_calls += 1
        return bool(calls)

    def _wanted(self) -> list[str]:
        """Markers that mean something in the present state."""
        tools, reasoning = self.output_format.tools, self.output_format.reasoning
        if self._state is _State.REASONING and reasoning is not None:
            # A tool call inside reasoning ends it: some models forget to close.
            return [reasoning.end] + ([tools.markers.start] if tools else [])
        wanted = [reasoning.start] if reasoning and not self._has_answered else []
        return wanted + ([tools.markers.start] if tools else [])

    def _next_marker(self) -> tuple[int, str | None]:
        found: tuple[int, str | None] = (len(self._held), None)
        for marker in self._wanted():
            position = self._held.find(marker)
            if 0 <= position < found[0] and self._may_start(marker, position):
                found = (position, marker)
        return found

    def _may_start(self, marker: str, position: int) -> bool:
        """In mid-answer the word `<think>` is just a word."""
        reasoning = self.output_format.reasoning
        is_reasoning = reasoning is not None and marker == reasoning.start
        return not is_reasoning or not self._held[:position].strip(_WHITESPACE)

    def _trims(self, marker: str) -> bool:
        """Blank text before a call or at the end of reasoning belongs to the markers."""
        tools = self.output_format.tools
        return self._state is _State.REASONING or bool(tools and marker == tools.markers.start)

    def _possible_marker(self) -> int:
        """Index from which the held text could be the start of a marker (or blank before one)."""
        text = self._held
        longest = max(map(len, self._wanted()), default=1)
        earliest = len(text)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if any(marker.startswith(text[start:]) for marker in self._wanted()):
                earliest = start
                break
        if self.output_format.tools or self._state is _State.REASONING:
            earliest = len(text[:earliest].rstrip(_WHITESPACE))
        return earliest

    def _write(self, text: str) -> None:
        if self._skips_blank:
            text = text.lstrip(_WHITESPACE)
        if not text:
            return
        self._skips_blank = False
        if self._state is _State.REASONING:
            self._events.append(ReasoningDelta(text))
        else:
            self._has_answered = True
            self._events.append(TextDelta(text))

    def _take_events(self, scores: list[ScoredToken] | None) -> list[OutputEvent]:
        events, self._events = self._events, []
        if scores:
            for number, event in enumerate(events):
                if isinstance(event, TextDelta):
                    events[number] = TextDelta(event.text, scores)
                    break
        return events

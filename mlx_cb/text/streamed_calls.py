"""Tool calls that are given on while the model still writes them.

Owns how far a call's text can be trusted before it is whole: a JSON object's characters once its
name is known, or an element's value once the element is closed. Knows nothing about markers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mlx_cb.text.events import OutputEvent, ToolCallDelta, ToolCallStart
from mlx_cb.text.json_prefix import JsonPrefix
from mlx_cb.text.parsed_calls import ParseCalls, ParsedCall, new_call_id


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """A form of calls whose arguments are a JSON object, after the name.

    Attributes:
        head: matches from the end of the call before up to the object's brace; its group `name`
            is the tool's, `id` (if there is one) the call's.
        tail: what may follow the object, and means nothing.
        names: tools that may be called; None for any name.
    """

    head: re.Pattern[str]
    tail: re.Pattern[str]
    names: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class ElementArguments:
    """A form of calls with one element per argument: `closing` ends it, `rest` the call."""

    closing: str
    rest: str


CallStreaming = JsonArguments | ElementArguments


@dataclass(slots=True)
class JsonCallReader:
    """Calls of one section in a `JsonArguments` form, while they come in.

    `first_index` calls stood before it, `broken_before` of them broken. `num_begun` calls have been
    given on; of these, `num_broken` stopped being JSON or were never ended. What was given on of
    them is the beginning of an object, and the rest is text.
    """

    form: JsonArguments
    first_index: int
    broken_before: int = 0
    num_begun: int = 0
    num_broken: int = 0
    _object: JsonPrefix | None = None

    @property
    def is_open(self) -> bool:
        """True inside of arguments, where no marker means anything."""
        return self._object is not None

    @property
    def num_ended(self) -> int:
        """Calls that nothing more is added to."""
        return self.num_begun - self.is_open

    def feed(self, text: str) -> tuple[list[OutputEvent], str]:
        """Events that `text` gives rise to, and the part of it that is not understood yet."""
        events: list[OutputEvent] = []
        while text:
            if self._object is None:
                head = self.form.head.match(text)
                if head is None or not self._may_call(head["name"]):
                    break
                index = self.first_index + self.num_begun
                call_id = head.groupdict().get("id") or new_call_id()
                events.append(ToolCallStart(index, call_id, head["name"]))
                self.num_begun += 1
                self._object, text = JsonPrefix(), text[head.end() :]
            end = self._object.feed(text)
            index = self.first_index + self.num_begun - 1
            if end:
                events.append(ToolCallDelta(index, text[:end]))
            text = text[end:]
            if self._object.is_whole or self._object.is_broken:
                self.num_broken += self._object.is_broken
                self._object = None
        return events, text

    def close(self, text: str) -> str:
        """What of the section's last text is not part of any call."""
        if self._object is not None:
            self._object = None
            self.num_broken += 1
        tail = self.form.tail.match(text)
        return text[tail.end() :] if tail else text

    def _may_call(self, name: str) -> bool:
        return self.form.names is None or name in self.form.names


@dataclass(slots=True)
class ElementCallReader:
    """Calls of one section in an `ElementArguments` form, while they come in."""

    form: ElementArguments
    parse: ParseCalls
    first_index: int
    _given: list[str] = field(default_factory=list)
    _num_closings: int = 0

    @property
    def num_begun(self) -> int:
        """Calls that have been given on, so that their text cannot be taken back."""
        return len(self._given)

    def feed(self, text: str) -> list[OutputEvent]:
        """Events that the section's text so far gives rise to."""
        count = text.count(self.form.closing)
        if count == self._num_closings:
            return []
        self._num_closings = count
        end = text.rindex(self.form.closing) + len(self.form.closing)
        calls = self.parse(text[:end] + self.form.rest)
        return self._news(calls, is_whole=False)

    def finish(self, calls: list[ParsedCall]) -> list[OutputEvent]:
        """The events that are left when the section's calls are known."""
        return self._news(calls, is_whole=True)

    def _news(self, calls: list[ParsedCall], *, is_whole: bool) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for number, call in enumerate(calls):
            index = self.first_index + number
            if number == len(self._given):
                events.append(ToolCallStart(index, call.id or new_call_id(), call.name))
                self._given.append("")
            is_open = number == len(calls) - 1 and not is_whole
            text = call.arguments.removesuffix("}") if is_open else call.arguments
            before = self._given[number]
            if text.startswith(before) and text != before:
                events.append(ToolCallDelta(index, text[len(before) :]))
                self._given[number] = text
        return events

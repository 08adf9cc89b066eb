"""gpt-oss's channels, at every piece size."""

from __future__ import annotations

import json

import pytest

from mlx_cb.text.events import (
    EndReason,
    Finish,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from mlx_cb.text.harmony import HarmonyFormat

THINK = "<|channel|>analysis<|message|>The user < asks.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Hello <b>you</b>."
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
SIZES = pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])


def read(
    text: str, size: int, reason: EndReason = EndReason.STOP, *, tools: bool = True
) -> list[OutputEvent]:
    sections = HarmonyFormat(has_tools=tools).new_sections(in_reasoning=False)
    events: list[OutputEvent] = []
    for start in range(0, len(text), size):
        events += sections.feed(text[start : start + size])
    return events + sections.finish("", Finish(reason))


def texts(events: list[OutputEvent], kind: type) -> str:
    return "".join(e.text for e in events if isinstance(e, kind))


@SIZES
def test_analysis_is_reasoning_and_final_is_the_answer(size: int) -> None:
    events = read(THINK + FINAL, size)
    assert texts(events, ReasoningDelta) == "The user < asks."
    assert texts(events, TextDelta) == "Hello <b>you</b>."
    assert events[-1] == Finish(EndReason.STOP)


@SIZES
def test_a_call_ends_the_turn(size: int) -> None:
    events = read(THINK + CALL, size)
    start = next(e for e in events if isinstance(e, ToolCallStart))
    arguments = "".join(e.arguments for e in events if isinstance(e, ToolCallDelta))
    assert (start.name, json.loads(arguments)) == ("get_weather", {"city": "Rome"})
    assert events[-1] == Finish(EndReason.TOOL_CALLS)
    assert texts(events, TextDelta) == ""


@SIZES
def test_a_preamble_before_the_call_is_text(size: int) -> None:
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    events = read(preamble + CALL, size)
    assert texts(events, TextDelta) == "I look."
    assert any(isinstance(e, ToolCallStart) for e in events)


@SIZES
def test_a_cut_or_broken_call_is_text(size: int) -> None:
    cut = read(CALL[:-3], size, EndReason.LENGTH)
    assert texts(cut, TextDelta) == '{"city": "Rom'
    assert cut[-1] == Finish(EndReason.LENGTH)
    broken = read(CALL + "}}", size)
    assert texts(broken, TextDelta) == '{"city": "Rome"}}}'
    assert broken[-1] == Finish(EndReason.STOP)


@SIZES
def test_without_tools_a_call_is_text_and_plain_text_stays(size: int) -> None:
    assert texts(read(CALL, size, tools=False), TextDelta) == '{"city": "Rome"}'
    assert texts(read("no channels here", size), TextDelta) == "no channels here"

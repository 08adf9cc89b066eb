"""Tool calls that are given on while they are written: the same calls, only in pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from mlx_cb.core.outputs import RequestOutput
from mlx_cb.text.call_streaming import streaming_of
from mlx_cb.text.events import (
    EndReason,
    Finish,
    OutputEvent,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from mlx_cb.text.harmony import HarmonyFormat
from mlx_cb.text.output_parser import OutputParser, ParserOptions
from mlx_cb.text.sections import OutputFormat
from mlx_cb.text.streamed_calls import JsonArguments
from mlx_cb.text.tokenizer import Tokenizer
from mlx_cb.text.tools import tool_syntax
from tests.text.test_sections import FOREIGN, TOOLS, summary

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
HARD = {"city": 'a "q" \\ {b} [c] </tool_call> ſ𝄞\n', "more": [{"x": {}}, "}", 1.5, None]}
HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
    "to=functions.get_weather <|constrain|>json<|message|>%s<|call|>"
)


def read(
    name: str, text: str, size: int, reason: EndReason = EndReason.STOP, *, streams: bool = True
) -> list[OutputEvent]:
    made: Any = (
        HarmonyFormat(has_tools=True, streams_calls=streams)
        if name == "harmony"
        else OutputFormat(None, tool_syntax(name, TOOLS), streams_calls=streams)
    )
    sections = made.new_sections(in_reasoning=False)
    events: list[OutputEvent] = []
    for start in range(0, len(text), size):
        events += sections.feed(text[start : start + size])
    return events + sections.finish("", Finish(reason))


def deltas(events: list[OutputEvent]) -> list[str]:
    return [event.arguments for event in events if isinstance(event, ToolCallDelta)]


@SIZES
@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_streamed_calls_are_the_calls_of_the_whole_text(name: str, size: int) -> None:
    one = FOREIGN[name]
    for text in (one, f"Well.\n{one}" if name != "llama3" else one):
        assert summary(read(name, text, size)) == summary(read(name, text, size, streams=False))


@pytest.mark.parametrize("name", ["json_tools", "llama3", "mistral", "kimi_k2", "deepseek"])
def test_json_arguments_come_as_they_are_written(name: str) -> None:
    assert isinstance(streaming_of(name, TOOLS), JsonArguments)
    text = FOREIGN[name].replace('{"city": "Paris"}', json.dumps(HARD))
    for size in (1, 3, 50):
        events = read(name, text, size)
        assert summary(events)[2] == [("get_weather", HARD)]
        assert "".join(deltas(events)) == json.dumps(HARD)
        assert len(deltas(events)) >= len(json.dumps(HARD)) // size - 1


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_harmony_streams_too(size: int) -> None:
    events = read("harmony", HARMONY % json.dumps(HARD), size)
    assert summary(events)[1:] == ("hm", [("get_weather", HARD)], EndReason.TOOL_CALLS)
    assert len(deltas(events)) > 5 or size > 100


def test_an_argument_in_an_element_comes_when_it_is_closed() -> None:
    text = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=more>\nso on\n</parameter>\n</function>\n</tool_call>"
    )
    events = read("qwen3_coder", text, 1)
    assert deltas(events) == ['{"city": "Paris"', ', "more": "so on"', "}"]


@SIZES
@pytest.mark.parametrize("name", ["json_tools", "kimi_k2", "mistral", "minimax_m2"])
def test_calls_in_one_section_are_kept_apart(name: str, size: int) -> None:
    one = FOREIGN[name]
    syntax = tool_syntax(name, TOOLS)
    inside = one.removeprefix(syntax.markers.start).removesuffix(syntax.markers.end)
    twice = one + one if name == "json_tools" else one.replace(inside, inside + inside)
    events = read(name, twice, size)
    assert summary(events)[2] == [("get_weather", {"city": "Paris"})] * 2
    assert summary(events) == summary(read(name, twice, size, streams=False))


@SIZES
@pytest.mark.parametrize("name", [*sorted(FOREIGN), "harmony"])
def test_c056_a_cut_call_is_never_complete(name: str, size: int) -> None:
    """Cut anywhere: no text is lost, and arguments that were given on are a beginning."""
    whole = FOREIGN.get(name, HARMONY % '{"city": "Paris"}')
    for cut in random.Random(size).sample(range(1, len(whole)), 12):
        events = read(name, whole[:cut], size, EndReason.LENGTH)
        end = events[-1]
        assert isinstance(end, Finish)
        assert end.reason is EndReason.LENGTH
        given = "".join(deltas(events))
        assert '{"city": "Paris"}'.startswith(given)
        if not given and name != "harmony":
            text = "".join(event.text for event in events if isinstance(event, TextDelta))
            assert text.split() == whole[:cut].split() or whole[:cut] in whole[:1]


def test_what_is_no_call_is_text() -> None:
    for text in (
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        "<tool_call>{bad json}</tool_call>",
    ):
        answer, _, calls, end = summary(read("json_tools", text, 1))
        assert (answer, calls, end) == (text, [], EndReason.STOP)
    answer = '{"name": "somebody", "parameters": {"age": 3}}'
    assert summary(read("llama3", answer, 1))[0] == answer


def test_text_behind_a_call_is_kept() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}} and more</tool_call> tail'
    answer, _, calls, _ = summary(read("json_tools", text, 2))
    assert calls == [("f", {})]
    assert "and more" in answer
    assert answer.endswith("tail")


@SIZES
def test_broken_arguments_end_where_they_stop_being_json(size: int) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": bad}}</tool_call> So.'
    events = read("json_tools", text, size)
    assert "".join(deltas(events)) == '{"a": '
    answer = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert answer.startswith("bad}}")
    assert answer.endswith("So.")
    assert events[-1] == Finish(EndReason.STOP)  # not "tool calls": this one cannot be made


@SIZES
@pytest.mark.parametrize("second", [FOREIGN["json_tools"], ""])
def test_a_broken_call_does_not_take_others_with_it(size: int, second: str) -> None:
    broken = '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>'
    for text in (broken + second, second + broken):
        events = read("json_tools", text, size)
        starts = [event for event in events if isinstance(event, ToolCallStart)]
        assert [start.index for start in starts] == list(range(len(starts)))
        made = {start.name: "" for start in starts}
        for event in events:
            if isinstance(event, ToolCallDelta):
                made[starts[event.index].name] += event.arguments
        assert made.pop("f") == '{"a": 1'
        assert made == ({"get_weather": '{"city": "Paris"}'} if second else {})
        assert events[-1] == Finish(EndReason.STOP)


@pytest.mark.parametrize("name", ["json_tools", "harmony", "qwen3_coder"])
def test_a_turn_that_ends_within_arguments_is_no_call(name: str) -> None:
    whole = FOREIGN.get(name, HARMONY % '{"city": "Paris"}')
    cut = whole[: whole.index("Paris") + 3]
    events = read(name, cut, 4)
    assert events[-1] == Finish(EndReason.STOP)
    assert '{"city": "Paris"}'.startswith("".join(deltas(events)))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_broken_arguments_of_harmony(size: int) -> None:
    events = read("harmony", HARMONY % '{"city": Paris}', size)
    assert "".join(deltas(events)) == '{"city": '
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "Paris}"
    assert events[-1] == Finish(EndReason.STOP)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_only_whole_calls_count_for_a_limit(byte_level: Tokenizer, size: int) -> None:
    """With one call allowed, a broken one leaves room for the next."""
    broken = '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>'
    tools = OutputFormat(None, tool_syntax("json_tools", TOOLS), streams_calls=True)
    parser = OutputParser(byte_level, ParserOptions(output_format=tools, most_calls=1))
    ids = byte_level.encode(broken + FOREIGN["json_tools"] * 2, add_special_tokens=False)
    events: list[OutputEvent] = []
    for start in range(0, len(ids), size):
        if not parser.is_finished:
            events += parser.feed(RequestOutput("r", ids[start : start + size]))
    assert parser.is_finished
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    assert names == ["f", "get_weather"]
    assert events[-1] == Finish(EndReason.STOP)

"""Reasoning and tool calls in a text that comes in pieces: cases C055, C056, C060 to C062."""

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
from mlx_cb.text.reasoning import find_reasoning_markers, opens_reasoning
from mlx_cb.text.sections import Markers, OutputFormat, Sections
from mlx_cb.text.tools import find_tool_syntax, tool_syntax

THINK = Markers("<think>", "</think>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ARGUMENTS = {"city": "Paris"}


def read(
    text: str,
    output_format: OutputFormat,
    size: int,
    reason: EndReason = EndReason.STOP,
    in_reasoning: bool = False,
) -> list[OutputEvent]:
    sections = Sections(output_format, in_reasoning=in_reasoning)
    events: list[OutputEvent] = []
    for start in range(0, len(text), size):
        events += sections.feed(text[start : start + size])
    return events + sections.finish("", Finish(reason))


def summary(events: list[OutputEvent]) -> tuple[str, str, list[tuple[str, dict]], EndReason]:
    """Answer, reasoning, calls and the end."""
    names = {e.index: e.name for e in events if isinstance(e, ToolCallStart)}
    arguments = dict.fromkeys(names, "")
    for event in events:
        if isinstance(event, ToolCallDelta):
            arguments[event.index] += event.arguments
    calls = [(names[i], json.loads(arguments[i])) for i in sorted(names)]
    answer = "".join(e.text for e in events if isinstance(e, TextDelta))
    reasoning = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    end = events[-1]
    assert isinstance(end, Finish)
    assert sum(isinstance(e, Finish) for e in events) == 1
    return answer, reasoning, calls, end.reason


SIZES = pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
HERMES = OutputFormat(THINK, tool_syntax("json_tools", TOOLS))

FOREIGN = {
    "json_tools": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',  # noqa: E501
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",  # noqa: E501
    "glm47": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",  # noqa: E501
    "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',  # noqa: E501
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n</minimax:tool_call>',  # noqa: E501
    "pythonic": '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
    "function_gemma": "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",  # noqa: E501
    "longcat": "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Paris</longcat_arg_value>\n</longcat_tool_call>",  # noqa: E501
    "llama3": '{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',  # noqa: E501
}


@SIZES
@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_every_syntax_is_read_at_every_piece_size(name: str, size: int) -> None:
    output_format = OutputFormat(None, tool_syntax(name, TOOLS))
    answer, _, calls, end = summary(read(FOREIGN[name], output_format, size))
    assert answer == ""
    assert calls == [("get_weather", ARGUMENTS)]
    assert end is EndReason.TOOL_CALLS


@SIZES
def test_reasoning_answer_and_parallel_calls(size: int) -> None:
    call = FOREIGN["json_tools"]
    text = f"<think>\nlet me see\n</think>\n\nI look.\n{call}\n{call}"
    events = read(text, HERMES, size)
    assert summary(events) == (
        "I look.",
        "let me see",
        [("get_weather", ARGUMENTS)] * 2,
        EndReason.TOOL_CALLS,
    )
    starts = [e for e in events if isinstance(e, ToolCallStart)]
    assert [e.index for e in starts] == [0, 1]  # C055: two calls are not one
    assert len({e.id for e in starts}) == 2


@SIZES
def test_c056_a_call_cut_by_length_is_given_as_text(size: int) -> None:
    text = 'Well.\n<tool_call>\n{"name": "get_weather", "argum'
    answer, _, calls, end = summary(read(text, HERMES, size, EndReason.LENGTH))
    assert answer.replace("\n", "") == text.replace("\n", "")
    assert calls == []
    assert end is EndReason.LENGTH


@SIZES
@pytest.mark.parametrize("inside", ["{bad json}", "[]", '{"arguments": {}}', '{"name": 3}', "7"])
def test_c060_a_malformed_call_is_given_as_text(inside: str, size: int) -> None:
    text = f"<tool_call>{inside}</tool_call> and on"
    answer, _, calls, end = summary(read(text, HERMES, size))
    assert (answer, calls, end) == (text, [], EndReason.STOP)


@SIZES
def test_c061_reasoning_that_the_template_opened(size: int) -> None:
    events = read("hmm\n</think>\n\nYes.", HERMES, size, in_reasoning=True)
    assert summary(events)[:2] == ("Yes.", "hmm")


@SIZES
def test_c062_no_part_of_a_marker_leaks(size: int) -> None:
    for event in read("<think>a</think>b</thin", HERMES, size):
        if isinstance(event, ReasoningDelta):
            assert "<" not in event.text
    assert summary(read("<think>a</think>b</thin", HERMES, size))[:2] == ("b</thin", "a")


@SIZES
def test_markers_in_mid_answer_are_words(size: int) -> None:
    text = "The tag <think> opens, </think> closes."
    assert summary(read(text, HERMES, size))[0] == text


@SIZES
def test_blank_text_of_a_plain_answer_is_kept(size: int) -> None:
    text = "  a \n\n b \n"
    assert summary(read(text, HERMES, size))[0] == text
    assert summary(read("\n ", HERMES, size))[0] == "\n "


@SIZES
def test_json_that_is_not_a_call_is_an_answer(size: int) -> None:
    output_format = OutputFormat(None, tool_syntax("llama3", TOOLS))
    for text in ('{"name": "Bob", "age": 3}', '{"a": 1}', "{unfinished", "Say {x}."):
        assert summary(read(text, output_format, size))[0] == text


def test_arguments_may_be_json_text() -> None:
    text = (
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>'
    )
    assert summary(read(text, HERMES, 9))[2] == [("get_weather", ARGUMENTS)]


def test_syntax_and_markers_are_found_in_the_checkpoint() -> None:
    def none(text: str) -> bool:
        return False

    assert find_tool_syntax("… <｜tool▁calls▁begin｜> …", none) == "deepseek"
    assert find_tool_syntax("<tool_call>\n<function=x>", none) == "qwen3_coder"
    assert find_tool_syntax("{{ '[TOOL_CALLS]' }}", none) == "mistral"
    assert find_tool_syntax("<|python_tag|>", none) == "llama3"
    assert find_tool_syntax("plain", none) == "json_tools"
    assert find_reasoning_markers(none, "x</think>y") == THINK
    assert find_reasoning_markers({"[THINK]", "[/THINK]"}.__contains__, "") is not None
    assert find_reasoning_markers(none, "plain") is None
    assert opens_reasoning("<|assistant|><think>\n", THINK)
    assert not opens_reasoning("<think>\n\n</think>\n\n", THINK)

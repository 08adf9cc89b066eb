"""Forced calls in every form that mlx-lm's parsers read: what the grammar lets through is read."""

from __future__ import annotations

import json
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import llguidance
import pytest

from mlx_cb.engine.scripted_model import write_model_folder
from mlx_cb.text.call_forms import CALL_FORMS
from mlx_cb.text.events import EndReason, Finish, ToolCallDelta, ToolCallStart
from mlx_cb.text.harmony import HarmonyFormat
from mlx_cb.text.sections import OutputFormat
from mlx_cb.text.tokenizer import Tokenizer
from mlx_cb.text.tools import find_tool_syntax, tool_syntax

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["km", "mile"]},
        "deep": {"$ref": "#/$defs/deep"},
        "big": {"type": "boolean"},
    },
    "required": ["city", "count"],
    "additionalProperties": False,
    "$defs": {
        "deep": {
            "type": "object",
            "properties": {"tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
            "required": ["tags"],
            "additionalProperties": False,
        }
    },
}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
BARE = {"type": "function", "function": {"name": "now"}}
TOOLS = [ADD, BARE]
SPECIAL = (
    "[TOOL_CALLS]", "[ARGS]", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|open|>", "<|sep|>", "<|close|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<|channel|>", "<|constrain|>", "<|message|>", '<|"|>', "<|tool_call>", "<|tool_call_start|>",
)  # fmt: skip
CLOSING = [
    b"</parameter>", b"</arg_value>", b"</longcat_arg_value>", b"</param>", b"</atem:parameter>",
    b"<escape>",
]  # fmt: skip
# What a model may write of `add`'s arguments after the forced start that ends with the name.
ARGUMENTS = {"city": "Paris <3", "count": 7, "unit": "km", "deep": {"tags": ["a"]}}
JSON = '{"city":"Paris <3","count":7,"unit":"km","deep":{"tags":["a"]}}'
WRITTEN = {
    "json_tools": JSON + "}",
    "llama3": JSON + "}",
    "mistral": JSON,
    "kimi_k2": JSON + "<|tool_call_end|>",
    "kimi_k3": JSON + "<|close|>json<|sep|><|close|>call<|sep|>",
    "deepseek": JSON + "<｜tool▁call▁end｜>",
    "deepseek_fenced": JSON + "\n```<｜tool▁call▁end｜>",
    "harmony": JSON,
    "qwen3_coder": "<parameter=city>\nParis <3\n</parameter>\n<parameter=count>\n7</parameter>\n"
    '<parameter=unit>\nkm</parameter>\n<parameter=deep>\n{"tags":["a"]}</parameter>\n</function>',
    "glm47": "<arg_key>city</arg_key><arg_value>Paris <3</arg_value><arg_key>count</arg_key>"
    "<arg_value>7</arg_value><arg_key>unit</arg_key><arg_value>km</arg_value>"
    '<arg_key>deep</arg_key><arg_value>{"tags":["a"]}</arg_value>',
    "minimax_m2": '<parameter name="city">Paris <3</parameter>\n<parameter name="count">7'
    '</parameter>\n<parameter name="unit">km</parameter>\n<parameter name="deep">'
    '{"tags":["a"]}</parameter>\n</invoke>',
    "minicpm5": '<param name="city">Paris <3</param><param name="count">7</param>'
    '<param name="unit">km</param><param name="deep">{"tags":["a"]}</param></function>',
    "muse_spark": '<atem:parameter name="city">Paris <3</atem:parameter>\n'
    '<atem:parameter name="count">7</atem:parameter>\n<atem:parameter name="unit">km'
    '</atem:parameter>\n<atem:parameter name="deep">{"tags":["a"]}</atem:parameter>\n'
    "</atem:invoke>",
    "gemma4": 'city:<|"|>Paris <3<|"|>,count:7,unit:<|"|>km<|"|>,deep:{tags:[<|"|>a<|"|>]}}',
    "pythonic": 'city="Paris <3", count=7, unit="km", deep={"tags":["a"]})]',
}
_LINES = {"</arg_key>": "</arg_key>\n", "</arg_value>": "</arg_value>\n"}
WRITTEN["glm45"] = WRITTEN["glm47"]
for _tag, _line in _LINES.items():
    WRITTEN["glm45"] = WRITTEN["glm45"].replace(_tag, _line)
WRITTEN["longcat"] = WRITTEN["glm45"].replace("arg_", "longcat_arg_")
# Its parser knows no values inside values.
WRITTEN["function_gemma"] = "city:<escape>Paris <3<escape>,count:7,unit:<escape>km<escape>}"
SIMPLE = {name: value for name, value in ARGUMENTS.items() if name != "deep"}


@cache
def tokenizer() -> tuple[Tokenizer, llguidance.LLTokenizer]:
    """Bytes and all the control tokens above."""
    folder = Path(tempfile.mkdtemp())
    write_model_folder(folder, CLOSING, None)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    first = max(token["id"] for token in content["added_tokens"]) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] += [
        {"id": first + n, "content": text, "special": True, **plain}
        for n, text in enumerate(SPECIAL)
    ]
    file.write_text(json.dumps(content))
    own = Tokenizer.load(folder)
    end = own.token_id("<|im_end|>")
    return own, llguidance.LLTokenizer(str(file), n_vocab=own.vocab_size, eos_token=[end])


def matcher(name: str, tools: list[Any], tool: str | None) -> llguidance.LLMatcher:
    own, outer = tokenizer()
    text = CALL_FORMS[name].grammar(tools, own.special_tokens, with_names=tool is None)
    grammar = llguidance.LLMatcher.grammar_from_lark(text)
    made = llguidance.LLMatcher(outer, grammar)
    assert not made.is_error(), (text, made.get_error())
    return made


def accepts(name: str, tools: list[Any], tool: str | None, written: str) -> bool:
    ids = tokenizer()[0].encode(written, add_special_tokens=False)
    one = matcher(name, tools, tool)
    return one.try_consume_tokens(ids) == len(ids) and one.is_accepting()


def calls(name: str, text: str) -> list[tuple[str, Any]]:
    """What the parser reads in an answer."""
    made: Any = (
        HarmonyFormat(has_tools=True)
        if name == "harmony"
        else OutputFormat(None, tool_syntax(name, TOOLS))
    )
    sections = made.new_sections(in_reasoning=False)
    events = [*sections.feed(text), *sections.finish("", Finish(EndReason.STOP))]
    names = {e.index: e.name for e in events if isinstance(e, ToolCallStart)}
    found = dict.fromkeys(names, "")
    for event in events:
        if isinstance(event, ToolCallDelta):
            found[event.index] += event.arguments
    return [(names[index], json.loads(found[index])) for index in names]


FORMS = pytest.mark.parametrize("name", sorted(CALL_FORMS))


@FORMS
def test_a_named_call_follows_the_schema_and_is_read(name: str) -> None:
    written = WRITTEN[name]
    assert accepts(name, [ADD], "add", written)
    assert not accepts(name, [ADD], "add", written.replace("7", '"x"'))
    assert not accepts(name, [ADD], "add", written.replace("km", "league"))
    assert not accepts(name, [ADD], "add", "Paris is far away.")
    expected = SIMPLE if name == "function_gemma" else ARGUMENTS
    assert calls(name, CALL_FORMS[name].start("add") + written) == [("add", expected)]


@FORMS
def test_any_tool_may_be_required(name: str) -> None:
    form = CALL_FORMS[name]
    after_name = form.start("add").removeprefix(form.start(None))
    assert accepts(name, TOOLS, None, after_name + WRITTEN[name])
    assert not accepts(name, TOOLS, None, "sub" + after_name[3:] + WRITTEN[name])


@FORMS
@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_grammar_lets_through_is_read_as_a_valid_call(name: str, seed: int) -> None:
    """A model that picks any allowed token, but likes to come to an end."""
    own, _ = tokenizer()
    rng = random.Random(seed)
    schema = {**SCHEMA, "properties": {k: v for k, v in SCHEMA["properties"].items()
                                       if k != "deep" or name != "function_gemma"}}  # fmt: skip
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    walk = matcher(name, [tool], "add")
    end, quote = own.token_id("<|im_end|>"), ord('"')
    ids: list[int] = []
    while not walk.is_stopped() and len(ids) < 3000:
        mask = walk.compute_bitmask()
        allowed = [i for i in range(own.vocab_size) if mask[i // 8] >> (i % 8) & 1]
        if end in allowed and rng.random() < 0.5:
            break
        letters = [i for i in allowed if i < 128 and chr(i).isalnum()]
        closing = [i for i in allowed if i >= 256 or i == quote if i != end]
        chosen = rng.choice(closing if closing and rng.random() < 0.4 else letters or allowed)
        ids.append(chosen)
        assert walk.consume_token(chosen)
    text = own.decode(ids, skip_special_tokens=False)
    ((called, arguments),) = calls(name, CALL_FORMS[name].start("add") + text)
    assert called == "add"
    jsonschema_rs.validate(schema, arguments)


def test_every_syntax_that_is_found_has_a_form() -> None:
    templates = {
        "<|channel|><|constrain|>": "harmony",
        "<｜tool▁calls▁begin｜>": "deepseek",
        "<｜tool▁calls▁begin｜>```json": "deepseek_fenced",
        "<arg_key>{{ k }}</arg_key><arg_value>": "glm47",
        "<arg_key>{{ k }}</arg_key>\n<arg_value>": "glm45",
        "<minimax:tool_call>": "minimax_m2",
        "<|tool_call><tool_call|>": "gemma4",
        "<start_function_call>": "function_gemma",
        "<longcat_tool_call>": "longcat",
        "<|tool_call_start|>": "pythonic",
        "<tool_call>\n<function=": "qwen3_coder",
        "<|tool_calls_section_begin|>": "kimi_k2",
        '<function name="<param name="': "minicpm5",
        "[TOOL_CALLS]": "mistral",
        "<atem:function_calls>": "muse_spark",
        "<tool_call>": "json_tools",
        "<|python_tag|>": "llama3",
        "": "json_tools",
    }
    for template, name in templates.items():
        assert find_tool_syntax(template, lambda text: False) == name
        assert name in CALL_FORMS
    assert find_tool_syntax("", lambda text: text in ("<|open|>", "<|sep|>")) == "kimi_k3"
    assert set(CALL_FORMS) == {*templates.values(), "kimi_k3"}


@FORMS
def test_a_tool_without_parameters_can_be_forced(name: str) -> None:
    form = CALL_FORMS[name]
    is_json = accepts(name, [BARE], "now", "{}" + form.close)
    written = ("{}" if is_json else "") + form.close
    assert accepts(name, [BARE], "now", written)
    assert calls(name, form.start("now") + written) == [("now", {})]

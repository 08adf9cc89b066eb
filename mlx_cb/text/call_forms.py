"""How each family of models writes a tool call, exactly enough to force one by a grammar.

Owns the fixed texts around names and arguments, and what a tool's schema becomes between them.
Rules are Lark, as llguidance reads it. Knows nothing about requests or how calls are parsed.

Source of the forms: the parsers in mlx-lm's `tool_parsers`, which have to read what is forced here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_cb.text.lark_rules import LarkRules, Schema, enumerated, is_text, properties_of

Arguments = Callable[[LarkRules, Schema], str]
_DEEPEST = 8  # of nested values in a form of its own; deeper ones are left to the model


def _json(rules: LarkRules, schema: Schema) -> str:
    """One JSON object."""
    return rules.json(schema)


@dataclass(frozen=True, slots=True)
class Tagged:
    """Arguments as one element each, texts bare, everything else as JSON.

    `opening` holds NAME where the argument's name goes; `after` follows `closing`.
    """

    opening: str
    closing: str
    after: str = ""

    def __call__(self, rules: LarkRules, schema: Schema) -> str:
        """The arguments in the schema's order; those that are not required may be left out."""
        parts = []
        for name, one, is_required in properties_of(schema):
            before = rules.literal(self.opening.replace("NAME", name))
            part = f"{before} {self._value(rules, one)} {rules.literal(self.after)}"
            parts.append(part if is_required else f"({part})?")
        return " ".join(parts)

    def _value(self, rules: LarkRules, schema: Schema) -> str:
        if choices := enumerated(schema):
            return f"({rules.either(choices)}) {rules.literal(self.closing)}"
        if is_text(schema):
            return rules.text_until(self.closing)
        return f"{rules.json(schema)} {rules.literal(self.closing)}"


@dataclass(frozen=True, slots=True)
class Quoted:
    """`name:value` pairs with commas, texts between `quote` marks, keys bare."""

    quote: str

    def __call__(self, rules: LarkRules, schema: Schema) -> str:
        """The pairs, without braces around them."""
        return self._pairs(rules, schema, 0)

    def _pairs(self, rules: LarkRules, schema: Schema, depth: int) -> str:
        return _separated(
            rules,
            [
                (f"{rules.literal(name + ':')} {self._value(rules, one, depth + 1)}", is_required)
                for name, one, is_required in properties_of(schema)
            ],
            ",",
        )

    def _value(self, rules: LarkRules, schema: Schema, depth: int) -> str:
        quote = rules.literal(self.quote)
        if choices := enumerated(schema):
            texts = [c for c in choices if isinstance(c, str)]
            others = [c for c in choices if not isinstance(c, str)]
            parts = [f"{quote} ({rules.either(texts)}) {quote}"] if texts else []
            return f"({' | '.join([*parts, rules.either(others)] if others else parts)})"
        kind = schema.get("type")
        if kind == "object" and depth < _DEEPEST:
            return f'"{{" {self._pairs(rules, schema, depth)} "}}"'
        if kind == "array" and depth < _DEEPEST:
            item = self._value(rules, rules.resolved(schema.get("items") or {}, schema), depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        if is_text(schema) or kind in ("object", "array"):
            return f"{quote} {rules.text_until(self.quote)}"
        return rules.json(schema)


def _keywords(rules: LarkRules, schema: Schema) -> str:
    """Python keyword arguments with JSON values; a name that Python cannot say is left out."""
    pairs = [
        (f"{rules.literal(name + '=')} {rules.json(one)}", is_required)
        for name, one, is_required in properties_of(schema)
        if name.isidentifier()
    ]
    return _separated(rules, pairs, ", ")


def _separated(rules: LarkRules, parts: list[tuple[str, bool]], separator: str) -> str:
    """Parts in order, some of which may be left out, with separators only between two."""
    mark = rules.literal(separator)
    begun, empty = rules.rule(""), rules.rule("")  # what may follow a part, and nothing yet
    for part, is_required in reversed(parts):
        after = f"{mark} {part} {begun}"
        first = f"{part} {begun}"
        empty = rules.rule(first if is_required else f"{first} | {empty}")
        begun = rules.rule(after if is_required else f"{after} | {begun}")
    return empty


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a call is written, in the order name, arguments.

    Attributes:
        opening: how every call begins.
        before_name: from there to the name.
        between: from the name to the arguments.
        close: what ends the call after its arguments; an end marker may be left out.
        arguments: a schema's arguments as a Lark expression.
    """

    opening: str
    before_name: str
    between: str
    close: str = ""
    arguments: Arguments = _json

    def start(self, name: str | None) -> str:
        """The beginning of a call to `name`, or to any tool."""
        return self.opening + self.before_name + (f"{name}{self.between}" if name else "")

    def grammar(
        self,
        tools: list[dict[str, Any]],
        specials: Mapping[str, int],
        *,
        start: str = "",
        with_names: bool = True,
    ) -> str:
        """Lark of one call to one of the tools.

        Args:
            tools: OpenAI function tools.
            specials: control tokens by their text, which a grammar has to name by id.
            start: what stands before the name, "" where the prompt holds it.
            with_names: False when the prompt holds the name as well.
        """
        rules = LarkRules(specials)
        calls = []
        for tool in tools:
            function = tool["function"]
            schema = function.get("parameters") or {"type": "object"}
            before = start + (function["name"] + self.between if with_names else "")
            made = [rules.literal(before), self.arguments(rules, schema), rules.literal(self.close)]
            calls.append(rules.rule(" ".join(filter(None, made))))
        return rules.grammar(" | ".join(calls))


CALL_FORMS = {
    "json_tools": CallForm("<tool_call>", '\n{"name": "', '", "arguments": ', "}"),
    "llama3": CallForm('{"name": "', "", '", "parameters": ', "}"),
    "mistral": CallForm("[TOOL_CALLS]", "", "[ARGS]"),
    "kimi_k2": CallForm(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    "kimi_k3": CallForm(
        "<|open|>tools<|sep|>",
        '<|open|>call tool="',
        '" index="1"<|sep|><|open|>json type="object"<|sep|>',
        "<|close|>json<|sep|><|close|>call<|sep|>",
    ),
    "deepseek": CallForm(
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    ),
    "deepseek_fenced": CallForm(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
    ),
    "harmony": CallForm("<|channel|>", "commentary to=functions.", " <|constrain|>json<|message|>"),
    "qwen3_coder": CallForm(
        "<tool_call>",
        "\n<function=",
        ">\n",
        "</function>",
        Tagged("<parameter=NAME>\n", "</parameter>", "\n"),
    ),
    "glm47": CallForm(
        "<tool_call>",
        "",
        "",
        "",
        Tagged("<arg_key>NAME</arg_key><arg_value>", "</arg_value>"),
    ),
    "glm45": CallForm(
        "<tool_call>",
        "",
        "\n",
        "",
        Tagged("<arg_key>NAME</arg_key>\n<arg_value>", "</arg_value>", "\n"),
    ),
    "longcat": CallForm(
        "<longcat_tool_call>",
        "",
        "\n",
        "",
        Tagged(
            "<longcat_arg_key>NAME</longcat_arg_key>\n<longcat_arg_value>",
            "</longcat_arg_value>",
            "\n",
        ),
    ),
    "minimax_m2": CallForm(
        "<minimax:tool_call>",
        '\n<invoke name="',
        '">\n',
        "</invoke>",
        Tagged('<parameter name="NAME">', "</parameter>", "\n"),
    ),
    "minicpm5": CallForm(
        "<function name=", '"', '">', "</function>", Tagged('<param name="NAME">', "</param>")
    ),
    "muse_spark": CallForm(
        "<atem:function_calls>",
        '\n<atem:invoke name="',
        '">\n',
        "</atem:invoke>",
        Tagged('<atem:parameter name="NAME">', "</atem:parameter>", "\n"),
    ),
    "gemma4": CallForm("<|tool_call>", "call:", "{", "}", Quoted('<|"|>')),
    "function_gemma": CallForm("<start_function_call>", "call:", "{", "}", Quoted("<escape>")),
    "pythonic": CallForm("<|tool_call_start|>", "[", "(", ")]", _keywords),
}

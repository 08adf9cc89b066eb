"""Lark rules for llguidance: literals with control tokens in them, JSON values, free text.

Owns how a text or a schema is written in a grammar. Knows nothing about tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Schema = dict[str, Any]
# With free white space a model at high temperature writes blanks for ever.
JSON_OPTIONS: Any = {"whitespace_flexible": False}
_REGEX_SIGNS = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_DEFINITIONS = ("$defs", "definitions")


class LarkRules:
    """Rules while they are gathered."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        """`specials` are the control tokens' ids by text: a grammar's texts never match them."""
        self._specials = specials
        longest_first = sorted(specials, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        """Exactly this text; "" for none."""
        parts = self._pattern.split(text) if self._specials else [text]
        made = [
            f"<[{self._specials[part]}]>" if part in self._specials else json.dumps(part)
            for part in parts
            if part
        ]
        return " ".join(made)

    def either(self, values: Sequence[Any]) -> str:
        """One of these values: a text as it is, anything else as JSON."""
        texts = [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
        return " | ".join(self.literal(text) or '""' for text in texts)

    def json(self, schema: Schema) -> str:
        """A JSON value. What the schema has beyond llguidance's reach is left to the model."""
        options = {**JSON_OPTIONS, "lenient": True}
        return f"%json {json.dumps({**schema, 'x-guidance': options})}"

    def text_until(self, end: str) -> str:
        """Any text up to `end`, and `end`."""
        if end in self._specials:
            return f"{self.rule('/(?s:.*)/')} {self.literal(end)}"
        ending = _REGEX_SIGNS.sub(lambda sign: "\\" + sign[0], end)
        return self.rule(f"/(?s:.*){ending}/", attribute="[lazy]")

    def rule(self, body: str, attribute: str = "") -> str:
        """A new rule; returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def grammar(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules])

    @staticmethod
    def resolved(schema: Any, root: Schema) -> Schema:
        """A part of `root` that can stand alone: references followed, definitions at hand."""
        return _resolved(schema, root)


def properties_of(schema: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """Name, schema and whether it is required, of each of an object's properties."""
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    properties = schema.get("properties")
    for name, one in (properties if isinstance(properties, dict) else {}).items():
        yield name, _resolved(one, schema), name in names


def enumerated(schema: Schema) -> list[Any]:
    """The values a schema lists; [] when it lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def is_text(schema: Schema) -> bool:
    """True when the value is, or may be, a string."""
    kinds = _kinds(schema)
    return not kinds or "string" in kinds


def _kinds(schema: Schema) -> set[str]:
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for union in ("anyOf", "oneOf"):
        for one in schema.get(union) or []:
            kinds |= _kinds(_resolved(one, schema))
    return kinds


def _resolved(schema: Any, root: Schema) -> Schema:
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    seen: set[str] = set()
    while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
        place, found = reference.removeprefix("#/").split("/"), root
        if reference in seen or not reference.startswith("#/"):
            return {}
        seen.add(reference)
        for step in place:
            found = found.get(step, {}) if isinstance(found, dict) else {}
        schema = found
    return {**definitions, **schema} if isinstance(schema, dict) else {}

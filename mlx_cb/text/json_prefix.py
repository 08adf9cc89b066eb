"""Follows a JSON value while it is written, and knows at once when it can no longer become JSON.

RFC 8259 to the letter: what it takes as whole, every client's parser takes. Knows nothing about
tool calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

_BLANK = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
#: What a number can begin with: all of the above, each part of it optional from the end on.
_NUMBER_START = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][-+]?[0-9]*)?)?")
_LITERALS = ("true", "false", "null")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"{": "}", "[": "]"}


class _Next(Enum):
    """What has to come next."""

    VALUE = "a value"
    FIRST_ITEM = "a value, or the end of the list"
    FIRST_KEY = "a key, or the end of the object"
    KEY = "a key"
    COLON = "a colon"
    COMMA = "a comma, or the end of what is open"


@dataclass(slots=True)
class JsonPrefix:
    """One JSON value in pieces. Feed it until `is_whole` or `is_broken`."""

    is_whole: bool = False
    is_broken: bool = False
    _next: _Next = _Next.VALUE
    _open: list[str] = field(default_factory=list)
    _in_string: bool = False
    _escape: str = ""  # from the backslash on, while it goes on
    _word: str = ""  # a number or literal, while it goes on

    def feed(self, text: str) -> int:
        """How many characters of `text` go on with the value; all of them unless it ends here,
        or breaks."""
        position = 0
        while position < len(text) and not (self.is_whole or self.is_broken):
            if self._in_string:
                position = self._read_string(text, position)
            elif self._word:
                position = self._read_word(text, position)
            else:
                position = self._read_sign(text, position)
        return position

    def _read_string(self, text: str, position: int) -> int:
        if self._escape:
            return self._read_escape(text, position)
        found = _PLAIN.match(text, position)
        assert found is not None
        position = found.end()
        if position == len(text):
            return position
        match text[position]:
            case '"':
                self._in_string = False
                self._after_string()
            case "\\":
                self._escape = "\\"
            case _:
                self.is_broken = True
                return position
        return position + 1

    def _read_escape(self, text: str, position: int) -> int:
        sign = text[position]
        is_first = len(self._escape) == 1
        if is_first and sign in _ESCAPES:
            self._escape = ""
        elif (is_first and sign == "u") or (not is_first and sign in _HEX):
            self._escape += sign
            if len(self._escape) == len("\\u0000"):
                self._escape = ""
        else:
            self.is_broken = True
            return position
        return position + 1

    def _read_word(self, text: str, position: int) -> int:
        """A number or literal; only what follows it says that it has ended."""
        found = _WORD.match(text, position)
        assert found is not None
        for end in range(position, found.end()):
            word = self._word + text[end]
            is_literal = any(literal.startswith(word) for literal in _LITERALS)
            if not is_literal and not _NUMBER_START.fullmatch(word):
                self.is_broken = True
                return end
            self._word = word
        if found.end() < len(text):
            if self._word in _LITERALS or _NUMBER.fullmatch(self._word):
                self._word = ""
                self._after_value()
            else:
                self.is_broken = True
        return found.end()

    def _read_sign(self, text: str, position: int) -> int:
        found = _BLANK.match(text, position)
        assert found is not None
        position = found.end()
        if position == len(text):
            return position
        sign = text[position]
        if not self._takes(sign):
            self.is_broken = True
            return position
        return position + 1

    def _takes(self, sign: str) -> bool:
        """Whether this sign may come next; if so, what is open and what comes next follow it."""
        wanted = self._next
        if self._open and sign == _CLOSING[self._open[-1]]:
            first = _Next.FIRST_KEY if sign == "}" else _Next.FIRST_ITEM
            if wanted not in (_Next.COMMA, first):
                return False
            self._open.pop()
            self._after_value()
            return True
        if wanted in (_Next.VALUE, _Next.FIRST_ITEM):
            return self._opens_value(sign)
        if wanted in (_Next.KEY, _Next.FIRST_KEY):
            self._in_string = sign == '"'
            return self._in_string
        if wanted is _Next.COLON:
            self._next = _Next.VALUE
            return sign == ":"
        self._next = _Next.KEY if self._open[-1] == "{" else _Next.VALUE
        return sign == ","

    def _opens_value(self, sign: str) -> bool:
        if sign == '"':
            self._in_string = True
            self._next = _Next.VALUE
        elif sign in _CLOSING:
            self._open.append(sign)
            self._next = _Next.FIRST_KEY if sign == "{" else _Next.FIRST_ITEM
        elif sign in "-0123456789tfn":
            self._word = sign
        else:
            return False
        return True

    def _after_string(self) -> None:
        if self._next in (_Next.KEY, _Next.FIRST_KEY):
            self._next = _Next.COLON
        else:
            self._after_value()

    def _after_value(self) -> None:
        self._next = _Next.COMMA
        self.is_whole = not self._open

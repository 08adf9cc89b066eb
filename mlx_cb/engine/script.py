"""The file behind `mlx-cb serve scripted:FILE`: what it may say, and how it is read.

YAML, JSON or TOML. Unknown keys are errors, so that a typo does not go unnoticed. Knows nothing
about how replies are played.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from mlx_cb.errors import UnsupportedModel

_MARKERS = re.compile(r"(</?think>|</?tool_call>)")
_WORDS = re.compile(r"\s*\S+|\s+")


class ScriptToken(msgspec.Struct, forbid_unknown_fields=True):
    """One token: its text, or its bytes in hexadecimal when it is half a character."""

    text: str | None = None
    hex: str | None = None
    logprob: float = 0.0
    top: list[tuple[str, float]] = []

    @property
    def value(self) -> bytes:
        """The token's bytes."""
        return bytes.fromhex(self.hex) if self.hex is not None else (self.text or "").encode()


class ScriptCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call, written in the Hermes form."""

    name: str
    arguments: dict[str, Any] = {}


class Reply(msgspec.Struct, forbid_unknown_fields=True):
    """What to answer to a prompt.

    The first reply fits whose `match` (a regular expression) is found in the rendered prompt and
    whose `turn` equals the number of tool results in it; a reply without them fits always.

    `prefill_s` passes before the first token, `delay_s` between two. `repeat` goes on for ever.
    `finish: error` ends in a failure after the tokens; `refuse` refuses with this HTTP status.
    """

    match: str | None = None
    turn: int | None = None
    tokens: list[str | ScriptToken] | None = None
    reasoning: str | None = None
    text: str | None = None
    tool_calls: list[ScriptCall] = []
    prefill_s: float = 0.0
    delay_s: float = 0.0
    repeat: bool = False
    finish: Literal["stop", "error"] = "stop"
    refuse: Literal[400, 429, 503] | None = None
    retry_after: float = 1.0
    times: int | None = None
    cached_tokens: int = 0

    def script_tokens(self) -> list[ScriptToken]:
        """The tokens in order; a text is cut at words and markers."""
        if self.tokens is not None:
            return [t if isinstance(t, ScriptToken) else ScriptToken(t) for t in self.tokens]
        text = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        text += self.text or ""
        for number, call in enumerate(self.tool_calls):
            written = json.dumps(msgspec.to_builtins(call), ensure_ascii=False)
            gap = "\n" if text and (number or self.text) else ""
            text += f"{gap}<tool_call>\n{written}\n</tool_call>"
        pieces = [piece for part in _MARKERS.split(text) for piece in _split(part)]
        return [ScriptToken(piece) for piece in pieces]


class Script(msgspec.Struct, forbid_unknown_fields=True):
    """A whole file.

    `max_num_seqs` replies play at once, the others wait; None plays all.
    """

    replies: list[Reply]
    model: str = "scripted"
    max_model_len: int = 262144
    max_num_seqs: int | None = None
    load_s: float = 0.0
    chat_template: str | None = None
    embedding_size: int | None = None


def _split(part: str) -> list[str]:
    return [part] if _MARKERS.fullmatch(part) else _WORDS.findall(part)


def read_script(path: Path) -> Script:
    """Read and check a script. Raises UnsupportedModel with the place of a mistake."""
    try:
        content = path.read_text("utf-8")
    except OSError as error:
        raise UnsupportedModel(f"the script {path} cannot be read: {error.strerror}") from error
    try:
        if path.suffix == ".toml":
            return msgspec.convert(tomllib.loads(content), Script)
        if path.suffix == ".json":
            return msgspec.json.decode(content, type=Script)
        return msgspec.yaml.decode(content, type=Script)
    except (msgspec.DecodeError, tomllib.TOMLDecodeError) as error:
        raise UnsupportedModel(f"the script {path} is wrong: {error}") from error

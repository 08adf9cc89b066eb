"""Reads a request's body: size limit, UTF-8, JSON, types. Every failure names what is wrong."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope

from mlx_cb.errors import InvalidRequest, MlxCbError, RequestTooLarge
from mlx_cb.server.compression import ENCODINGS, DamagedBody, decompress

T = TypeVar("T")
_PATH = re.compile(r" - at `(?P<key>key in )?\$(?P<path>[^`]*)`\Z")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_MAGIC = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}  # RFC 1952, RFC 8878
_HALF = re.compile("[\ud800-\udfff]")
_STEPS = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}
_NO_BRACKETS = bytes(set(range(256)) - set(_STEPS))

# Looking for duplicate keys takes five times as long as decoding; huge bodies go without, and
# without the look at their depth, which the interpreter's own limit then bounds.
LARGEST_CHECKED = 2**20
# Objects and lists within each other. Far more than any client sends, and few enough for all that
# walks through them by calling itself: templates, schema compilers.
DEEPEST = 128
# A body may take this many seconds, and longer as long as so many bytes come per second.
PATIENCE_S, SLOWEST = 20.0, 4096


class UnsupportedEncoding(MlxCbError):
    """The body is compressed in a way that this server does not read."""

    status = 415
    code = "unsupported_encoding"


class BodyTooSlow(MlxCbError):
    """The body does not come in a time that suits its length."""

    status = 408
    code = "request_timeout"


class ClientGone(Exception):
    """The client closed the connection."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body.

    Raises RequestTooLarge, BodyTooSlow, and ClientGone when the client hangs up.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
    encoding = _encoding(scope)
    clock = asyncio.get_running_loop().time
    pieces, size, started = [], 0, clock()
    while True:
        try:
            async with asyncio.timeout_at(started + PATIENCE_S + size / SLOWEST):
                message = await receive()
        except TimeoutError:
            raise BodyTooSlow(
                f"after {clock() - started:.0f} s only {size} bytes of the request body were there"
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            break
    body = b"".join(pieces)
    return body if encoding == "identity" else _decompressed(body, encoding, limit)


def _encoding(scope: Scope) -> str:
    """The body's compression. Raises UnsupportedEncoding."""
    named = [value for name, value in scope["headers"] if name == b"content-encoding"]
    encoding = named[0].decode("latin-1").strip().lower() if named else "identity"
    if encoding not in ENCODINGS and encoding != "identity":
        raise UnsupportedEncoding(
            f"the request body is compressed with {encoding!r}; this server reads "
            f"{', '.join(ENCODINGS)} or no compression"
        )
    return encoding


def _decompressed(body: bytes, encoding: str, limit: int) -> bytes:
    """The plain body; a small body that unpacks to a huge one is refused before it does."""
    try:
        plain = decompress(body, encoding, limit + 1)
    except DamagedBody as error:
        raise InvalidRequest(f"the request body is not valid {encoding}: {error}") from error
    if len(plain) > limit:
        raise _too_large(limit)
    return plain


def decode_json(body: bytes, kind: type[T]) -> T:
    """Decode and check types; unknown keys are ignored. Raises InvalidRequest with `param`.

    A byte order mark is passed over.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        decoded = msgspec.json.decode(body, type=kind)
        if len(body) <= LARGEST_CHECKED:
            _check_depth(body)
            json.loads(body, object_pairs_hook=_without_duplicates)
        return decoded
    except msgspec.ValidationError as error:
        raise _naming_the_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(body, error) from error
    except RecursionError as error:
        raise _too_deep(body) from error


def _check_depth(body: bytes) -> None:
    """Raises InvalidRequest for valid JSON that is nested deeper than `DEEPEST`."""
    if body.count(b"{") + body.count(b"[") > DEEPEST and _depth(body) > DEEPEST:
        raise _too_deep(body)


def _depth(text: bytes) -> int:
    """Objects and lists within each other, in valid JSON."""
    brackets = _STRING.sub(b"", text).translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _too_deep(body: bytes) -> InvalidRequest:
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        fields = {}  # so deep that not even the field is found
    name = next((name for name, part in fields.items() if _depth(bytes(part)) >= DEEPEST), None)
    place = name or "the request body"
    return InvalidRequest(f"{place}: nested deeper than {DEEPEST} levels", param=name)


def _unreadable(body: bytes, error: Exception) -> InvalidRequest:
    """What is wrong with a body that is no JSON."""
    if not body.strip():
        return InvalidRequest("the request body is empty; a JSON object is needed")
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return InvalidRequest("the request body is UTF-16; JSON is sent as UTF-8")
    for encoding, start in _MAGIC.items():
        if body.startswith(start):
            return InvalidRequest(
                f"the request body is compressed with {encoding}, but no Content-Encoding header "
                f"says so"
            )
    try:
        text = body.decode()
    except UnicodeDecodeError as wrong:
        return InvalidRequest(
            f"the request body is not valid UTF-8: byte 0x{body[wrong.start]:02x} at position "
            f"{wrong.start}"
        )
    try:
        found = next(_surrogates(json.loads(text)), None)
    except (ValueError, RecursionError):
        found = None
    if found is None:
        return InvalidRequest(f"the request body is not valid JSON: {_in_plain_words(error)}")
    path, half = found
    return InvalidRequest(
        f"{path or 'the request body'}: \\u{ord(half):04x} is half of a surrogate pair, which is "
        f"no character",
        param=path or None,
    )


def _in_plain_words(error: Exception) -> str:
    words = str(error)
    return "it ends too early" if words == "Input data was truncated" else words


def _surrogates(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and half of every text that holds half of a surrogate pair; for a key, the path of
    its object."""
    match value:
        case str():
            if found := _HALF.search(value):
                yield path, found[0]
        case dict():
            for key, part in value.items():
                yield from _surrogates(key, path)
                yield from _surrogates(part, f"{path}.{key}" if path else key)
        case list():
            for number, part in enumerate(value):
                yield from _surrogates(part, f"{path}[{number}]")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    """Refuse an object that says a key twice: nobody can know which one was meant."""
    if len(pairs) > 1 and len({key for key, _ in pairs}) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        twice = twice.encode(errors="replace").decode()  # it may be no text that can be sent back
        raise InvalidRequest(f"{twice} is given twice", param=twice)


def _naming_the_field(message: str) -> InvalidRequest:
    path = _PATH.search(message)
    param = path["path"].lstrip(".") if path else ""
    reason = message[: path.start()] if path else message
    missing = _MISSING.search(message)
    if missing:
        param = f"{param}.{missing['field']}" if param else missing["field"]
        return InvalidRequest(f"{param} is missing", param=param)
    text = reason[:1].lower() + reason[1:]
    return InvalidRequest(f"{param or 'the request body'}: {text}", param=param or None)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the request body is larger than {limit} bytes, the most this server accepts"
    )

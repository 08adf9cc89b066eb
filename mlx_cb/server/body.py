"""Reads a request's body: size limit, UTF-8, JSON, types. Every failure names what is wrong."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope

from mlx_cb.errors import InvalidRequest, MlxCbError, RequestTooLarge
from mlx_cb.server.compression import ENCODINGS, DamagedBody, decompress

T = TypeVar("T")
_PATH = re.compile(r" - at `(?P<key>key in )?\$(?P<path>[^`]*)`\Z")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")


# Looking for duplicate keys takes five times as long as decoding; huge bodies go without.
_LARGEST_CHECKED = 2**20
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
    """Decode and check types; unknown keys are ignored. Raises InvalidRequest with `param`."""
    try:
        decoded = msgspec.json.decode(body, type=kind)
        if len(body) <= _LARGEST_CHECKED:
            json.loads(body, object_pairs_hook=_without_duplicates)
        return decoded
    except msgspec.ValidationError as error:
        raise _naming_the_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the request body is nested too deeply") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    """Refuse an object that says a key twice: nobody can know which one was meant."""
    if len(pairs) > 1 and len({key for key, _ in pairs}) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
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

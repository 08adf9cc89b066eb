"""Unpacks compressed request bodies, never further than a limit.

Owns which encodings are read. Knows nothing about HTTP.
"""

from __future__ import annotations

import sys
import zlib
from typing import Protocol

import brotli

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


class DamagedBody(ValueError):
    """The bytes are not what their encoding says."""


class _Unpacking(Protocol):
    """What zlib's and zstd's decompressors have in common."""

    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Brotli:
    """Brotli's decompressor in the words of the others."""

    def __init__(self) -> None:
        self._unpacking = brotli.Decompressor()

    @property
    def eof(self) -> bool:
        return bool(self._unpacking.is_finished())

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        # The limit is one of memory blocks: what comes out may be a little more, never less.
        return bytes(self._unpacking.process(data, output_buffer_limit=max_length))


def _new(encoding: str) -> _Unpacking:
    match encoding:
        case "br":
            return _Brotli()
        case "zstd":
            return zstd.ZstdDecompressor()
    return zlib.decompressobj(31 if encoding == "gzip" else 15)  # the container's window bits


ENCODINGS = ("gzip", "deflate", "br", "zstd")


def decompress(body: bytes, encoding: str, most: int) -> bytes:
    """The plain bytes; about `most` of them when there are more.

    Raises DamagedBody.
    """
    unpacking = _new(encoding)
    try:
        plain = unpacking.decompress(body, most)
    except (zlib.error, zstd.ZstdError, brotli.error) as error:
        raise DamagedBody(str(error)) from error
    if len(plain) < most and not unpacking.eof:
        raise DamagedBody("it ends too early")
    return plain

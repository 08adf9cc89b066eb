"""The file of one block, or of what is kept beside it: a header that says what it is, its bytes,
and a checksum over both.

A file is written under a passing name and renamed when whole, so that a reader meets either a whole
file or none. It is not synced to the disk: after a loss of power it may be cut off or empty, which
its length and its checksum tell.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"mlxcb-kv"
FORMAT = 1
SUFFIX = ".kv"
PASSING_SUFFIX = ".part"

_HEADER = struct.Struct("<8sIQ32s16s")  # magic, format, bytes, identity, content hash
_CHECKSUM_SIZE = 16
_counter = itertools.count()


class UnusableFile(Exception):
    """The file is not what its name says; the message says why."""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """What all files of one model and format have in common.

    Attributes:
        identity: 32 bytes that differ for any other model, block size or type of numbers.
        num_bytes: of one block's content.
        most_beside: bytes of anything else that is kept; 0 when there are blocks only.
    """

    identity: bytes
    num_bytes: int
    most_beside: int = 0

    @property
    def file_size(self) -> int:
        """Bytes of a whole block's file."""
        return file_size(self.num_bytes)

    def fits(self, size: int) -> bool:
        """True for the size of a file that may be one of these."""
        return size == self.file_size or file_size(0) < size <= file_size(self.most_beside)


def file_size(num_bytes: int) -> int:
    """Bytes of a whole file with so much content."""
    return _HEADER.size + num_bytes + _CHECKSUM_SIZE


def write_file(path: Path, kind: BlockKind, content_hash: bytes, content: bytes) -> None:
    """Put a block's file in its place, readable by its owner only.

    Raises OSError; nothing is left behind then.
    """
    header = _HEADER.pack(MAGIC, FORMAT, len(content), kind.identity, content_hash)
    passing = path.with_name(f".{path.stem}.{os.getpid()}.{next(_counter)}{PASSING_SUFFIX}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(passing, flags, 0o600), "wb", buffering=0) as file:
            for part in (header, content, _checksum(header, content)):
                _write_all(file.fileno(), part)
        passing.replace(path)
    except BaseException:
        passing.unlink(missing_ok=True)
        raise


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_file(path: Path, kind: BlockKind, content_hash: bytes) -> bytes:
    """The content of a block's file, after every check.

    Raises FileNotFoundError when it is not there, UnusableFile when it must not be used.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnusableFile(error.strerror or str(error)) from error
    try:
        data = _read_whole(descriptor, kind)
        # Whoever cleans the folder goes by age; on a disk that became read-only nobody can.
        with contextlib.suppress(OSError):
            os.utime(descriptor)
    except OSError as error:
        raise UnusableFile(error.strerror or str(error)) from error
    finally:
        os.close(descriptor)
    return _checked(data, kind, content_hash)


def _read_whole(descriptor: int, kind: BlockKind) -> bytes:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise UnusableFile("it is not a plain file")
    if not kind.fits(found.st_size):
        raise UnusableFile(f"it has {found.st_size} bytes instead of {kind.file_size}")
    with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
        data = file.readall()
    if len(data) != found.st_size:
        raise UnusableFile(f"{len(data)} of its bytes can be read, not {found.st_size}")
    return data


def _checked(data: bytes, kind: BlockKind, content_hash: bytes) -> bytes:
    header, content = data[: _HEADER.size], data[_HEADER.size : -_CHECKSUM_SIZE]
    magic, form, num_bytes, identity, named = _HEADER.unpack(header)
    if magic != MAGIC or form != FORMAT:
        raise UnusableFile("it has another format")
    if identity != kind.identity:
        raise UnusableFile("it belongs to another model")
    if num_bytes != len(content):
        raise UnusableFile(f"it has {len(content)} bytes of content instead of {num_bytes}")
    if named != content_hash:
        raise UnusableFile("it holds another block")
    if data[-_CHECKSUM_SIZE:] != _checksum(header, content):
        raise UnusableFile("its checksum is wrong")
    return content


def _checksum(header: bytes, content: bytes) -> bytes:
    digest = hashlib.blake2b(header, digest_size=_CHECKSUM_SIZE)
    digest.update(content)
    return digest.digest()

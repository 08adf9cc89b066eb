"""JSON files that only their owner may read, shared by a server and the commands beside it.

Owns reading, writing whole or not at all, one writer at a time, and noticing a change. Knows
nothing about what is in them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from mlx_cb.errors import MlxCbError


class Versioned(Protocol):
    """What stands in such a file; `version` is the form's."""

    version: int


Content = TypeVar("Content", bound=Versioned)


class PrivateFile(Generic[Content]):
    """One file. `what` is its name in error messages, `error` what they are raised as."""

    def __init__(
        self, path: Path, kind: type[Content], what: str, error: type[MlxCbError] = MlxCbError
    ) -> None:
        self.path = path
        self._kind, self._what, self._error = kind, what, error
        self._newest = kind().version

    def read(self) -> Content:
        """The content; an empty one when there is no file.

        Raises `error` for a file that others may read, or that holds something else.
        """
        path = self.path
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                content = file.read()
        except FileNotFoundError:
            return self._kind()
        except OSError as error:
            raise self._error(f"cannot read the {self._what} {path}: {error.strerror}") from error
        if mode & 0o077:
            raise self._error(f"others may read or change {path}; run: chmod 600 {path}")
        try:
            found = msgspec.json.decode(content, type=self._kind)
        except msgspec.MsgspecError as error:
            raise self._error(f"{path} is not a {self._what}: {error}") from error
        if found.version != self._newest:
            raise self._error(f"{path} was written by a newer mlx-cb (version {found.version})")
        return found

    @contextlib.contextmanager
    def changing(self) -> Iterator[Content]:
        """The content, written back at the end; two writers at once wait for each other."""
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A file of its own is locked: this one is replaced, and a lock would go with the old one.
        lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = self.read()
            yield content
            write_private(path, msgspec.json.format(msgspec.json.encode(content)))
        finally:
            os.close(lock)

    def stamp(self) -> tuple[int, ...]:
        """Another value after every change; () while there is no file."""
        try:
            status = self.path.stat()
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_ino, status.st_size, status.st_mode)


def write_private(path: Path, content: bytes) -> None:
    """Replace a file by one that only its owner may read: whole, or not at all."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise

"""The keys file: who has a key, kept as digests only, written whole or not at all.

Owns the file's form, its permissions, and what a presented key stands for. The keys themselves are
random enough (256 bits) that a plain SHA-256 cannot be searched. Knows nothing about HTTP.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from mlx_cb.errors import InvalidRequest, MlxCbError
from mlx_cb.server.users import User, check_name
from mlx_cb.standing import Standing

PREFIX = "mcb_"
_log = logging.getLogger("mlx_cb.server")


class KeysError(MlxCbError):
    """The keys file cannot be used, or has no such name."""


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the file. Times in seconds since the epoch."""

    name: str
    sha256: str
    created: float
    expires: float | None = None
    admin: bool = False
    inference: bool = True
    max_running: int | None = None
    daily_tokens: int | None = None
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    rank: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    cache_group: str = ""

    def user(self) -> User:
        """Whom the key stands for."""
        return User(
            self.name,
            may_infer=self.inference,
            is_admin=self.admin,
            max_running=self.max_running,
            daily_tokens=self.daily_tokens,
            standing=Standing(self.weight, self.rank, self.cache_group),
        )

    def is_expired(self, now: float) -> bool:
        """True from the moment of expiry on."""
        return self.expires is not None and now >= self.expires


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 1
    keys: list[KeyRecord] = []


def digest(key: bytes) -> str:
    """What is stored of a key."""
    return hashlib.sha256(key).hexdigest()


def read(path: Path) -> list[KeyRecord]:
    """All records; none when there is no file.

    Raises KeysError for a file that others may read or that is not a keys file.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise KeysError(f"cannot read the keys in {path}: {error.strerror}") from error
    if mode & 0o077:
        raise KeysError(f"others may read or change {path}; run: chmod 600 {path}")
    try:
        found = msgspec.json.decode(content, type=_Content)
    except msgspec.MsgspecError as error:
        raise KeysError(f"{path} is not a keys file: {error}") from error
    if found.version != 1:
        raise KeysError(f"{path} was written by a newer mlx-cb (version {found.version})")
    return found.keys


def add(path: Path, record: Callable[[str], KeyRecord]) -> str:
    """Add what `record` makes of a new key's digest; returns the key, which is kept nowhere.

    Raises InvalidRequest for a bad name, KeysError for one that is taken.
    """
    key = PREFIX + secrets.token_urlsafe(32)
    made = record(digest(key.encode()))
    check_name(made.name)
    with _changing(path) as records:
        if any(other.name == made.name for other in records):
            raise KeysError(f"{made.name} already has a key; use: mlx-cb keys rotate {made.name}")
        records.append(made)
    return key


def revoke(path: Path, name: str) -> None:
    """Take a key away. Raises KeysError for a name without one."""
    with _changing(path) as records:
        records.remove(_find(records, name))


def rotate(path: Path, name: str) -> str:
    """Replace a key, all else unchanged; returns the new one. Raises KeysError."""
    key = PREFIX + secrets.token_urlsafe(32)
    with _changing(path) as records:
        old = _find(records, name)
        changes = {"sha256": digest(key.encode()), "created": time.time()}
        records[records.index(old)] = msgspec.structs.replace(old, **changes)
    return key


def _find(records: list[KeyRecord], name: str) -> KeyRecord:
    for record in records:
        if record.name == name:
            return record
    raise KeysError(f"{name} has no key")


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[list[KeyRecord]]:
    """The records, written back at the end; two commands at once wait for each other."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # A file of its own is locked: the keys file is replaced, and a lock would go with the old one.
    lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = read(path)
        yield records
        write_private(path, msgspec.json.format(msgspec.json.encode(_Content(keys=records))))
    finally:
        os.close(lock)


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


class Keys:
    """The keys of a running server; notices when the file was changed."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises KeysError for a file that cannot be used."""
        self._path = path
        self._clock = clock
        self._stamp = self._look()
        self._records = read(path)
        self._ever_had = bool(self._records)

    @property
    def ever_had_any(self) -> bool:
        """True once there was a key: taking the last one away must not open the server."""
        self._refresh()
        return self._ever_had

    def find(self, key: bytes) -> User | None:
        """Whom the key stands for; None for an unknown or expired one. Takes constant time."""
        self._refresh()
        presented = digest(key).encode()
        found: KeyRecord | None = None
        for record in self._records:
            if hmac.compare_digest(presented, record.sha256.encode()):
                found = record
        if found is None or found.is_expired(self._clock()):
            return None
        return found.user()

    def _look(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_ino, status.st_size, status.st_mode)

    def _refresh(self) -> None:
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._records = read(self._path)
        except KeysError as error:
            # Half an edit by hand must not lock a team out; what held before still holds.
            _log.error("the keys stay as they were: %s", error.message)
            return
        self._ever_had = self._ever_had or bool(self._records)
        _log.info("read %d keys from %s", len(self._records), self._path)


def parse_expiry(text: str, now: float) -> float:
    """`90d`, `12h` or a date like 2027-01-31, as seconds since the epoch. Raises InvalidRequest."""
    units = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
    if text[:-1].isdecimal() and text[-1:] in units:
        return now + int(text[:-1]) * units[text[-1]]
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%d"))
    except ValueError as error:
        wanted = "a time like 90d or 12h, or a date like 2027-01-31"
        raise InvalidRequest(f"{text!r} is not {wanted}", param="expires") from error

"""The keys file: who has a key, kept as digests only.

Owns the file's form, and what a presented key stands for. The keys themselves are random enough
(256 bits) that a plain SHA-256 cannot be searched. Knows nothing about HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from mlx_cb.errors import InvalidRequest, MlxCbError
from mlx_cb.server.private_file import PrivateFile
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
    max_queued: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
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
            max_queued=self.max_queued,
            max_input_tokens=self.max_input_tokens,
            max_output_tokens=self.max_output_tokens,
            standing=Standing(self.weight, self.rank, self.cache_group),
        )

    def is_expired(self, now: float) -> bool:
        """True from the moment of expiry on."""
        return self.expires is not None and now >= self.expires


class _Content(msgspec.Struct, kw_only=True):
    version: int = 1
    keys: list[KeyRecord] = []


def digest(key: bytes) -> str:
    """What is stored of a key."""
    return hashlib.sha256(key).hexdigest()


def _file(path: Path) -> PrivateFile[_Content]:
    return PrivateFile(path, _Content, "keys file", KeysError)


def read(path: Path) -> list[KeyRecord]:
    """All records; none when there is no file.

    Raises KeysError for a file that others may read or that is not a keys file.
    """
    return _file(path).read().keys


def add(path: Path, record: Callable[[str], KeyRecord]) -> str:
    """Add what `record` makes of a new key's digest; returns the key, which is kept nowhere.

    Raises InvalidRequest for a bad name, KeysError for one that is taken.
    """
    key = PREFIX + secrets.token_urlsafe(32)
    made = record(digest(key.encode()))
    check_name(made.name)
    with _file(path).changing() as content:
        if any(other.name == made.name for other in content.keys):
            raise KeysError(f"{made.name} already has a key; use: mlx-cb keys rotate {made.name}")
        content.keys.append(made)
    return key


def add_hidden(path: Path, name: str) -> None:
    """An account whose key nobody is shown; `rotate` makes one that is. Raises as `add` does."""
    add(path, lambda sha256: KeyRecord(name=name, sha256=sha256, created=time.time()))


def revoke(path: Path, name: str) -> None:
    """Take a key away. Raises KeysError for a name without one."""
    with _file(path).changing() as content:
        content.keys.remove(_find(content.keys, name))


def rotate(path: Path, name: str) -> str:
    """Replace a key, all else unchanged; returns the new one. Raises KeysError."""
    key = PREFIX + secrets.token_urlsafe(32)
    with _file(path).changing() as content:
        old = _find(content.keys, name)
        changes = {"sha256": digest(key.encode()), "created": time.time()}
        content.keys[content.keys.index(old)] = msgspec.structs.replace(old, **changes)
    return key


def _find(records: list[KeyRecord], name: str) -> KeyRecord:
    for record in records:
        if record.name == name:
            return record
    raise KeysError(f"{name} has no key")


class Keys:
    """The keys of a running server; notices when the file was changed."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises KeysError for a file that cannot be used."""
        self.path = path
        self._file = _file(path)
        self._clock = clock
        self._stamp = self._file.stamp()
        self._records = self._file.read().keys
        self._ever_had = bool(self._records)

    @property
    def ever_had_any(self) -> bool:
        """True once there was a key: taking the last one away must not open the server."""
        self._refresh()
        return self._ever_had

    def find(self, key: bytes) -> User | None:
        """Whom the key stands for; None for an unknown or expired one."""
        record = self.record_of_key(key)
        return None if record is None else record.user()

    def record_of_key(self, key: bytes) -> KeyRecord | None:
        """What is known of a key; None for an unknown or expired one. Takes constant time."""
        self._refresh()
        presented = digest(key).encode()
        found: KeyRecord | None = None
        for record in self._records:
            if hmac.compare_digest(presented, record.sha256.encode()):
                found = record
        return self._if_it_holds(found)

    def record_of(self, name: str) -> KeyRecord | None:
        """The key that this person has now; None without one, or with an expired one."""
        self._refresh()
        found = next((record for record in self._records if record.name == name), None)
        return self._if_it_holds(found)

    def all(self) -> list[KeyRecord]:
        """Every record, expired ones too."""
        self._refresh()
        return list(self._records)

    def _if_it_holds(self, record: KeyRecord | None) -> KeyRecord | None:
        return None if record is None or record.is_expired(self._clock()) else record

    def _refresh(self) -> None:
        stamp = self._file.stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._records = self._file.read().keys
        except KeysError as error:
            # Half an edit by hand must not lock a team out; what held before still holds.
            _log.error("the keys stay as they were: %s", error.message)
            return
        self._ever_had = self._ever_had or bool(self._records)
        _log.info("read %d keys from %s", len(self._records), self.path)


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

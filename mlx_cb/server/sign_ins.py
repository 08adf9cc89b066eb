"""Browsers that are signed in: what their cookie stands for.

Owns the file of sign-ins and of links that let people in (`links` works on the latter). A cookie
is stored as a digest only, and holds as long as the key that its holder had when he signed in:
taking the key away ends it, and so does making a new one. Knows nothing about HTTP.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from mlx_cb.errors import MlxCbError
from mlx_cb.server.keys import KeyRecord, Keys, digest
from mlx_cb.server.private_file import PrivateFile
from mlx_cb.server.users import User

HOLDS_S = 90 * 86400.0
MOST_PER_USER = 20
_log = logging.getLogger("mlx_cb.server")


class SignIn(msgspec.Struct, frozen=True, kw_only=True):
    """A browser. `key_sha256` is the key that its user had when he signed in; times in s."""

    sha256: str
    user: str
    key_sha256: str
    made: float
    ends: float


class Link(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A link that lets one person in; without a name, an admin has to confirm who he is."""

    sha256: str
    ends: float
    name: str | None = None


class Asking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Somebody who opened a link without a name. `sha256` is of the secret his browser holds.

    `code` is shown to him and to the admin, who can so tell him from another.
    """

    sha256: str
    name: str
    code: str
    address: str
    ends: float
    is_confirmed: bool = False


class Content(msgspec.Struct, kw_only=True):
    """The file. `url` is where the server was last reached."""

    version: int = 1
    url: str | None = None
    sign_ins: list[SignIn] = []
    links: list[Link] = []
    asking: list[Asking] = []

    def forget_what_ended(self, now: float) -> None:
        """Drop all that holds no more."""
        self.sign_ins = [one for one in self.sign_ins if one.ends > now]
        self.links = [one for one in self.links if one.ends > now]
        self.asking = [one for one in self.asking if one.ends > now]


def file_beside(keys_file: Path) -> PrivateFile[Content]:
    """The file that belongs to a keys file."""
    return PrivateFile(keys_file.with_suffix(".sign-ins.json"), Content, "file of sign-ins")


class SignIns:
    """The sign-ins of a running server; notices when a command has changed the file."""

    def __init__(self, keys: Keys, clock: Callable[[], float] = time.time) -> None:
        """Raises MlxCbError for a file that cannot be used."""
        self.file = file_beside(keys.path)
        self.clock = clock
        self._keys = keys
        self._stamp = self.file.stamp()
        self._content = self.file.read()
        self._by_digest = {one.sha256: one for one in self._content.sign_ins}

    def user_of(self, token: str) -> User | None:
        """Who is signed in with this cookie; None when it holds no more."""
        sign_in = self._of(token)
        record = None if sign_in is None else self._keys.record_of(sign_in.user)
        if sign_in is None or record is None or record.sha256 != sign_in.key_sha256:
            return None
        return record.user()

    def sign_in(self, record: KeyRecord) -> str:
        """Let a browser in; returns its cookie's token. Writes to disk."""
        with self.file.changing() as content:
            content.forget_what_ended(self.clock())
            return add_sign_in(content, record, self.clock())

    def sign_out(self, token: str) -> None:
        """End one browser's sign-in. Writes to disk."""
        gone = digest(token.encode())
        with self.file.changing() as content:
            content.sign_ins = [one for one in content.sign_ins if one.sha256 != gone]

    def sign_out_everywhere(self, user: str) -> None:
        """End all of a person's sign-ins. Writes to disk."""
        with self.file.changing() as content:
            content.sign_ins = [one for one in content.sign_ins if one.user != user]

    @property
    def url(self) -> str | None:
        """Where the server said it is reached."""
        self._refresh()
        return self._content.url

    def count_by_user(self) -> dict[str, int]:
        """How many browsers of each person are signed in."""
        self._refresh()
        now = self.clock()
        return dict(Counter(one.user for one in self._content.sign_ins if one.ends > now))

    def announce(self, url: str) -> None:
        """Write down where the server is reached, for links that commands make."""
        if self._content.url != url:
            with self.file.changing() as content:
                content.url = url

    def _of(self, token: str) -> SignIn | None:
        self._refresh()
        # Looked up by digest: how long that takes says nothing about a token.
        found = self._by_digest.get(digest(token.encode()))
        return None if found is None or found.ends <= self.clock() else found

    def _refresh(self) -> None:
        stamp = self.file.stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._content = self.file.read()
        except MlxCbError as error:
            _log.error("the sign-ins stay as they were: %s", error.message)
            return
        self._by_digest = {one.sha256: one for one in self._content.sign_ins}


def add_sign_in(content: Content, record: KeyRecord, now: float) -> str:
    """Add a browser of this person, his oldest one going when he has too many; its token."""
    token = secrets.token_urlsafe(32)
    own = [one for one in content.sign_ins if one.user == record.name]
    gone = {one.sha256 for one in own[: max(0, len(own) + 1 - MOST_PER_USER)]}
    content.sign_ins = [one for one in content.sign_ins if one.sha256 not in gone]
    content.sign_ins.append(
        SignIn(
            sha256=digest(token.encode()),
            user=record.name,
            key_sha256=record.sha256,
            made=now,
            ends=now + HOLDS_S,
        )
    )
    return token

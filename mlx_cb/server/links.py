"""Links that let people in: for somebody named, or for whoever opens it, once an admin confirms.

A link's secret stands behind the `#`, which browsers send to nobody: it is in no log, and no
program that previews links uses it up. It lets in once. Works on the file of `sign_ins`, for the
server and for commands alike; knows nothing about HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mlx_cb.errors import Forbidden, MlxCbError
from mlx_cb.server import keys
from mlx_cb.server.keys import KeysError, digest
from mlx_cb.server.sign_ins import Asking, Content, Link, add_sign_in, file_beside
from mlx_cb.server.users import check_name

VALID_S = 7 * 86400.0
_ASKING_VALID_S = 3600.0
_MOST_ASKING = 50
_MOST_LINKS = 500


class LinkError(Forbidden):
    """A link, or a wish to be let in, that does not hold (any more)."""

    code = "link_not_valid"


class NameTaken(MlxCbError):
    """Who asks to be let in calls himself like somebody who is known."""

    status = 409
    code = "name_taken"


class NobodyWaits(MlxCbError):
    """Nobody who waits to be let in has this number."""

    status = 404
    code = "not_found"


@dataclass(frozen=True, slots=True)
class Entered:
    """A browser that may come in, with the token of its cookie."""

    user: str
    token: str


@dataclass(frozen=True, slots=True)
class Waits:
    """A browser whose holder an admin has to confirm; it asks again with `secret`."""

    secret: str
    code: str


@dataclass(frozen=True, slots=True)
class NeedsName:
    """A link for anybody, which is not used up before he has said who he is."""


class Links:
    """The links of one keys file. Every method writes to disk."""

    def __init__(self, keys_file: Path, clock: Callable[[], float] = time.time) -> None:
        self._keys_file = keys_file
        self._file = file_beside(keys_file)
        self._clock = clock

    def make(self, name: str | None = None, valid_s: float = VALID_S) -> str:
        """A new link's secret: for `name`, who must have an account, or for whoever opens it."""
        token = secrets.token_urlsafe(24)
        now = self._clock()
        link = Link(sha256=digest(token.encode()), ends=now + valid_s, name=name)
        with self._file.changing() as content:
            content.forget_what_ended(now)
            content.links = [*content.links, link][-_MOST_LINKS:]
        return token

    def open(self, token: str, name: str | None, address: str) -> Entered | Waits | NeedsName:
        """Use a link. `name` is who its opener says he is.

        Raises LinkError, and InvalidRequest for a name that nobody can have.
        """
        wanted = digest(token.encode())
        with self._file.changing() as content:
            content.forget_what_ended(self._clock())
            link = next((one for one in content.links if one.sha256 == wanted), None)
            if link is None:
                raise LinkError("this link was used already, or is too old; ask for another")
            if link.name is None and name is None:
                return NeedsName()
            if link.name is None:
                assert name is not None
                check_name(name)
                waits = self._ask(content, name, address)
                content.links.remove(link)
                return waits
            content.links.remove(link)
            return self._enter(content, link.name)

    def ask_again(self, secret: str) -> Entered | None:
        """What became of a wish to be let in; None while nobody has decided. Raises LinkError."""
        wanted = digest(secret.encode())
        waiting = next((one for one in self._file.read().asking if one.sha256 == wanted), None)
        if waiting is None or waiting.ends <= self._clock():
            raise LinkError("you were not let in; ask who runs the server")
        if not waiting.is_confirmed:
            return None
        with self._file.changing() as content:
            if waiting not in content.asking:
                raise LinkError("this wish was granted already, to this browser once")
            content.asking.remove(waiting)
            return self._enter(content, waiting.name)

    def asking(self) -> list[Asking]:
        """Who waits for an admin, oldest first."""
        now = self._clock()
        found = self._file.read().asking
        return [one for one in found if one.ends > now and not one.is_confirmed]

    def confirm(self, code: str) -> str:
        """Let in who has this code: makes his account; returns his name.

        Raises NobodyWaits, and NameTaken when the name is taken: nobody becomes somebody else by
        saying so.
        """
        waiting = self._find(code)
        try:
            keys.add_hidden(self._keys_file, waiting.name)
        except KeysError as error:
            raise NameTaken(
                f"{waiting.name} has an account already; if this is the same person, refuse "
                f"and use: mlx-cb keys invite {waiting.name}"
            ) from error
        with self._file.changing() as content:
            if waiting in content.asking:
                confirmed = msgspec.structs.replace(waiting, is_confirmed=True)
                content.asking[content.asking.index(waiting)] = confirmed
        return waiting.name

    def refuse(self, code: str) -> str:
        """Do not let in who has this code; returns the name he gave. Raises NobodyWaits."""
        waiting = self._find(code)
        with self._file.changing() as content:
            content.asking = [one for one in content.asking if one.sha256 != waiting.sha256]
        return waiting.name

    def _find(self, code: str) -> Asking:
        for one in self.asking():
            if one.code == code:
                return one
        raise NobodyWaits(f"nobody who waits has the number {code}")

    def _ask(self, content: Content, name: str, address: str) -> Waits:
        if len(content.asking) >= _MOST_ASKING:
            raise LinkError("too many people wait to be let in; try again later")
        taken = {one.code for one in content.asking}
        code = next(c for c in iter(_draw_code, None) if c not in taken)
        secret = secrets.token_urlsafe(24)
        content.asking.append(
            Asking(
                sha256=digest(secret.encode()),
                name=name,
                code=code,
                address=address,
                ends=self._clock() + _ASKING_VALID_S,
            )
        )
        return Waits(secret, code)

    def _enter(self, content: Content, name: str) -> Entered:
        record = next((one for one in keys.read(self._keys_file) if one.name == name), None)
        if record is None or record.is_expired(self._clock()):
            raise LinkError(f"{name} has no account any more; ask who runs the server")
        return Entered(name, add_sign_in(content, record, self._clock()))


def _draw_code() -> str:
    return f"{secrets.randbelow(10_000):04d}"


def address_of(url: str, token: str) -> str:
    """What to open in a browser."""
    return f"{url}/sign-in#{token}"

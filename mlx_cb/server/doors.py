"""Who may come in: keys, signed-in browsers, and the guesses that are held against an address.

One per server with keys, shared by the check of every request and by the sign-in page.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from mlx_cb.errors import Overloaded
from mlx_cb.server.keys import KeyRecord, Keys, digest
from mlx_cb.server.links import Links
from mlx_cb.server.rate import Attempts
from mlx_cb.server.sign_ins import SignIns

_log = logging.getLogger("mlx_cb.server")


@dataclass(frozen=True, slots=True)
class Doors:
    """A server's keys, its sign-ins, its links."""

    keys: Keys
    sign_ins: SignIns
    links: Links
    attempts: Attempts = field(default_factory=Attempts)

    @classmethod
    def at(cls, keys_file: Path) -> Doors:
        """Raises MlxCbError for files that cannot be used."""
        known = Keys(keys_file)
        return cls(known, SignIns(known), Links(keys_file))

    def record_of_key(self, address: str, key: bytes) -> KeyRecord | None:
        """Whom a key stands for. Raises Overloaded while this address guesses too much."""
        hashed = digest(key)
        self.check_guesses(address, hashed)
        record = self.keys.record_of_key(key)
        if record is None:
            self.wrong(address, hashed, "key")
        else:
            self.attempts.passed(address, hashed)
        return record

    def check_guesses(self, address: str, hashed: str) -> None:
        """Raise Overloaded while this address guesses too much."""
        if wait := self.attempts.wait(address, hashed):
            raise Overloaded("too many wrong keys came from this address", retry_after=wait)

    def wrong(self, address: str, hashed: str, what: str) -> None:
        """A wrong key, link or cookie came from there."""
        self.attempts.failed(address, hashed)
        _log.warning("a wrong %s came from %s", what, address)

"""Keys for the users of a workload, so that a server of ours tells them apart as it does a team.

Owns the file that the server reads. The keys are good for nothing else: they end with the run.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

_OPERATOR = "bench"


@dataclass(frozen=True, slots=True)
class Keyring:
    """A keys file, an admin's key for what is asked beside the load, and a key for each user."""

    path: Path
    admin: str
    users: dict[str, str]


def make_keyring(folder: Path, users: Iterable[str]) -> Keyring:
    """Write a file with a key for each of these, and one for the operator."""
    names = sorted({*users})
    keys = {name: f"mcb_{os.urandom(16).hex()}" for name in (*names, _OPERATOR)}
    records = [
        {
            "name": name,
            "sha256": hashlib.sha256(key.encode()).hexdigest(),
            "created": time.time(),
            "admin": name == _OPERATOR,
        }
        for name, key in keys.items()
    ]
    path = folder / f"keys-{'-'.join(names)[:40]}.json"
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode({"version": 1, "keys": records}))
    return Keyring(path, keys.pop(_OPERATOR), keys)

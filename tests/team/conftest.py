"""A server with keys, and one with the network let in: who holds what is written here."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_cb.server import keys
from mlx_cb.server.keys import KeyRecord
from tests.server.conftest import LiveServer, serve, stopping

__all__ = ["serve", "stopping"]

Serve = Callable[..., LiveServer]


class Team:
    """A keys file and the keys in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: dict[str, str] = {}
        self.add("alice")
        self.add("bob")
        self.add("boss", admin=True)
        self.add("monitor", admin=True, inference=False)

    def add(self, name: str, **fields: Any) -> str:
        made = keys.add(
            self.path,
            lambda sha256: KeyRecord(name=name, sha256=sha256, created=time.time(), **fields),
        )
        self.keys[name] = made
        return made

    def as_(self, name: str) -> dict[str, str]:
        """Headers of a person; "nobody" has none, "stranger" a wrong key."""
        if name == "nobody":
            return {}
        key = "mcb_wrong" if name == "stranger" else self.keys[name]
        return {"authorization": f"Bearer {key}"}


@pytest.fixture
def team(tmp_path: Path) -> Team:
    return Team(tmp_path / "keys.json")

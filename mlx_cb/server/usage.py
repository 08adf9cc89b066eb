"""What each user took, by day.

Days are the machine's own (local time). Nothing is lost when the process is killed, except what
was not yet written. Knows nothing about keys, limits or HTTP.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from mlx_cb.server.database import Database

_log = logging.getLogger("mlx_cb.server")

_TABLE = """
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, user TEXT NOT NULL,
    requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, seconds REAL NOT NULL,
    machine_seconds REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (day, user)
) WITHOUT ROWID
"""
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (day, user) DO UPDATE SET
    requests = requests + excluded.requests,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens,
    seconds = seconds + excluded.seconds,
    machine_seconds = machine_seconds + excluded.machine_seconds
"""


@dataclass(frozen=True, slots=True)
class Taken:
    """Requests, tokens and seconds of one user on one day.

    `prompt_tokens` includes `cached_tokens`; `seconds` is how long answers were being made, each
    for itself; `machine_seconds` is the part of the engine's steps that was done for them.
    """

    day: str
    user: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    machine_seconds: float = 0.0


def local_now() -> datetime:
    """The time here, with its zone."""
    return datetime.now().astimezone()


def next_day(now: datetime) -> datetime:
    """The coming midnight here; days of 23 and 25 hours have theirs too."""
    tomorrow = now.date() + timedelta(days=1)
    return datetime.combine(tomorrow, datetime.min.time()).astimezone()


class Usage:
    """The record; `path` None keeps it in memory."""

    def __init__(self, path: Path | None, clock: Callable[[], datetime] = local_now) -> None:
        """Raises MlxCbError when the file cannot be used."""
        self.clock = clock
        self._database = Database(path, "usage", _prepare)

    def record(self, taken: Taken) -> Future[int]:
        """Add to a day; returns before it is written, which the future waits for."""
        written = self._database.submit(
            lambda database: database.execute(_ADD, astuple(taken)).rowcount
        )
        written.add_done_callback(_log_failure)
        return written

    async def tokens_today(self, user: str) -> int:
        """Prompt and answer tokens recorded for this user today."""
        day = self.clock().date().isoformat()
        rows = await self._ask(
            "SELECT prompt_tokens + completion_tokens FROM usage WHERE day = ? AND user = ?",
            (day, user),
        )
        return int(rows[0][0]) if rows else 0

    async def since(self, day: str, user: str | None) -> list[Taken]:
        """All days from `day` on, oldest first; of one user, or of all for None."""
        rows = await self._ask(
            "SELECT * FROM usage WHERE day >= ? AND (? IS NULL OR user = ?) ORDER BY day, user",
            (day, user, user),
        )
        return [Taken(*row) for row in rows]

    def close(self) -> None:
        """Write what is left and close the file."""
        self._database.close()

    async def _ask(self, query: str, values: tuple[str | None, ...]) -> list[Any]:
        return await self._database.run(lambda database: database.execute(query, values).fetchall())


def _prepare(database: sqlite3.Connection) -> None:
    """Files of before machine seconds were counted get the column, with 0 for what is past."""
    database.execute(_TABLE)
    columns = {row[1] for row in database.execute("PRAGMA table_info(usage)")}
    if "machine_seconds" not in columns:
        database.execute("ALTER TABLE usage ADD COLUMN machine_seconds REAL NOT NULL DEFAULT 0")


def _log_failure(future: Future[int]) -> None:
    if (error := future.exception()) is not None:
        _log.error("usage was not recorded: %s", error)

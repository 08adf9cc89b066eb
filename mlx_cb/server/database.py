"""A SQLite file in WAL mode that one thread reads and writes, readable by its owner alone.

What was committed survives the end of the process, however it ends. Knows nothing of its tables.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from mlx_cb.errors import MlxCbError

T = TypeVar("T")


class Database:
    """One file and its thread; `path` None keeps everything in memory."""

    def __init__(
        self, path: Path | None, what: str, prepare: Callable[[sqlite3.Connection], None]
    ) -> None:
        """Open the file and `prepare` its tables.

        Raises MlxCbError, saying `what` was to be kept, when it cannot.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=what)
        try:
            self._connection = self._thread.submit(_open, path, prepare).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise MlxCbError(f"cannot keep {what} in {path}: {error}") from error

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do it on the thread, in one transaction; what it raises undoes it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._do, work)

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """The same without waiting."""
        return self._thread.submit(self._do, work)

    def close(self) -> None:
        """Write what is left and close the file."""
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._connection:
            return work(self._connection)


def _open(path: Path | None, prepare: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
    if path is None:
        connection = sqlite3.connect(":memory:", check_same_thread=False)
    else:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite would let others read it
        connection = sqlite3.connect(path, check_same_thread=False, timeout=10)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA secure_delete = ON")
    prepare(connection)
    connection.commit()
    return connection

"""Everybody's conversations in one SQLite file, each seen only under its owner's name.

Every method takes the owner and every statement asks for it, so that an id alone opens nothing.
What is deleted is overwritten, in the file and in its log. Knows nothing about HTTP or answers.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import msgspec

from mlx_cb.server.conversations.shapes import (
    Conversation,
    Figures,
    Message,
    NotHere,
    Settings,
    Summary,
    folded,
)
from mlx_cb.server.database import Database

MOST_LISTED = 2000
_AROUND = 40  # characters shown on each side of what was found
_TABLES = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, user TEXT NOT NULL, title TEXT NOT NULL, created REAL NOT NULL,
    updated REAL NOT NULL, settings TEXT NOT NULL, leaf TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS of_user ON conversations (user, updated);
CREATE TABLE IF NOT EXISTS messages (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
    conversation TEXT NOT NULL REFERENCES conversations ON DELETE CASCADE,
    parent TEXT, role TEXT NOT NULL, content TEXT NOT NULL, reasoning TEXT NOT NULL,
    created REAL NOT NULL, state TEXT NOT NULL, model TEXT, request_id TEXT, error TEXT,
    figures TEXT
);
CREATE INDEX IF NOT EXISTS of_conversation ON messages (conversation, number);
UPDATE messages SET state = 'interrupted' WHERE state = 'running';
"""
_COLUMNS = "id, parent, role, content, reasoning, created, state, model, request_id, error, figures"
_INSERT = f"""
INSERT INTO messages (conversation, {_COLUMNS})
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_SEARCH = """
SELECT id, title, created, updated, (
    SELECT content FROM messages
    WHERE conversation = conversations.id AND instr(folded(content), :wanted)
    ORDER BY number LIMIT 1
) AS content
FROM conversations
WHERE user = :user AND (content IS NOT NULL OR instr(folded(title), :wanted))
ORDER BY updated DESC LIMIT :most
"""


class Conversations:
    """The store; `path` None keeps it in memory."""

    def __init__(self, path: Path | None) -> None:
        """Raises MlxCbError when the file cannot be used."""
        self._is_in_memory = path is None
        self._database = Database(path, "conversations", _prepare)

    async def listed(self, user: str, wanted: str = "") -> list[Summary]:
        """The user's conversations, newest first; with `wanted`, those that hold this text."""

        def read(database: sqlite3.Connection) -> list[Summary]:
            if not wanted.strip():
                rows = database.execute(
                    "SELECT id, title, created, updated FROM conversations WHERE user = ? "
                    "ORDER BY updated DESC LIMIT ?",
                    (user, MOST_LISTED),
                )
                return [Summary(*row) for row in rows]
            text = folded(wanted.strip())
            rows = database.execute(_SEARCH, {"user": user, "wanted": text, "most": MOST_LISTED})
            return [
                Summary(found, title, created, updated, content and _around(content, text))
                for found, title, created, updated, content in rows
            ]

        return await self._database.run(read)

    async def load(self, user: str, conversation_id: str) -> Conversation:
        """A whole conversation. Raises NotHere."""
        return await self._database.run(lambda database: _load(database, user, conversation_id))

    async def load_all(self, user: str) -> list[Conversation]:
        """All of a user's conversations, oldest first."""

        def read(database: sqlite3.Connection) -> list[Conversation]:
            rows = database.execute(
                "SELECT id FROM conversations WHERE user = ? ORDER BY created", (user,)
            ).fetchall()
            return [_load(database, user, row[0]) for row in rows]

        return await self._database.run(read)

    async def add(self, user: str, conversations: list[Conversation]) -> None:
        """Keep new ones, all or none."""

        def write(database: sqlite3.Connection) -> None:
            for made in conversations:
                database.execute(
                    "INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        made.id,
                        user,
                        made.title,
                        made.created,
                        made.updated,
                        _encoded(made.settings),
                        made.leaf,
                    ),
                )
                database.executemany(_INSERT, [_row(made.id, m) for m in made.messages])

        await self._database.run(write)

    async def change(self, user: str, changed: Conversation) -> None:
        """Write title, settings and leaf. Raises NotHere."""

        def write(database: sqlite3.Connection) -> None:
            done = database.execute(
                "UPDATE conversations SET title = ?, settings = ?, leaf = ?, updated = ? "
                "WHERE id = ? AND user = ?",
                (
                    changed.title,
                    _encoded(changed.settings),
                    changed.leaf,
                    changed.updated,
                    changed.id,
                    user,
                ),
            )
            if not done.rowcount:
                raise _unknown()

        await self._database.run(write)

    async def append(self, user: str, conversation_id: str, messages: list[Message]) -> None:
        """Add messages; the last one is shown from now on. Raises NotHere."""

        def write(database: sqlite3.Connection) -> None:
            done = database.execute(
                "UPDATE conversations SET leaf = ?, updated = ? WHERE id = ? AND user = ?",
                (messages[-1].id, time.time(), conversation_id, user),
            )
            if not done.rowcount:
                raise _unknown()
            database.executemany(_INSERT, [_row(conversation_id, m) for m in messages])

        await self._database.run(write)

    async def rewrite(self, user: str, conversation_id: str, message: Message) -> None:
        """Write a message that has grown; nothing happens if it was deleted meanwhile."""

        def write(database: sqlite3.Connection) -> None:
            database.execute(
                "UPDATE messages SET content = ?, reasoning = ?, state = ?, model = ?, "
                "request_id = ?, error = ?, figures = ? WHERE id = ? AND conversation IN "
                "(SELECT id FROM conversations WHERE id = ? AND user = ?)",
                (
                    message.content,
                    message.reasoning,
                    message.state,
                    message.model,
                    message.request_id,
                    message.error,
                    _encoded(message.figures) if message.figures is not None else None,
                    message.id,
                    conversation_id,
                    user,
                ),
            )

        await self._database.run(write)

    async def delete(self, user: str, conversation_id: str) -> None:
        """Delete for good. Raises NotHere."""

        def write(database: sqlite3.Connection) -> None:
            done = database.execute(
                "DELETE FROM conversations WHERE id = ? AND user = ?", (conversation_id, user)
            )
            if not done.rowcount:
                raise _unknown()

        await self._database.run(write)
        await self._forget()

    async def delete_all(self, user: str) -> int:
        """Delete all that the user has, for good; returns how many there were."""
        deleted = await self._database.run(
            lambda database: (
                database.execute("DELETE FROM conversations WHERE user = ?", (user,)).rowcount
            )
        )
        await self._forget()
        return deleted

    def close(self) -> None:
        """Write what is left and close the file."""
        self._database.close()

    async def _forget(self) -> None:
        """Empty the write-ahead log, in which deleted text would otherwise stay for a while."""
        if not self._is_in_memory:
            await self._database.run(
                lambda database: database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            )


def _prepare(database: sqlite3.Connection) -> None:
    database.executescript(_TABLES)
    database.create_function("folded", 1, folded, deterministic=True)


def _unknown() -> NotHere:
    return NotHere("there is no such conversation")


def _load(database: sqlite3.Connection, user: str, conversation_id: str) -> Conversation:
    row = database.execute(
        "SELECT title, created, updated, settings, leaf FROM conversations "
        "WHERE id = ? AND user = ?",
        (conversation_id, user),
    ).fetchone()
    if row is None:
        raise _unknown()
    title, created, updated, settings, leaf = row
    rows = database.execute(
        f"SELECT {_COLUMNS} FROM messages WHERE conversation = ? ORDER BY number",
        (conversation_id,),
    )
    messages = [_message(found) for found in rows]
    decoded = msgspec.json.decode(settings, type=Settings)
    return Conversation(conversation_id, title, created, updated, decoded, messages, leaf)


def _message(row: tuple[Any, ...]) -> Message:
    made_of = dict(zip(_COLUMNS.split(", "), row, strict=True))
    figures = made_of.pop("figures")
    return Message(
        **made_of, figures=None if figures is None else msgspec.json.decode(figures, type=Figures)
    )


def _row(conversation_id: str, message: Message) -> tuple[Any, ...]:
    values = [getattr(message, column) for column in _COLUMNS.split(", ")[:-1]]
    figures = None if message.figures is None else _encoded(message.figures)
    return (conversation_id, *values, figures)


def _encoded(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


def _around(content: str, wanted: str) -> str:
    """The text found, with some of what stands before and after it, on one line."""
    place = max(0, folded(content).find(wanted))
    start = max(0, place - _AROUND)
    piece = " ".join(content[start : place + len(wanted) + _AROUND].split())
    return ("…" if start else "") + piece

"""Tells every open page of a user what changed in his conversations, as server-sent events.

A page that reads too slowly is told to read everything anew instead of being sent it all. Knows
nothing about what the events mean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec

MOST_PAGES = 32  # open pages of one user; the oldest is ended for a further one
MOST_WAITING = 1000  # events that one page may be behind
_AGAIN = b'data: {"type":"again"}\n\n'


class Subscription:
    """One page's events."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._has_news = asyncio.Event()
        self._is_closed = False

    def put(self, frame: bytes) -> None:
        """Add an event; too many of them become one that says to read everything again."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.clear()
            frame = _AGAIN
        self._waiting.append(frame)
        self._has_news.set()

    def close(self) -> None:
        """End the stream after what waits."""
        self._is_closed = True
        self._has_news.set()

    async def frames(self) -> AsyncIterator[bytes]:
        """What has come since the last look, in one piece."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if self._waiting:
                together = b"".join(self._waiting)
                self._waiting.clear()
                yield together
            elif self._is_closed:
                return
            if self._is_closed:
                self._has_news.set()


class Feed:
    """All users' open pages."""

    def __init__(self) -> None:
        self._pages: dict[str, list[Subscription]] = {}
        self._is_closed = False

    def subscribe(self, user: str) -> Subscription:
        """Events of this user from now on; give it back with `leave`."""
        page = Subscription()
        pages = self._pages.setdefault(user, [])
        if len(pages) >= MOST_PAGES:
            pages.pop(0).close()
        pages.append(page)
        if self._is_closed:
            page.close()
        return page

    def leave(self, user: str, page: Subscription) -> None:
        """The page is gone."""
        pages = self._pages.get(user, [])
        if page in pages:
            pages.remove(page)
        if not pages:
            self._pages.pop(user, None)

    def publish(self, user: str, kind: str, **content: Any) -> None:
        """Send an event to all of this user's pages, and to nobody else's."""
        pages = self._pages.get(user)
        if pages:
            frame = b"data: " + msgspec.json.encode({"type": kind, **content}) + b"\n\n"
            for page in pages:
                page.put(frame)

    def close(self) -> None:
        """End all streams; the server is about to close."""
        self._is_closed = True
        for pages in self._pages.values():
            for page in pages:
                page.close()

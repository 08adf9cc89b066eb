"""Reads and writes block files beside the engine: one thread for each, results as events.

The engine's thread only ever puts and takes; it never waits for the disk. When the disk fails the
store turns itself off, says so once, and answers every question with "not here".
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass

from mlx_cb.ssd.block_file import file_size
from mlx_cb.ssd.folder import BlockFolder

log = logging.getLogger("mlx_cb.ssd")

MIN_PENDING = 16  # blocks that leave together fit, however little memory there is


@dataclass(frozen=True, slots=True)
class Fetched:
    """A block that was asked for; `content` is None when it is not there (any more)."""

    content_hash: bytes
    content: bytes | None


@dataclass(frozen=True, slots=True)
class Gone:
    """A block that is not on the disk (any more): deleted for newer ones, or never written."""

    content_hash: bytes


@dataclass(frozen=True, slots=True)
class TurnedOff:
    """The disk has failed; nothing is read or written from now on."""

    reason: str


StoreEvent = Fetched | Gone | TurnedOff


@dataclass(slots=True)
class StoreCounters:
    """Since start. `refused` blocks were not written: over the day's allowance, or too many."""

    written_blocks: int = 0
    read_blocks: int = 0
    missing_blocks: int = 0
    refused_blocks: int = 0


class BlockStore:
    """Blocks by content hash, on disk. All methods are for one thread: the engine's."""

    def __init__(self, folder: BlockFolder, max_pending_bytes: int) -> None:
        self.folder = folder
        self.counters = StoreCounters()
        self.reason_off: str | None = None
        self._max_pending_bytes = max(MIN_PENDING * folder.kind.file_size, max_pending_bytes)
        self._full_day: str | None = None
        # One operation at a time on it, each of which is whole by itself: no lock.
        self._pending: dict[bytes, bytes] = {}
        self._writes: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[StoreEvent] = queue.SimpleQueue()
        self._news = threading.Event()
        self._room_again = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._write_all, "ssd writer"), (self._read_all, "ssd reader"))
        ]

    def start(self) -> set[bytes]:
        """Open the folder and start; returns the content hashes that are there. Raises OSError."""
        known = self.folder.open()
        for thread in self._threads:
            thread.start()
        return known

    @property
    def accepts(self) -> bool:
        """False while nothing would be written: the disk failed, or today's allowance is used."""
        return self.reason_off is None and self._full_day != self.folder.day()

    @property
    def room(self) -> int:
        """Blocks that may be put now without the memory for waiting ones running over."""
        return max(0, self._room_bytes // self.folder.kind.file_size)

    @property
    def _room_bytes(self) -> int:
        waiting = list(self._pending.values())  # one operation: the writer takes from it
        return self._max_pending_bytes - sum(file_size(len(content)) for content in waiting)

    def takes(self, num_bytes: int) -> bool:
        """True when so much, which is kept beside blocks, may be put now."""
        return not self._pending or file_size(num_bytes) <= self._room_bytes

    @property
    def num_pending(self) -> int:
        """Blocks that wait to be written."""
        return len(self._pending)

    def put(self, content_hash: bytes, content: bytes) -> None:
        """Write a block when its turn comes. Until then it can be fetched already."""
        self._pending[content_hash] = content
        self._writes.put(content_hash)

    def fetch(self, content_hash: bytes) -> None:
        """Read a block; a Fetched event will follow."""
        self._reads.put(content_hash)

    def events(self) -> list[StoreEvent]:
        """What has happened since the last call."""
        self._news.clear()
        found = []
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def wait_for_news(self, seconds: float) -> None:
        """Return when there are events, or after a while."""
        self._news.wait(seconds)

    def wait_for_room(self, seconds: float) -> None:
        """Return when a block can be put, or after a while."""
        self._room_again.clear()
        if not self.room:
            self._room_again.wait(seconds)

    def close(self, patience: float) -> None:
        """Write what waits, for at most `patience` seconds, and end both threads."""
        deadline = time.monotonic() + patience
        self._writes.put(None)
        self._reads.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _tell(self, event: StoreEvent) -> None:
        self._events.put(event)
        self._news.set()

    def _write_all(self) -> None:
        while (content_hash := self._writes.get()) is not None:
            content = self._pending.get(content_hash)
            try:
                if content is not None:
                    self._write(content_hash, content)
            except OSError as error:
                self._turn_off(f"writing failed: {error.strerror or error}")
            finally:
                self._pending.pop(content_hash, None)
                self._room_again.set()

    def _write(self, content_hash: bytes, content: bytes) -> None:
        if self.accepts and not self.folder.may_write(len(content)):
            self._full_day = self.folder.day()
            log.warning(
                "%s: today's allowance of %d bytes is written; nothing more is until midnight UTC",
                self.folder.path,
                self.folder.limits.daily_writes,
            )
        if not self.accepts:
            self.counters.refused_blocks += 1
            self._tell(Gone(content_hash))
            return
        gone = self.folder.write(content_hash, content)
        self.counters.written_blocks += 1
        for each in gone:
            self._tell(Gone(each))

    def _turn_off(self, reason: str) -> None:
        if self.reason_off is None:
            self.reason_off = reason
            log.error(
                "the SSD tier in %s is off until the next start: %s. Serving goes on without it.",
                self.folder.path,
                reason,
            )
            self._tell(TurnedOff(reason))

    def _read_all(self) -> None:
        while (content_hash := self._reads.get()) is not None:
            content = self._pending.get(content_hash)
            if content is None and self.reason_off is None:
                content = self.folder.read(content_hash)
                self.folder.note_use(content_hash, found=content is not None)
            if content is None:
                self.counters.missing_blocks += 1
            else:
                self.counters.read_blocks += 1
            self._tell(Fetched(content_hash, content))

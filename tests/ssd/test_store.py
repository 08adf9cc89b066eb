"""The store: everything beside the caller, every question answered, failures said once."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_cb.ssd import folder as folder_module
from mlx_cb.ssd.block_file import BlockKind
from mlx_cb.ssd.folder import BlockFolder, FolderLimits
from mlx_cb.ssd.store import MIN_PENDING, BlockStore, Fetched, Gone, StoreEvent, TurnedOff

KIND = BlockKind(b"i" * 32, 100)
ROOMY = FolderLimits(10**9, 10**9)


def started(path: Path, limits: FolderLimits = ROOMY, num_pending: int = 1000) -> BlockStore:
    store = BlockStore(BlockFolder(path, KIND, limits), num_pending * KIND.file_size)
    store.start()
    return store


def collect(store: BlockStore, done: Callable[[list[StoreEvent]], bool]) -> list[StoreEvent]:
    events: list[StoreEvent] = []
    deadline = time.monotonic() + 30
    while not done(events):
        assert time.monotonic() < deadline, events
        store.wait_for_news(1.0)
        events += store.events()
    return events


def test_put_and_fetch(tmp_path: Path) -> None:
    store = started(tmp_path)
    store.put(b"a" * 16, b"A" * 100)
    store.fetch(b"a" * 16)
    store.fetch(b"b" * 16)
    events = collect(store, lambda events: len(events) == 2)
    assert events == [Fetched(b"a" * 16, b"A" * 100), Fetched(b"b" * 16, None)]
    store.close(10)
    again = BlockStore(BlockFolder(tmp_path, KIND, ROOMY), 10**6)
    assert again.start() == {b"a" * 16}
    again.close(10)


def test_closing_writes_what_waits(tmp_path: Path) -> None:
    store = started(tmp_path)
    hashes = {bytes([index]) * 16 for index in range(40)}
    for content_hash in hashes:
        store.put(content_hash, content_hash * 6 + b"1234")
    store.close(30)
    assert store.num_pending == 0
    assert BlockFolder(tmp_path, KIND, ROOMY).open() == hashes


def test_room_is_bounded_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write = folder_module.write_file
    monkeypatch.setattr(folder_module, "write_file", lambda *a: (gate.wait(30), write(*a)))
    store = started(tmp_path, num_pending=1)
    assert store.room == MIN_PENDING
    for index in range(MIN_PENDING):
        assert store.room == MIN_PENDING - index
        store.put(bytes([index]) * 16, b"x" * 100)
    assert store.room == 0
    store.fetch(bytes([2]) * 16)
    events = collect(store, lambda events: len(events) == 1)
    assert events == [Fetched(bytes([2]) * 16, b"x" * 100)], "what waits can be read already"
    gate.set()
    store.wait_for_room(30)
    assert store.room > 0
    collect_written(store, MIN_PENDING)
    store.close(30)
    assert store.room == MIN_PENDING


def test_a_full_disk_turns_it_off_once_and_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = started(tmp_path)
    store.put(b"a" * 16, b"A" * 100)
    collect_written(store, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder_module, "write_file", full)
    for index in range(4):
        store.put(bytes([index]) * 16, b"x" * 100)
    events = collect(store, lambda events: len(events) == 4)
    assert events[0] == TurnedOff("writing failed: No space left on device")
    assert events[1:] == [Gone(bytes([index]) * 16) for index in (1, 2, 3)]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert not store.accepts
    store.fetch(b"a" * 16)
    assert collect(store, lambda e: bool(e)) == [Fetched(b"a" * 16, None)]
    store.close(10)


def collect_written(store: BlockStore, count: int) -> None:
    deadline = time.monotonic() + 30
    while store.counters.written_blocks < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_days_allowance_stops_writing_and_not_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = FolderLimits(10**9, 2 * KIND.file_size)
    store = started(tmp_path, limits)
    for index in range(5):
        store.put(bytes([index]) * 16, b"x" * 100)
    events = collect(store, lambda events: len(events) == 3)
    assert events == [Gone(bytes([index]) * 16) for index in (2, 3, 4)]
    assert len(caplog.records) == 1
    assert not store.accepts
    assert store.reason_off is None
    store.fetch(b"\0" * 16)
    assert collect(store, lambda e: bool(e)) == [Fetched(b"\0" * 16, b"x" * 100)]
    store.close(10)

"""The folder of block files: what is in it, how much it may hold, how much is written a day.

Laid out as DIR/<model>/<first byte>/<content hash>.kv. Several servers may share it: every change
is one rename or one deletion, contents are named by what they hold, and the day's writes are
counted in a file that all of them append to.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mlx_cb.ssd.block_file import (
    PASSING_SUFFIX,
    SUFFIX,
    BlockKind,
    UnusableFile,
    file_size,
    read_file,
    write_file,
)

log = logging.getLogger("mlx_cb.ssd")

LEFTOVER_AGE = 600.0  # seconds after which nobody is still writing a passing file
SURVEYS = 8  # looks through the folder while as much is written as it may hold
LEDGER_UNIT = 2**20  # bytes that one byte of the day's ledger stands for
_MODEL = re.compile(r"[0-9a-f]{16}")
_LEDGER = re.compile(r"written-\d{4}-\d{2}-\d{2}")
_FILE = re.compile(r"[0-9a-f]{32}" + re.escape(SUFFIX))


def today() -> str:
    """The day that writes are counted for, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


@dataclass(frozen=True, slots=True)
class FolderLimits:
    """Most bytes of all files together, and most bytes written per day."""

    capacity: int
    daily_writes: int


@dataclass(slots=True)
class _Survey:
    """What a look through the folder found: files by age, and what does not belong there."""

    files: list[tuple[float, Path, int]]
    num_foreign: int = 0
    num_broken: int = 0


class BlockFolder:
    """One model's blocks in a folder that other models and servers may use too."""

    def __init__(
        self,
        path: Path,
        kind: BlockKind,
        limits: FolderLimits,
        day: Callable[[], str] = today,
    ) -> None:
        self.path = path
        self.kind = kind
        self.limits = limits
        self.day = day
        self._own = path / kind.identity.hex()[:16]
        self._lock = (
            threading.Lock()
        )  # guards the accounts: files are read while others are written
        self._sizes: OrderedDict[Path, int] = OrderedDict()  # least recently used first
        self._not_counted = 0
        self._since_survey = 0
        self.num_bytes = 0
        self.num_unusable = 0

    def open(self) -> set[bytes]:
        """Make the folder ready; returns the content hashes that are in it.

        Raises OSError when it cannot be written to or is too small for a single block.
        """
        if self.limits.capacity < self.kind.file_size:
            raise OSError(f"a block takes {self.kind.file_size} bytes, more than is allowed")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._own.mkdir(mode=0o700, exist_ok=True)
        probe = self._own / f".probe.{os.getpid()}{PASSING_SUFFIX}"
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
        probe.unlink(missing_ok=True)
        survey = self._survey()
        if survey.num_foreign or survey.num_broken:
            log.warning(
                "%s: %d files or folders are not ours and are left alone; "
                "%d half-written or damaged files were removed",
                self.path,
                survey.num_foreign,
                survey.num_broken,
            )
        self._make_room()
        return self._own_hashes()

    def _own_hashes(self) -> set[bytes]:
        return {bytes.fromhex(path.stem) for path in self._sizes if path.parent.parent == self._own}

    def _survey(self) -> _Survey:
        """Look through the whole folder, other models' files included."""
        survey = _Survey([])
        for entry in _entries(self.path):
            if _MODEL.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                self._survey_model(Path(entry.path), survey)
            elif _LEDGER.fullmatch(entry.name):
                if entry.name != f"written-{self.day()}":
                    Path(entry.path).unlink(missing_ok=True)
            else:
                survey.num_foreign += 1
        survey.files.sort(key=lambda found: found[0])
        self._sizes = OrderedDict((path, size) for _, path, size in survey.files)
        self.num_bytes = sum(self._sizes.values())
        self._since_survey = 0
        return survey

    def _survey_model(self, model: Path, survey: _Survey) -> None:
        for part in _entries(model):
            for entry in _entries(Path(part.path)) if part.is_dir(follow_symlinks=False) else ():
                path = Path(entry.path)
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # another server was faster
                if entry.name.endswith(PASSING_SUFFIX):
                    if found.st_mtime < time.time() - LEFTOVER_AGE:
                        path.unlink(missing_ok=True)
                        survey.num_broken += 1
                elif not _FILE.fullmatch(entry.name):
                    survey.num_foreign += 1
                elif model == self._own and not self.kind.fits(found.st_size):
                    path.unlink(missing_ok=True)
                    survey.num_broken += 1
                else:
                    survey.files.append((found.st_mtime, path, found.st_size))

    def path_of(self, content_hash: bytes) -> Path:
        """Where a block's file is or would be."""
        name = content_hash.hex()
        return self._own / name[:2] / f"{name}{SUFFIX}"

    def may_write(self, num_bytes: int) -> bool:
        """False once all servers of this folder together have written the day's allowance."""
        return self.written_today() + file_size(num_bytes) <= self.limits.daily_writes

    def written_today(self) -> int:
        """Bytes that all servers of this folder have written today, what others round off apart."""
        try:
            units = (self.path / f"written-{self.day()}").stat().st_size
        except OSError:
            units = 0
        return units * LEDGER_UNIT + self._not_counted

    def write(self, content_hash: bytes, content: bytes) -> set[bytes]:
        """Store a block; returns the contents that had to go for it, or went unseen before.

        Raises OSError when the disk refuses.
        """
        path = self.path_of(content_hash)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(path, self.kind, content_hash, content)
        size = file_size(len(content))
        self._count(size)
        with self._lock:
            self.num_bytes += size - self._sizes.pop(path, 0)
            self._sizes[path] = size
            gone: set[bytes] = set()
            if self._since_survey > self.limits.capacity // SURVEYS:
                before = self._own_hashes()
                self._survey()  # what other servers have written and deleted meanwhile
                gone = before - self._own_hashes()
            return gone | self._make_room()

    def _count(self, num_bytes: int) -> None:
        self._since_survey += num_bytes
        self._not_counted += num_bytes
        units, self._not_counted = divmod(self._not_counted, LEDGER_UNIT)
        if units:
            ledger = self.path / f"written-{self.day()}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(ledger, flags, 0o600), "ab", buffering=0) as file:
                file.write(b"." * units)

    def _make_room(self) -> set[bytes]:
        """Delete the longest unused files while there are too many; returns what of ours went."""
        gone = set()
        while self._sizes and self.num_bytes > self.limits.capacity:
            path, size = self._sizes.popitem(last=False)
            path.unlink(missing_ok=True)
            self.num_bytes -= size
            if path.parent.parent == self._own:
                gone.add(bytes.fromhex(path.stem))
        return gone

    def read(self, content_hash: bytes) -> bytes | None:
        """A block's content; None when it is not there or must not be used.

        A file that must not be used is deleted, with a warning, so that it is met once only.
        """
        path = self.path_of(content_hash)
        try:
            return read_file(path, self.kind, content_hash)
        except FileNotFoundError:
            return None
        except UnusableFile as error:
            log.warning("%s is not used and is deleted: %s", path, error)
            self.num_unusable += 1
            try:
                path.unlink(missing_ok=True)
            except OSError as failure:
                log.warning("%s cannot be deleted: %s", path, failure.strerror)
            return None

    def note_use(self, content_hash: bytes, *, found: bool) -> None:
        """A read has found the file, or has not: keep the accounts."""
        path = self.path_of(content_hash)
        with self._lock:
            if found and path in self._sizes:
                self._sizes.move_to_end(path)
            elif not found:
                self.num_bytes -= self._sizes.pop(path, 0)


def _entries(path: Path) -> Iterator[os.DirEntry[str]]:
    """What is in a folder; nothing when it went meanwhile."""
    try:
        with os.scandir(path) as entries:
            yield from entries
    except FileNotFoundError:
        return

"""Carries out the SSD tier's orders: blocks out of the storage into files, and back.

Stands between core, which decides and knows no disk, and the store, which knows nothing else. The
engine's thread copies blocks out and in; files are read and written by the store's own threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from mlx_cb.config import CacheConfig
from mlx_cb.core.beside_blocks import Part, PrefixNeeds, key_of
from mlx_cb.core.scheduler_output import SchedulerOutput
from mlx_cb.core.ssd_tier import BlockContent, SsdLimits, SsdTier
from mlx_cb.model.cache_spec import CacheSpec
from mlx_cb.model.fingerprint import fingerprint
from mlx_cb.model.loader import LoadedModel
from mlx_cb.model.runner import ModelRunner
from mlx_cb.ssd.block_file import BlockKind
from mlx_cb.ssd.folder import BlockFolder, FolderLimits
from mlx_cb.ssd.store import BlockStore, Fetched, Gone, TurnedOff

log = logging.getLogger("mlx_cb.ssd")

MOVED_SHARE = 1 / 16  # of the pool: most that is in memory on its way out, and on its way back
MOST_MOVED = 2**28  # bytes, however large the pool is
MIN_RESTORE_TOKENS = 64  # fewer are computed sooner than they are fetched
IDLE_BATCH = 8  # blocks copied out at once while nothing runs: a new request waits for no more
STATE_HEAD = 2**16  # bytes that describe a state's arrays at most
DISK_SHARE = 0.1  # of the disk, for `--ssd-cache-size auto`
DAILY_WRITES = 100 * 10**9  # for `--ssd-daily-writes auto`

#: The block that holds a content; None when none does.
FindBlock = Callable[[bytes], int | None]


@dataclass(slots=True)
class SsdCarrier:
    """One engine's way to its SSD tier."""

    runner: ModelRunner
    tier: SsdTier
    store: BlockStore
    staged: dict[bytes, bytes]

    @classmethod
    def open(
        cls, config: CacheConfig, runner: ModelRunner, spec: CacheSpec, identity: bytes
    ) -> SsdCarrier:
        """Open the configured folder. Raises OSError when it cannot be used."""
        assert config.ssd_cache is not None
        path = Path(config.ssd_cache).expanduser().resolve()
        kind = BlockKind(identity, runner.block_bytes.num_bytes, _most_beside(runner, spec))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        size = config.ssd_cache_size
        if size is None:
            size = int(psutil.disk_usage(str(path)).total * DISK_SHARE)
        daily = config.ssd_daily_writes
        limits = FolderLimits(size, DAILY_WRITES if daily is None else daily)
        largest = max(kind.num_bytes, kind.most_beside)
        moved = min(MOST_MOVED, int(runner.max_blocks * largest * MOVED_SHARE))
        store = BlockStore(BlockFolder(path, kind, limits), max_pending_bytes=moved)
        known = store.start()
        log.info("SSD tier in %s: %d files of this model are there", path, len(known))
        tier_limits = SsdLimits(
            min_restore_blocks=-(-MIN_RESTORE_TOKENS // config.block_size),
            max_staged_blocks=max(4, moved // largest),
        )
        return cls(runner, SsdTier(tier_limits, known, prefix_needs(spec)), store, {})

    def take_events(self) -> None:
        """Tell core what the store has done since the last call."""
        tier = self.tier
        for event in self.store.events():
            match event:
                case Fetched(content_hash, None):
                    tier.miss(content_hash)
                case Fetched(content_hash, content):
                    assert content is not None
                    if tier.arrive(content_hash):
                        self.staged[content_hash] = content
                case Gone(content_hash):
                    tier.gone(content_hash)
                case TurnedOff():
                    tier.turn_off()

    def carry_out(self, plan: SchedulerOutput) -> None:
        """Do what has to be done before a step runs, and start what can go on beside it."""
        self._store(plan.stores)
        self._restore(plan)
        for content_hash in plan.fetches:
            self.store.fetch(content_hash)
        for content_hash in [h for h in self.staged if not self.tier.is_staged(h)]:
            del self.staged[content_hash]

    def wait(self) -> None:
        """Nothing can run before the SSD has answered: wait for it a little."""
        if self.tier.awaits:
            self.store.wait_for_news(0.005)

    def write_behind(self, find: FindBlock) -> bool:
        """Write some blocks that are in memory only; True while there is more to do.

        `find` gives the block with a content. For times when nothing runs.
        """
        self.take_events()
        if not self.tier.has_unsaved or not self.store.accepts:
            return False
        if not self.store.room:
            self.store.wait_for_room(0.02)
        self._store(self.tier.write_behind(find, min(IDLE_BATCH, self.store.room)))
        return self.tier.has_unsaved

    def _store(self, orders: list[BlockContent]) -> None:
        room = self.store.room if self.store.accepts else 0
        kept, lost = orders[:room], orders[room:]
        for order in lost:
            for part in order.parts:
                self.tier.gone(key_of(order.content_hash, part))
        self._store_blocks([order for order in kept if Part.BLOCK in order.parts])
        for order in kept:
            for part in order.parts:
                if part is not Part.BLOCK:
                    self._store_beside(order, part)
        self.tier.stored(len(kept))

    def _store_blocks(self, orders: list[BlockContent]) -> None:
        if not orders:
            return
        contents = self.runner.block_bytes.copy_out([order.block_id for order in orders])
        for order, content in zip(orders, contents, strict=True):
            self.store.put(order.content_hash, content.tobytes())

    def _store_beside(self, order: BlockContent, part: Part) -> None:
        """Write what belongs to a block, if it (still) exists and there is room for it."""
        key, content = key_of(order.content_hash, part), self._beside(order, part)
        if content is None or not self.store.takes(len(content)):
            self.tier.lacks(key)
        else:
            self.store.put(key, content)

    def _beside(self, order: BlockContent, part: Part) -> bytes | None:
        if part is Part.WINDOWS:
            if not self.runner.storage.is_in_windows(order.block_id):
                return None
            return self.runner.window_bytes.copy_out([order.block_id]).tobytes()
        states = self.runner.forward.states
        saved = None if states.checkpoints is None else states.checkpoints.peek(order.content_hash)
        return None if saved is None else states.dump(saved)

    def _restore(self, plan: SchedulerOutput) -> None:
        """Put arrived contents where they belong; the last order for a block counts."""
        blocks: dict[int, bytes] = {}
        windows: dict[int, bytes] = {}
        for order in plan.restores:
            found = {
                part: self.staged.pop(key_of(order.content_hash, part)) for part in order.parts
            }
            blocks[order.block_id] = found.get(Part.BLOCK, b"")
            windows.pop(order.block_id, None)
            if Part.WINDOWS in found:
                windows[order.block_id] = found[Part.WINDOWS]
        if plan.restoring:
            self.runner.restore_blocks(plan, (blocks, windows))
        for state in plan.states:
            data = self.staged.pop(key_of(state.content_hash, Part.STATE))
            self.runner.forward.states.restore(
                state.request, state.content_hash, state.num_tokens, data
            )

    def close(self, patience: float, find: FindBlock) -> None:
        """Write what is in memory only, for at most `patience` seconds, and end the threads."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and self.write_behind(find):
            pass
        self.store.close(max(0.0, deadline - time.monotonic()))

    def status(self) -> dict[str, Any]:
        """JSON-ready, for `/status`; sizes in bytes."""
        self.take_events()
        store, folder, tier = self.store, self.store.folder, self.tier
        return {
            "state": "on" if store.reason_off is None else "off",
            "reason": store.reason_off,
            "folder": str(folder.path),
            "bytes": folder.num_bytes,
            "capacity": folder.limits.capacity,
            "daily_writes": folder.limits.daily_writes,
            "written_today": folder.written_today(),
            "blocks": len(tier),
            "pending_blocks": store.num_pending,
            "staged_blocks": len(self.staged),
            "unusable_files": folder.num_unusable,
            "lost_blocks": tier.num_lost_blocks,
            "stored_blocks": tier.num_stored_blocks,
            "restored_blocks": tier.num_restored_blocks,
            **asdict(store.counters),
        }


@dataclass(frozen=True, slots=True)
class SsdOff:
    """Stands where the carrier would, when there is no tier: does nothing, and says why."""

    reason: str

    @classmethod
    def loudly(cls, reason: str) -> SsdOff:
        """A tier that was asked for and cannot be."""
        log.error("the SSD tier is off: %s. Serving goes on without it.", reason)
        return cls(reason)

    def take_events(self) -> None:
        """Nothing happens."""

    def carry_out(self, plan: SchedulerOutput) -> None:
        """Without a tier a plan has no orders."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    def write_behind(self, find: FindBlock) -> bool:
        """There is nothing to do."""
        return False

    def close(self, patience: float, find: FindBlock) -> None:
        """There is nothing to end."""

    def status(self) -> dict[str, Any]:
        """JSON-ready, for `/status`."""
        return {"state": "off", "reason": self.reason}


def prefix_needs(spec: CacheSpec) -> PrefixNeeds:
    """What a model's layers keep of a prefix."""
    windows = [window for window in spec.bytes_by_window if window is not None]
    return PrefixNeeds(None in spec.bytes_by_window, max(windows, default=None), spec.is_recurrent)


def _most_beside(runner: ModelRunner, spec: CacheSpec) -> int:
    """Bytes that what belongs to a block takes at most; twice what a short text's state takes."""
    return max(runner.window_bytes.num_bytes, 2 * spec.state_bytes + STATE_HEAD * spec.is_recurrent)


def open_tier(
    config: CacheConfig, loaded: LoadedModel, spec: CacheSpec, runner: ModelRunner
) -> SsdCarrier | SsdOff:
    """The SSD tier, or the reason why there is none. Serving never depends on it."""
    if config.ssd_cache is None:
        return SsdOff("no --ssd-cache")
    if not config.prefix_cache:
        return SsdOff("--no-prefix-cache: nothing would be found again")
    try:
        identity = fingerprint(loaded, spec, config.block_size)
        return SsdCarrier.open(config, runner, spec, identity)
    except OSError as error:
        return SsdOff.loudly(f"{config.ssd_cache} cannot be used: {error.strerror or error}")

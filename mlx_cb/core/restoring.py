"""Brings the prefix of an admitted request back from the SSD, block by block, before it computes.

A restored block counts like a computed one: it is in the request's table, full and findable.
Without a tier nothing ever has to come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mlx_cb.core.kv_cache_manager import KVCacheManager
from mlx_cb.core.request import Request
from mlx_cb.core.scheduler_output import SchedulerOutput
from mlx_cb.core.ssd_tier import BlockContent, Fetch

#: Makes slots for so many tokens of a request; False when it had to give way itself.
MakeRoom = Callable[[Request, int, SchedulerOutput], bool]


class Restoring:
    """Knows what is left to restore of each admitted request."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self.num_tokens = 0
        self._kv_cache = kv_cache
        self._tier = kv_cache.tier
        self._left: dict[str, list[bytes]] = {}

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._left

    def begin(self, request: Request, now: float) -> None:
        """Order what the SSD has of a request's text behind the prefix that is in the pool."""
        if self._tier is None:
            return
        hashes = self._kv_cache.hashes_behind_prefix(request)
        if count := self._tier.num_held(hashes):
            self._kv_cache.keep_full_blocks(request)
            self._left[request.request_id] = hashes[:count]
            self._tier.order(hashes[:count], now)

    def end(self, request: Request) -> None:
        """Whatever has not come by now is not wanted any more."""
        left = self._left.pop(request.request_id, None)
        if left is not None and self._tier is not None:
            self._tier.release(left)

    def advance(
        self, requests: Iterable[Request], plan: SchedulerOutput, make_room: MakeRoom
    ) -> None:
        """Take the blocks that have arrived for those of the requests that wait for some."""
        for request in [request for request in requests if request in self]:
            before = request.num_computed_tokens
            while request in self and self._take_next(request, plan, make_room):
                pass
            taken = request.num_computed_tokens - before
            if taken > 0:
                self.num_tokens += taken
                self._kv_cache.count_found(request, taken)

    def _take_next(self, request: Request, plan: SchedulerOutput, make_room: MakeRoom) -> bool:
        """Take one block; False when it has to be waited for, or nothing more will come."""
        assert self._tier is not None
        kv_cache, now, left = self._kv_cache, plan.record.started, self._left[request.request_id]
        content_hash = left[0]
        if (known := kv_cache.pool.find(content_hash)) is not None:
            kv_cache.pool.share([known])
            request.block_table.append(known)
            self._tier.release([content_hash])
        else:
            state = self._tier.state(content_hash, now)
            if state is Fetch.ABSENT:
                self.end(request)
                return False
            self._tier.order(left, now)
            wanted = request.num_computed_tokens + kv_cache.block_size
            if state is Fetch.AWAITED or not make_room(request, wanted, plan):
                return False
            self._tier.take(content_hash)
            plan.restores.append(BlockContent(request.block_table[-1], content_hash))
            plan.restoring.append(request)
        del left[0]
        request.num_computed_tokens += kv_cache.block_size
        kv_cache.remember(request, request.num_computed_tokens)
        if not left:
            self.end(request)
        return True

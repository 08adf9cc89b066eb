"""Brings the prefix of an admitted request back from the SSD, piece by piece, before it computes.

A restored block counts like a computed one: it is in the request's table, full and findable. Where
blocks are all there is to a prefix, each one counts as soon as it is there; else all of it counts
at its end, or nothing. Without a tier nothing ever has to come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mlx_cb.core.beside_blocks import Part, Piece, Places
from mlx_cb.core.kv_cache_manager import KVCacheManager
from mlx_cb.core.request import Request
from mlx_cb.core.scheduler_output import SchedulerOutput, StateContent
from mlx_cb.core.ssd_tier import BlockContent, Fetch, SsdTier

#: Makes slots for so many tokens of a request; False when it had to give way itself, or to wait.
MakeRoom = Callable[[Request, int, SchedulerOutput], bool]


class Restoring:
    """Knows what is left to restore of each admitted request."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self.num_tokens = 0
        self._kv_cache = kv_cache
        self._tier = kv_cache.tier
        self._left: dict[str, list[Piece]] = {}

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._left

    def begin(self, request: Request, plan: SchedulerOutput) -> None:
        """Order what the SSD has of a request's text behind the prefix that is in the pool."""
        if self._tier is None:
            return
        hashes, start = self._kv_cache.hashes_to_restore(request)
        if pieces := self._pieces(self._tier, hashes, start):
            self._kv_cache.keep_full_blocks(request)
            self._left[request.request_id] = pieces
            self._tier.order([piece.keys for piece in pieces], plan.record.started)
            plan.restoring.append(request)

    def _pieces(self, tier: SsdTier, hashes: list[bytes], start: int) -> list[Piece]:
        if tier.needs.is_exact_anywhere:
            behind = hashes[start:]
            return [Piece(each, (Part.BLOCK,)) for each in behind[: tier.num_held(behind)]]
        places = Places(tier, self._kv_cache.pool.find)
        pieces = tier.needs.pieces(hashes, start, self._kv_cache.block_size, places)
        num_blocks = sum(piece.parts != (Part.STATE,) for piece in pieces)
        return pieces if num_blocks >= tier.limits.min_restore_blocks else []

    def end(self, request: Request) -> None:
        """Whatever has not come by now is not wanted any more."""
        left = self._left.pop(request.request_id, None)
        if left is not None and self._tier is not None:
            self._tier.release(key for piece in left for key in piece.keys)

    def _give_up(self, request: Request) -> None:
        """Something will not come: compute from where the request can go on."""
        self.end(request)
        self._kv_cache.drop_uncomputed_blocks(request)

    def advance(
        self, requests: Iterable[Request], plan: SchedulerOutput, make_room: MakeRoom
    ) -> None:
        """Take the pieces that have arrived for those of the requests that wait for some."""
        for request in [request for request in requests if request in self]:
            before = request.num_computed_tokens
            while request in self and self._take_next(request, plan, make_room):
                pass
            taken = request.num_computed_tokens - before
            if taken > 0:
                self.num_tokens += taken
                self._kv_cache.count_found(request, taken)

    def _take_next(self, request: Request, plan: SchedulerOutput, make_room: MakeRoom) -> bool:
        """Take one piece; False when it has to be waited for, or nothing more will come."""
        tier, left = self._tier, self._left[request.request_id]
        assert tier is not None
        piece, pool, now = left[0], self._kv_cache.pool, plan.record.started
        is_shared = piece.parts in ((), (Part.BLOCK,))
        if is_shared and (known := pool.find(piece.content_hash)) is not None:
            pool.share([known])
            request.block_table.append(known)
            tier.release(piece.keys)
        else:
            states = [tier.state(key, now) for key in piece.keys]
            if Fetch.ABSENT in states:
                self._give_up(request)
                return False
            tier.order([piece.keys for piece in left], now)
            wanted = (len(request.block_table) + 1) * self._kv_cache.block_size
            if Fetch.AWAITED in states or not (
                piece.parts == (Part.STATE,) or make_room(request, wanted, plan)
            ):
                return False
            self._put(request, piece, plan)
        del left[0]
        if tier.needs.is_exact_anywhere or not left:
            request.num_computed_tokens = len(request.block_table) * self._kv_cache.block_size
            self._kv_cache.remember(request, request.num_computed_tokens)
        if not left:
            self.end(request)
        return True

    def _put(self, request: Request, piece: Piece, plan: SchedulerOutput) -> None:
        """Order that a piece, all of which has arrived, gets to its place before the step."""
        assert self._tier is not None
        for key in piece.keys:
            self._tier.take(key)
        content = piece.content_hash
        if piece.parts == (Part.STATE,):
            end = len(request.block_table) * self._kv_cache.block_size
            plan.states.append(StateContent(request, content, end))
        else:
            plan.restores.append(BlockContent(request.block_table[-1], content, piece.parts))
            plan.restoring.append(request)

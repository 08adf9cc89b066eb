"""Gives requests their blocks and finds prefixes that are already there.

Owns the policy per request (how many blocks, which prefix); the blocks themselves belong to
`BlockPool`. Sharing is in place: a hit adds references, nothing is copied. Only full blocks are
shared and a request writes only behind them, so a shared block never changes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_cb.core.block_pool import BlockPool
from mlx_cb.core.checkpoints import Checkpoints
from mlx_cb.core.request import Request
from mlx_cb.core.scheduler_output import SchedulerOutput
from mlx_cb.core.ssd_tier import SsdTier


@dataclass(slots=True)
class PrefixStats:
    """Tokens asked for and tokens found, since start."""

    queried_tokens: int = 0
    hit_tokens: int = 0


class KVCacheManager:
    """Block tables of all requests over one pool.

    With `checkpoints` a prefix is usable only up to a border whose state was saved there; `keeps`
    says whether layers that drop old blocks still have the newest of a prefix. What `tier` holds
    comes back to a request once it is admitted.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        prefix_cache: bool,
        checkpoints: Checkpoints | None = None,
        keeps: Callable[[Sequence[int]], bool] = lambda _: True,
        tier: SsdTier | None = None,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.checkpoints = checkpoints
        self.tier = tier
        if tier is not None:
            pool.on_evict = tier.evict
        self._keeps = keeps
        self.stats = PrefixStats()

    @property
    def num_checkpoints(self) -> int:
        """States saved at block borders."""
        return 0 if self.checkpoints is None else len(self.checkpoints)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks a request still has to take for its known text and one token more."""
        return max(0, self.num_blocks_for(request.num_tokens + 1) - len(request.block_table))

    def num_resident_tokens(self, request: Request) -> int:
        """Tokens of a request that need no computing as things are."""
        return len(self._find_prefix(request)) * self.block_size

    def can_admit(self, request: Request, *, headroom: int) -> bool:
        """True when the whole known text fits beside `headroom` blocks for others' growth."""
        hits = self._find_prefix(request)
        revived = sum(1 for block_id in hits if not self.pool.is_referenced(block_id))
        needed = self.num_blocks_for(request.num_tokens + 1) - len(hits)
        return needed + revived + headroom <= self.pool.num_available

    def take_prefix(self, request: Request) -> int:
        """Share the blocks of the longest known prefix; returns the tokens that need no computing.

        At least the last token is left to compute, because its logits are needed.
        """
        assert not request.block_table
        hits = self._find_prefix(request)
        if self.checkpoints is not None and self.prefix_cache:
            self._take_checkpoint(request, self.checkpoints, len(hits))
        self.pool.share(hits)
        request.block_table = hits
        request.num_hashed_blocks = len(hits)
        request.num_computed_tokens = len(hits) * self.block_size
        self.stats.queried_tokens += request.num_tokens
        self.stats.hit_tokens += request.num_computed_tokens
        return request.num_computed_tokens

    def hashes_behind_prefix(self, request: Request) -> list[bytes]:
        """Content hashes of the full blocks that a request still has to compute.

        The last token is left to compute, because its logits are needed.
        """
        if not self.prefix_cache or request.params.prompt_logprobs is not None:
            return []
        num_full = (request.num_tokens - 1) // self.block_size
        return self._hashes(request, num_full)[len(request.block_table) : num_full]

    def _take_checkpoint(self, request: Request, checkpoints: Checkpoints, num_hits: int) -> None:
        """Hand over the state behind the hits, and name the borders worth a state of their own.

        Those are where the known text ends, and where it leaves a text that is in the blocks: the
        next request that shares as much can then go on from there.
        """
        hashes = request.block_hashes
        request.resume_state = checkpoints.load(hashes[num_hits - 1]) if num_hits else None
        known = self._find_blocks(request)
        num_full = (request.num_tokens - 1) // self.block_size
        self._hashes(request, num_full)
        borders = {len(known), num_full} - {0, num_hits}
        request.checkpoint_tokens = tuple(sorted(n * self.block_size for n in borders))

    def allocate_slots(self, request: Request, num_tokens: int) -> bool:
        """Grow the block table until it holds `num_tokens`; False, and no change, without room."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_table)
        if missing <= 0:
            return True
        if missing > self.pool.num_available:
            return False
        request.block_table += self.pool.allocate(missing)
        return True

    def free(self, request: Request) -> None:
        """Give back every block; the content of full ones stays findable until it is needed."""
        self.pool.free(request.block_table)
        request.block_table = []
        request.num_hashed_blocks = 0
        request.num_computed_tokens = 0
        request.resume_state = None
        request.border_state = None

    def remember(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` (written, and known) findable."""
        num_full = num_tokens // self.block_size
        if num_full <= request.num_hashed_blocks or not self.prefix_cache:
            return
        hashes = self._hashes(request, num_full)
        for index in range(request.num_hashed_blocks, num_full):
            self.pool.remember(request.block_table[index], hashes[index])
            if self.tier is not None:
                self.tier.note(hashes[index])
        request.num_hashed_blocks = num_full
        self._keep_border(request, num_full)

    def _keep_border(self, request: Request, num_full: int) -> None:
        """Keep the state at the newest border, so that the next turn goes on from the answer.

        Each request keeps one of these; where its prompt ends another one stays.
        """
        border = request.border_state
        if self.checkpoints is None or border is None:
            return
        if border.num_tokens == num_full * self.block_size:
            content_hash = request.block_hashes[num_full - 1]
            request.border_state = None
            if content_hash not in self.checkpoints:
                self.checkpoints.replace(request.border_hash, content_hash, border.state)
                request.border_hash = content_hash

    def order_moves(self, plan: SchedulerOutput) -> None:
        """Put into a plan what has to be copied out before it runs, and what is to be read."""
        if self.tier is not None:
            plan.stores = self.tier.take_stores(self.pool.find)
            plan.fetches = self.tier.take_fetches()

    def forget_all(self) -> None:
        """Make nothing findable any more, and write none of it to the SSD."""
        self.pool.forget_all()
        if self.tier is not None:
            self.tier.forget_unsaved()

    def _find_prefix(self, request: Request) -> list[int]:
        """Blocks of the longest known prefix that a request can go on from."""
        hits = self._find_blocks(request)
        while hits and not self._can_go_on(request, hits):
            hits.pop()
        return hits

    def _can_go_on(self, request: Request, hits: list[int]) -> bool:
        if self.checkpoints is not None and (
            request.block_hashes[len(hits) - 1] not in self.checkpoints
        ):
            return False
        return self._keeps(hits)

    def _find_blocks(self, request: Request) -> list[int]:
        if not self.prefix_cache or request.params.prompt_logprobs is not None:
            return []
        num_full = (request.num_tokens - 1) // self.block_size
        hits: list[int] = []
        for content_hash in self._hashes(request, num_full)[:num_full]:
            block_id = self.pool.find(content_hash)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _hashes(self, request: Request, num_full: int) -> list[bytes]:
        """Chained hashes of the first `num_full` blocks: each covers everything before it."""
        hashes = request.block_hashes
        size = self.block_size
        for index in range(len(hashes), num_full):
            parent = hashes[-1] if hashes else request.cache_salt
            tokens = array("i", request.token_ids[index * size : (index + 1) * size])
            digest = hashlib.blake2b(parent, digest_size=16)
            digest.update(tokens.tobytes())
            hashes.append(digest.digest())
        return hashes

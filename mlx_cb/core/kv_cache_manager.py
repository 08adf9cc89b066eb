"""Gives requests their blocks and finds prefixes that are already there.

Owns the policy per request (how many blocks, which prefix); the blocks themselves belong to
`BlockPool`. Sharing is in place: a hit adds references, nothing is copied. Full blocks are shared
and never change; of a block that a text only begins like, the equal part is copied.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from mlx_cb.core.block_pool import BlockPool, Content
from mlx_cb.core.checkpoints import Checkpoints
from mlx_cb.core.prefix_waits import PrefixWaits, SharedPrefix
from mlx_cb.core.request import Request, RequestStatus
from mlx_cb.core.scheduler_output import SchedulerOutput
from mlx_cb.core.ssd_tier import SsdTier

#: Least part of a block that is copied rather than computed again.
WORTH_COPYING = 0.25


@dataclass(slots=True)
class PrefixStats:
    """Requests and tokens looked for, and what was found, since start."""

    queries: int = 0
    hits: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Part of the tokens that were found, 0 to 1."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    def as_dict(self) -> dict[str, int | float]:
        """JSON-ready, with what follows from the counts."""
        misses = self.queries - self.hits
        return asdict(self) | {"misses": misses, "hit_rate": round(self.hit_rate, 4)}

    def count(self, num_tokens: int, num_found: int) -> None:
        """One request of `num_tokens` found this many of them."""
        self.queries += 1
        self.hits += num_found > 0
        self.queried_tokens += num_tokens
        self.hit_tokens += num_found


def prefix_salt(user: str, group: str, kv_dtype: str) -> bytes:
    """What a text's first hash begins with: nobody finds what another user has asked.

    Members of a group that the operator made find each other's. What is stored in another form is
    another content.
    """
    owner = f"group {group}" if group else f"user {user}"
    return f"{kv_dtype}\0{owner}".encode()


def shared_salt(kv_dtype: str) -> bytes:
    """What the first hash of a text begins with that begins with a prompt marked as shared."""
    return f"{kv_dtype}\0everyone".encode()


class KVCacheManager:
    """Block tables of all requests over one pool.

    With `checkpoints` a prefix is usable only up to a border whose state was saved there; `keeps`
    says whether layers that drop old blocks still have what comes before so many tokens of these
    blocks. What `tier` holds comes back to a request once it is admitted.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        prefix_cache: bool,
        checkpoints: Checkpoints | None = None,
        keeps: Callable[[Sequence[int], int], bool] = lambda *_: True,
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
        self._waits = PrefixWaits()
        self.forget_stats()

    def forget_stats(self) -> None:
        """Begin to count anew."""
        self.stats = PrefixStats()
        self.stats_by_user: defaultdict[str, PrefixStats] = defaultdict(PrefixStats)

    def counts_by_user(self) -> dict[str, dict[str, int | float]]:
        """What each user looked for, found and lost to others, JSON-ready."""
        lost = self.pool.evictions_by_user
        return {
            user: stats.as_dict() | {"evictions": lost[user]}
            for user, stats in self.stats_by_user.items()
        }

    @property
    def num_checkpoints(self) -> int:
        """States saved at block borders."""
        return 0 if self.checkpoints is None else len(self.checkpoints)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def num_resident_tokens(self, request: Request) -> int:
        """Tokens of a request that need no computing as things are."""
        return len(self._find_prefix(request)) * self.block_size

    def room_beside(self, request: Request) -> tuple[int, int]:
        """Blocks of the request that are known already, and blocks there are for the others."""
        hits = self._find_prefix(request)
        revived = sum(1 for block_id in hits if not self.pool.is_referenced(block_id))
        return len(hits), self.pool.num_available - revived

    def in_the_making(self, request: Request) -> SharedPrefix | None:
        """Blocks that the request would go on with and that another one is computing now."""
        shared = self._waits.known(request)
        if shared is not None or not self._may_share(request):
            return shared
        known = self._find_blocks(request)
        shared = self._waits.find(request, len(known), self.block_size)
        if shared is None:
            return None
        if self.checkpoints is not None:
            # Useful only with a state behind the shared part, which is saved on the way.
            provider = shared.request
            if not self.checkpoints.capacity or provider.num_computed_tokens >= shared.num_tokens:
                return None
            borders = {*provider.checkpoint_tokens, shared.num_tokens}
            provider.checkpoint_tokens = tuple(sorted(borders))
        self._waits.wait(request, shared)
        return shared

    def note_parting(self, request: Request) -> None:
        """A request waits that may share what is being computed: a state must be saved in time."""
        if self.checkpoints is not None and request.status is not RequestStatus.RUNNING:
            self.in_the_making(request)

    def take_prefix(self, request: Request) -> int:
        """Share the blocks of the longest known prefix; returns the tokens that need no computing.

        At least the last token is left to compute, because its logits are needed. What follows the
        full blocks and is known from a block that begins alike comes with `request.copy_from`.
        """
        assert not request.block_table
        hits = self._find_prefix(request)
        if self.checkpoints is not None and self.prefix_cache:
            self._take_checkpoint(request, self.checkpoints, len(hits))
        self.pool.share(hits)
        request.block_table = hits
        request.num_hashed_blocks = len(hits)
        request.num_computed_tokens = len(hits) * self.block_size + self._find_rest(request, hits)
        if self.prefix_cache:
            self._waits.expect(request, len(hits), (request.num_tokens - 1) // self.block_size)
        for stats in (self.stats, self.stats_by_user[request.user]):
            stats.count(request.num_tokens, request.num_computed_tokens)
        return request.num_computed_tokens

    def hashes_to_restore(self, request: Request) -> tuple[list[bytes], int]:
        """Content hashes of an admitted request's full blocks, and how many of these it has.

        The last token is left to compute, because its logits are needed.
        """
        if not self._may_share(request):
            return [], 0
        num_full = (request.num_tokens - 1) // self.block_size
        return self._hashes(request, num_full)[:num_full], len(request.block_table)

    def drop_uncomputed_blocks(self, request: Request) -> None:
        """Give back the blocks behind those that a request can go on from."""
        num_blocks = self.num_blocks_for(request.num_computed_tokens)
        self.pool.free(request.block_table[num_blocks:])
        del request.block_table[num_blocks:]

    def keep_full_blocks(self, request: Request) -> None:
        """Take back the promise of a part of a block: the whole one comes from elsewhere."""
        request.copy_from = None
        num_full = len(request.block_table) * self.block_size
        self.count_found(request, num_full - request.num_computed_tokens)
        request.num_computed_tokens = num_full

    def count_found(self, request: Request, num_tokens: int) -> None:
        """So many more tokens (or fewer) of an admitted request need no computing."""
        for stats in (self.stats, self.stats_by_user[request.user]):
            stats.hit_tokens += num_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens += num_tokens

    def _find_rest(self, request: Request, hits: list[int]) -> int:
        """Tokens behind the hits to be copied from another block, which `copy_from` names."""
        request.copy_from = None
        if not self._may_share(request) or self.checkpoints is not None:
            return 0
        start = len(hits) * self.block_size
        count = min(self.block_size, request.num_tokens - 1 - start)
        wanted = self._tokens(request, len(hits), count)
        block_id, count = self.pool.find_beginning(self._parent(request, len(hits)), wanted)
        if count < WORTH_COPYING * self.block_size or not count:
            return 0
        if not self._keeps([*hits, block_id], start + count):
            return 0
        request.copy_from = block_id
        return count

    def _take_checkpoint(self, request: Request, checkpoints: Checkpoints, num_hits: int) -> None:
        """Hand over the state behind the hits, and name the borders worth a state of their own.

        Those are where the known text ends, where it leaves a text that is in the blocks, and where
        it leaves a marked prompt: the next request that shares as much can then go on from there.
        """
        hashes = request.block_hashes
        request.resume_state = checkpoints.load(hashes[num_hits - 1]) if num_hits else None
        known = self._find_blocks(request)
        num_full = (request.num_tokens - 1) // self.block_size
        self._hashes(request, num_full)
        marked = min(request.num_shared_blocks, num_full)
        borders = {border for border in (len(known), marked, num_full) if border > num_hits}
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
        """Give back every block; what was written into them stays findable until it is needed."""
        written = min(request.num_computed_tokens, request.num_tokens)
        self._waits.settle(request, request.num_hashed_blocks, len(request.block_hashes))
        self._waits.leave(request)
        if request.copy_from is None:
            self.remember_rest(request, written)
        self.pool.free(request.block_table)
        request.block_table = []
        request.num_hashed_blocks = 0
        request.num_computed_tokens = 0
        request.resume_state = None
        request.copy_from = None
        request.border_state = None

    def remember(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` (written, and known) findable."""
        num_full = num_tokens // self.block_size
        if num_full <= request.num_hashed_blocks or not self.prefix_cache:
            return
        hashes = self._hashes(request, num_full)
        first = request.num_hashed_blocks
        for index in range(first, num_full):
            content = Content(
                self._parent(request, index),
                self._tokens(request, index, self.block_size),
                hashes[index],
                request.user,
            )
            self.pool.remember(request.block_table[index], content)
            if self.tier is not None:
                self.tier.note(hashes[index])
        self._waits.settle(request, first, num_full)
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

    def remember_rest(self, request: Request, num_tokens: int) -> None:
        """Make what is behind the full blocks of the first `num_tokens` findable.

        The request may go on to write behind it: nobody reads further than was remembered.
        """
        index, count = divmod(num_tokens, self.block_size)
        if not (count and self._may_share(request)) or index != request.num_hashed_blocks:
            return
        tokens = self._tokens(request, index, count)
        content = Content(self._parent(request, index), tokens, None, request.user)
        self.pool.remember(request.block_table[index], content)

    def _tokens(self, request: Request, index: int, count: int) -> array[int]:
        start = index * self.block_size
        return array("i", request.token_ids[start : start + count])

    def _parent(self, request: Request, index: int) -> bytes:
        """Hash of everything before block `index`.

        The user's salt comes in where his own text begins: before the first block, or behind the
        blocks that everybody may share.
        """
        if index != request.num_shared_blocks:
            return request.block_hashes[index - 1] if index else request.shared_salt
        if not index:
            return request.cache_salt
        salted = request.cache_salt + b"\0behind " + request.block_hashes[index - 1]
        return hashlib.blake2b(salted, digest_size=16).digest()

    def _may_share(self, request: Request) -> bool:
        return self.prefix_cache and request.params.prompt_logprobs is None

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
        return self._keeps(hits, len(hits) * self.block_size)

    def _find_blocks(self, request: Request) -> list[int]:
        if not self._may_share(request):
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
        for index in range(len(hashes), num_full):
            digest = hashlib.blake2b(self._parent(request, index), digest_size=16)
            digest.update(self._tokens(request, index, self.block_size).tobytes())
            hashes.append(digest.digest())
        return hashes

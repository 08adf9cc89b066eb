"""A stand-in for storage, SSD and model that knows what every slot of every block must hold.

A slot holds the hash of its user and of all tokens up to its own: reading a wrong slot, a stale
one, or another user's is noticed at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import count

from mlx_cb.config import SchedulerConfig
from mlx_cb.core.block_pool import BlockPool
from mlx_cb.core.kv_cache_manager import KVCacheManager
from mlx_cb.core.outputs import RequestOutput, SampledToken
from mlx_cb.core.request import Request
from mlx_cb.core.scheduler import Scheduler
from mlx_cb.core.scheduler_output import SchedulerOutput
from mlx_cb.core.ssd_tier import BlockContent, SsdLimits, SsdTier
from mlx_cb.sampling_params import SamplingParams

BLOCK_SIZE = 4
LIMITS = SsdLimits(min_restore_blocks=1, max_staged_blocks=3, stores_per_step=2, patience_s=1.0)


def slots(user: str, token_ids: Sequence[int]) -> list[int]:
    """What the slots of a user's tokens must hold: each depends on everything before it."""
    values, value = [], zlib.crc32(user.encode())
    for token_id in token_ids:
        value = zlib.crc32(token_id.to_bytes(4, "big"), value)
        values.append(value)
    return values


def next_token(user: str, token_ids: Sequence[int]) -> int:
    """What the model says after these tokens."""
    return slots(user, token_ids)[-1] % 50


class World:
    """A scheduler with a tier, and everything that its plans are carried out on."""

    def __init__(self, num_blocks: int, **config: object) -> None:
        ticks = count()
        self.disk: dict[bytes, list[int | None]] = {}
        self.asked: list[bytes] = []
        self.staged: dict[bytes, list[int | None]] = {}
        self.blocks: dict[int, list[int | None]] = {}
        self.tier = SsdTier(LIMITS)
        kv_cache = KVCacheManager(
            BlockPool(num_blocks), BLOCK_SIZE, prefix_cache=True, tier=self.tier
        )
        settings = {"max_num_batched_tokens": 12, "max_num_seqs": 5} | config
        self.scheduler = Scheduler(
            SchedulerConfig(**settings), kv_cache, clock=lambda: next(ticks) * 1e-3
        )
        self.scheduler.growth.output_tokens = 0.0  # lets in more than will fit
        self.answers: dict[str, list[int]] = {}
        self.prompts: dict[str, tuple[str, list[int], int]] = {}
        self.in_flight: SchedulerOutput | None = None
        self.unread: dict[str, int] = {}
        self.num_stored = 0
        self.num_copied = 0

    def add(self, name: str, prompt: list[int], output: int, user: str = "ann") -> Request:
        """A new request."""
        request = Request(
            request_id=name,
            token_ids=list(prompt),
            params=SamplingParams(max_tokens=output),
            max_output_tokens=output,
            eos_token_ids=frozenset(),
            seed=0,
            user=user,
            cache_salt=user.encode(),
            arrival_time=float(len(self.prompts)),
        )
        self.prompts[name] = (user, prompt, output)
        self.answers[name] = []
        self.scheduler.add(request)
        return request

    def deliver(self, most: int = 100, *, lose: bool = False) -> None:
        """Some of the blocks that were asked for have been read, or are not there."""
        arriving, self.asked = self.asked[:most], self.asked[most:]
        for content_hash in arriving:
            content = None if lose else self.disk.get(content_hash)
            if content is None:
                self.disk.pop(content_hash, None)
                self.tier.miss(content_hash)
            elif self.tier.arrive(content_hash):
                self.staged[content_hash] = content

    def lose(self, content_hash: bytes) -> None:
        """The disk has deleted a block to make room."""
        del self.disk[content_hash]
        self.tier.gone(content_hash)

    def idle(self, most: int = 3) -> None:
        """Write some blocks behind."""
        orders = self.tier.write_behind(self.scheduler.kv_cache.pool.find, most)
        self._store(orders)

    def _store(self, orders: Sequence[BlockContent]) -> None:
        self.num_stored += len(orders)
        for order in orders:
            self.disk[order.content_hash] = list(self.blocks[order.block_id])

    def step(self) -> None:
        """Form a step, carry it out, take in what it chose."""
        plan = self.launch()
        if not plan.is_empty:
            self.collect(plan)

    def step_ahead(self) -> None:
        """Launch a step before the last one's tokens are read."""
        previous, self.in_flight = self.in_flight, None
        plan = self.launch()
        self.in_flight = None if plan.is_empty else plan
        if previous is not None:
            self.collect(previous)

    def launch(self) -> SchedulerOutput:
        """Carry out the orders of a plan, then its rows: each reads all slots before its own."""
        plan = self.scheduler.schedule()
        self._store(plan.stores)
        self.asked += plan.fetches
        contents = {o.block_id: self.staged.pop(o.content_hash) for o in plan.restores}
        self.blocks |= {block_id: list(content) for block_id, content in contents.items()}
        copied = {copy.target: list(self.blocks[copy.source]) for copy in plan.copies}
        self.blocks |= copied
        self.num_copied += len(copied)
        self.staged = {h: c for h, c in self.staged.items() if self.tier.is_staged(h)}
        spans = [(r, r.num_computed_tokens - 1, r.num_computed_tokens) for r in plan.decodes]
        spans += [(c.request, c.start, c.start + c.num_tokens) for c in plan.prefills]
        for request, start, stop in spans:
            self._run(request, start, stop)
        return plan

    def _run(self, request: Request, start: int, stop: int) -> None:
        tokens = list(request.token_ids)
        if request.request_id in self.unread:
            tokens.append(self.unread.pop(request.request_id))
        assert stop <= len(tokens), "a row for a token that nobody knows"
        wanted = slots(request.user, tokens[:stop])
        for position in range(start, stop):
            self._block(request, position)[position % BLOCK_SIZE] = wanted[position]
        for position in range(stop):
            found = self._block(request, position)[position % BLOCK_SIZE]
            assert found == wanted[position], f"{request.request_id}: a wrong slot at {position}"
        if stop == len(tokens):
            self.unread[request.request_id] = next_token(request.user, tokens)

    def _block(self, request: Request, position: int) -> list[int | None]:
        block_id = request.block_table[position // BLOCK_SIZE]
        return self.blocks.setdefault(block_id, [None] * BLOCK_SIZE)

    def collect(self, plan: SchedulerOutput) -> None:
        """Read what a launched step has chosen."""
        sampled = []
        for request in plan.sampling():
            user, tokens = request.user, request.token_ids
            sampled.append(SampledToken(next_token(user, tokens)))
        self.take(self.scheduler.update(plan, sampled, 0.01))

    def take(self, outputs: list[RequestOutput]) -> None:
        """Add outputs to the answers; what is unread of an ended request is void."""
        for output in outputs:
            self.answers[output.request_id] += output.token_ids
        known = self.scheduler.requests
        for name in list(self.unread):
            if name not in known or known[name].num_in_flight == 0:
                del self.unread[name]

    def finish(self, most_steps: int = 3000) -> None:
        """Run until nothing is left; every answer must be the one of a request alone."""
        for _ in range(most_steps):
            if not self.scheduler.has_work and self.in_flight is None:
                break
            self.deliver()
            self.step_ahead() if self.in_flight is not None else self.step()
            self.check()
        assert not self.scheduler.has_work, "requests are stuck"
        self.check()

    def check(self) -> None:
        """Every block accounted for, every held content on the disk or on its way."""
        self.scheduler.check_integrity()
        for name, answer in self.answers.items():
            user, prompt, output = self.prompts[name]
            tokens = list(prompt)
            for token_id in answer:
                assert token_id == next_token(user, tokens), f"{name} got a wrong token"
                tokens.append(token_id)
            assert len(answer) <= output
        assert len(self.staged) <= LIMITS.max_staged_blocks

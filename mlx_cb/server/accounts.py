"""The limits of each user at work: how many answers at once, how many tokens a day.

Owns who has which answers open, and hands what they took to `Usage`. An answer that was begun is
finished even when it passes the day's limit. Knows nothing about keys or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from mlx_cb.errors import InvalidRequest, Overloaded
from mlx_cb.server.generation import Generation
from mlx_cb.server.usage import Taken, Usage, next_day
from mlx_cb.server.users import User


class DayUsedUp(Overloaded):
    """The user has had the tokens of a day."""

    code = "insufficient_quota"


SMOOTHING = 0.2  # weight of a new measurement


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds for every user.

    Attributes:
        longest_wait_s: that an answer waits for a place among its user's.
        max_queued: generations of one user that may wait for their first token; None for any.
    """

    longest_wait_s: float
    max_queued: int | None = None


@dataclass(slots=True)
class _Open:
    """One user's open answers, and those that wait for a place, first come first served."""

    generations: set[Generation] = field(default_factory=set)
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    running: int = 0

    @property
    def queued(self) -> int:
        """Generations without a first token."""
        begun = sum(g.places for g in self.generations if g.first_token_s is None)
        return begun + sum(size for size, turn in self.waiting if not turn.done())

    def wake(self, limit: int | None) -> None:
        """Let as many in as there are places for."""
        while self.waiting:
            size, turn = self.waiting[0]
            if not turn.done():
                if limit is not None and self.running + size > limit:
                    return
                self.running += size
                turn.set_result(None)
            self.waiting.popleft()

    def give_up(self, size: int, turn: asyncio.Future[None], limit: int | None) -> None:
        """Leave nothing of a wait that was ended, not even a place granted that instant."""
        if turn.done() and not turn.cancelled():
            self.running -= size
        turn.cancel()
        self.wake(limit)


class Accounts:
    """All users' open answers."""

    def __init__(self, usage: Usage, limits: Limits) -> None:
        self.usage = usage
        self._limits = limits
        self._open: dict[str, _Open] = {}
        self._first_token_s = 1.0  # moving average over all users

    @contextlib.asynccontextmanager
    async def place_for(self, user: User, generation: Generation) -> AsyncIterator[None]:
        """Hold a place while an answer is made, and record what it took.

        Raises DayUsedUp, Overloaded for too long a queue or wait, DeadlineExceeded, InvalidRequest
        for more choices than the user may ever have at once.
        """
        await self._check_day(user)
        mine = self._open.setdefault(user.name, _Open())
        size = generation.places
        try:
            self._check_queue(user, mine, size)
            await self._enter(user, mine, generation)
            started = time.monotonic()
            mine.generations.add(generation)
            try:
                yield
            finally:
                mine.running -= size
                mine.generations.discard(generation)
                if (first := generation.first_token_s) is not None:
                    self._first_token_s += SMOOTHING * (first - self._first_token_s)
                self._record(user.name, generation, time.monotonic() - started)
                mine.wake(user.max_running)
        finally:
            if not mine.generations and not mine.waiting and not mine.running:
                self._open.pop(user.name, None)

    def _check_queue(self, user: User, mine: _Open, size: int) -> None:
        caps = {
            f"max_queued of {user.name}": user.max_queued,
            "--max-queued-per-user of this server": self._limits.max_queued,
        }
        known = {name: most for name, most in caps.items() if most is not None}
        if not known:
            return
        name = min(known, key=lambda name: known[name])
        queued, most = mine.queued, known[name]
        if queued + size <= most:
            return
        # The queue moves on by one in the time that one waits, divided by those who wait.
        raise Overloaded(
            f"{queued} requests of {user.name} wait for their first token and at most {most} may "
            f"({name}); try again when one of them has begun",
            retry_after=max(1.0, self._first_token_s / max(1, queued)),
        )

    async def _check_day(self, user: User) -> None:
        if user.daily_tokens is None:
            return
        used = await self.tokens_today(user.name)
        if used < user.daily_tokens:
            return
        now = self.usage.clock()
        reset = next_day(now)
        raise DayUsedUp(
            f"{user.name} has used {used} of {user.daily_tokens} tokens of today; there are new "
            f"ones at {reset.isoformat(timespec='minutes')}",
            retry_after=(reset - now).total_seconds(),
        )

    def waiting(self) -> dict[str, int]:
        """How many answers wait because their user has as many open as he may, by user."""
        return {name: len(own.waiting) for name, own in self._open.items() if own.waiting}

    async def tokens_today(self, name: str) -> int:
        """Tokens recorded today, and those of answers that are still open."""
        recorded = await self.usage.tokens_today(name)
        mine = self._open.get(name)
        usages = [g.usage for g in mine.generations] if mine is not None else []
        return recorded + sum(u.prompt_tokens + u.completion_tokens for u in usages)

    async def _enter(self, user: User, mine: _Open, generation: Generation) -> None:
        limit, size = user.max_running, generation.places
        if limit is not None and size > limit:
            raise InvalidRequest(
                f"{size} choices at once are more than the {limit} that {user.name} may have",
                param="n",
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine.waiting.append((size, turn))
        mine.wake(limit)
        has_place = False
        longest = self._limits.longest_wait_s
        try:
            left = generation.remaining_s()
            await asyncio.wait_for(asyncio.shield(turn), min(longest, left or longest))
            has_place = True
        except TimeoutError:
            generation.remaining_s()  # raises when it was the client's own time that is over
            raise Overloaded(
                f"{user.name} has {limit} answers open, the most that are made at once; "
                f"this one waited {longest:.0f} s",
                retry_after=5.0,
            ) from None
        finally:
            if not has_place:
                mine.give_up(size, turn, limit)

    def _record(self, name: str, generation: Generation, seconds: float) -> None:
        if not generation.was_started:
            return
        usage = generation.usage
        self.usage.record(
            Taken(
                self.usage.clock().date().isoformat(),
                name,
                1,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                seconds,
            )
        )

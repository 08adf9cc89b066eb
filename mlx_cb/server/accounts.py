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


@dataclass(slots=True)
class _Open:
    """One user's open answers, and those that wait for a place, first come first served."""

    generations: set[Generation] = field(default_factory=set)
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    running: int = 0

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

    def __init__(self, usage: Usage, longest_wait_s: float) -> None:
        self.usage = usage
        self._longest_wait_s = longest_wait_s
        self._open: dict[str, _Open] = {}

    @contextlib.asynccontextmanager
    async def place_for(self, user: User, generation: Generation) -> AsyncIterator[None]:
        """Hold a place while an answer is made, and record what it took.

        Raises DayUsedUp, Overloaded after too long a wait, InvalidRequest for more choices than
        the user may ever have at once.
        """
        await self._check_day(user)
        mine = self._open.setdefault(user.name, _Open())
        size = generation.places
        try:
            await self._enter(user, mine, size)
            started = time.monotonic()
            mine.generations.add(generation)
            try:
                yield
            finally:
                mine.running -= size
                mine.generations.discard(generation)
                self._record(user.name, generation, time.monotonic() - started)
                mine.wake(user.max_running)
        finally:
            if not mine.generations and not mine.waiting and not mine.running:
                self._open.pop(user.name, None)

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

    async def _enter(self, user: User, mine: _Open, size: int) -> None:
        limit = user.max_running
        if limit is not None and size > limit:
            raise InvalidRequest(
                f"{size} choices at once are more than the {limit} that {user.name} may have",
                param="n",
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine.waiting.append((size, turn))
        mine.wake(limit)
        has_place = False
        try:
            await asyncio.wait_for(asyncio.shield(turn), self._longest_wait_s)
            has_place = True
        except TimeoutError:
            raise Overloaded(
                f"{user.name} has {limit} answers open, the most that are made at once; "
                f"this one waited {self._longest_wait_s:.0f} s",
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

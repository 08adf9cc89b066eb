"""What a user is entitled to beside others: travels with each request to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """A user's part of a busy machine.

    Attributes:
        weight: seconds of the machine that the user gets for each second of a user of weight 1.
        rank: who waits with a lower rank goes first, whatever was served; 0 for people who wait,
            1 for work that nobody waits for.
        cache_group: users of one group find each other's prefixes in the cache; empty for nobody's
            but one's own.
    """

    weight: float = 1.0
    rank: int = 0
    cache_group: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight must be above 0, not {self.weight}")


EQUAL = Standing()

#: What a rank is called where people write it.
CLASSES = {"interactive": 0, "batch": 1}

"""What happens when blocks run short, rung by rung, and who has to give way.

Evict what nobody uses, stop admitting, then take the blocks of a running request: with an SSD tier
its content is written there and comes back, without one what was overwritten is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mlx_cb.core.request import Request


@dataclass(slots=True)
class Ladder:
    """Who had to give way since start, and what it cost.

    Attributes:
        stopped_admissions: steps in which somebody waited for blocks.
        gave_way: times that a running request's blocks were taken.
        recomputed_tokens: tokens that were computed once more because of that.
    """

    stopped_admissions: int = 0
    gave_way: int = 0
    recomputed_tokens: int = 0

    def take_from(self, victim: Request) -> None:
        """A running request loses its blocks."""
        self.gave_way += 1
        victim.most_computed_tokens = max(victim.most_computed_tokens, victim.num_computed_tokens)

    def compute(self, request: Request, start: int, stop: int) -> None:
        """Tokens `start` to `stop` of a request are to be computed, some of them again."""
        self.recomputed_tokens += max(0, min(stop, request.most_computed_tokens) - start)


def admission_order(request: Request) -> tuple[float, float, str]:
    """Seniority: who was admitted first, also after having given way."""
    return (request.admitted_time or 0.0, request.arrival_time, request.request_id)


def choose_victim(
    candidates: Sequence[Request],
    running: Iterable[Request],
    charged: Callable[[str], float],
) -> Request | None:
    """The youngest of the user who was served most, never the oldest that a user has running.

    When everyone has but one, the youngest of all goes. `candidates` are those of `running` that
    may go now; None when others have to go first. `charged` is what a user was served.
    """
    running = list(running)
    oldest: dict[str, Request] = {}
    for request in running:
        best = oldest.setdefault(request.user, request)
        if admission_order(request) < admission_order(best):
            oldest[request.user] = request
    spare = [request for request in candidates if oldest[request.user] is not request]
    if not spare and len(oldest) < len(running):
        return None
    if not spare:
        return max(candidates, key=admission_order)
    most = max(charged(request.user) for request in spare)
    return max((r for r in spare if charged(r.user) >= most), key=admission_order)

"""The life of one scripted reply, and which replies an operator holds back."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from mlx_cb.engine.interface import Order, Verb
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.standing import EQUAL, Standing


@dataclass(slots=True)
class Played:
    """The life of one request; times in seconds since the epoch."""

    request_id: str
    user: str
    num_prompt_tokens: int
    params: SamplingParams
    queued_at: float
    standing: Standing = EQUAL
    status: str = "waiting"
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    finish_reason: str | None = None
    num_tokens: int = 0
    ends_at: float | None = None
    is_cancelled: bool = False

    @property
    def is_late(self) -> bool:
        """True from the deadline on."""
        return self.ends_at is not None and time.time() >= self.ends_at


class Orders:
    """What an operator has ordered and not taken back."""

    def __init__(self) -> None:
        self._paused: list[Order] = []
        self._is_frozen = False

    def take(self, order: Order) -> None:
        """Note an order; cancelling is over at once and not noted."""
        match order.verb:
            case Verb.FREEZE | Verb.UNFREEZE:
                self._is_frozen = order.verb is Verb.FREEZE
            case Verb.PAUSE_USER | Verb.PAUSE_REQUEST:
                self._paused.append(order)
            case Verb.RESUME_USER | Verb.RESUME_REQUEST:
                self._paused = [
                    other
                    for other in self._paused
                    if other.target != order.target or other.verb.undone_by is not order.verb
                ]

    def hold(self, played: Played) -> bool:
        """Whether this reply stands still."""
        return any(order.means(played.request_id, played.user) for order in self._paused)

    def as_dict(self) -> dict[str, Any]:
        """In the form of a real engine's control, which has more to say."""
        return {
            "frozen": self._is_frozen,
            "in_force": [],
            "records": [],
            "restraint": {
                "paused_users": [o.target for o in self._paused if o.verb is Verb.PAUSE_USER],
                "paused_requests": [o.target for o in self._paused if o.verb is Verb.PAUSE_REQUEST],
            },
        }

"""What is held back at the moment, by the control loop or by an operator. Plain state.

All off means that the policy alone decides. Knows nothing about why something is held back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlx_cb.core.request import Request


@dataclass(slots=True)
class Restraint:
    """Read by the scheduler at every step.

    Attributes:
        prefill_share: part of a step's room for prefill that is used; never below one quantum.
        admits: False lets nobody join while anything runs.
        one_at_a_time: True lets a request join only when nothing runs.
        batch_paused: True lets nobody of a higher rank than 0 join while anything runs.
        held_users: go after everyone else, but do go when nobody else wants anything.
        paused_users, paused_requests: do not go at all until an operator says so.
    """

    prefill_share: float = 1.0
    admits: bool = True
    one_at_a_time: bool = False
    batch_paused: bool = False
    held_users: set[str] = field(default_factory=set)
    paused_users: set[str] = field(default_factory=set)
    paused_requests: set[str] = field(default_factory=set)

    def is_paused(self, request: Request) -> bool:
        """True for what an operator has paused, a request's further choices included."""
        if not (self.paused_users or self.paused_requests):
            return False
        own_id = request.request_id
        return (
            request.user in self.paused_users
            or own_id in self.paused_requests
            or own_id.partition("-")[0] in self.paused_requests
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "prefill_share": self.prefill_share,
            "admits": self.admits,
            "one_at_a_time": self.one_at_a_time,
            "batch_paused": self.batch_paused,
            "held_users": sorted(self.held_users),
            "paused_users": sorted(self.paused_users),
            "paused_requests": sorted(self.paused_requests),
        }

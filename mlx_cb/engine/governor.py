"""Hooks the control loop to one scheduler: when it looks, what operators order, what is logged.

Owns the time between two looks and the carrying out of orders. The thresholds and decisions are
`core.control`'s, the measuring `core.signs`'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mlx_cb.core.control import Control
from mlx_cb.core.scheduler import Scheduler
from mlx_cb.core.scheduler_output import SchedulerOutput
from mlx_cb.core.signs import Watch
from mlx_cb.engine.interface import Order, Verb

LOOK_EVERY_S = 1.0

log = logging.getLogger("mlx_cb.control")


class Governor:
    """The control of one engine."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._restraint = scheduler.entrance.restraint
        self.control = Control(self._restraint, is_frozen=scheduler.config.control == "frozen")
        self._watch = Watch(scheduler)
        self._looked = clock()

    def saw(self, plan: SchedulerOutput) -> None:
        """A step's tokens were read; call it when the scheduler has taken them in."""
        now = self._clock()
        self._watch.saw(plan, now)
        if now - self._looked >= LOOK_EVERY_S:
            self._look(now)

    def failed(self) -> None:
        """A step went wrong."""
        now = self._clock()
        self._watch.failed(now)
        self._look(now)

    def forget_past(self) -> None:
        """Begin anew: what was seen while warming up is nobody's trouble."""
        self._watch = Watch(self._scheduler)

    def _look(self, now: float) -> None:
        self._looked = now
        self._forget_ended(now)
        for act in self.control.look(self._watch.read(now)):
            log.warning("control: %s", act)

    def _forget_ended(self, now: float) -> None:
        """A pause of a request ends with the request."""
        here = {request_id.partition("-")[0] for request_id in self._scheduler.requests}
        for target in [
            t for t in self._restraint.paused_requests if t.partition("-")[0] not in here
        ]:
            self._restraint.paused_requests.discard(target)
            for act in self.control.in_force:
                if act.action == Verb.PAUSE_REQUEST.value and act.target == target:
                    act.ended, act.ended_because = now, "the request has ended"

    def order(self, order: Order) -> list[str]:
        """Carry out an operator's order; returns the ids of requests that are to be ended."""
        now = self._clock()
        control, verb, target = self.control, order.verb, order.target
        if verb in (Verb.RESUME_USER, Verb.RESUME_REQUEST, Verb.UNFREEZE):
            self._end(order, now)
        elif not self._is_in_force(order):
            act = control.note(verb.value, target, "the operator said so", now=now, by=order.by)
            if verb.is_cancel:
                act.ended, act.ended_because = now, "done"
            log.warning("control: %s", act)
        self._carry_out(order)
        if verb.is_cancel:
            requests = self._scheduler.requests.values()
            return [r.request_id for r in requests if order.means(r.request_id, r.user)]
        return []

    def _carry_out(self, order: Order) -> None:
        restraint, target = self._restraint, order.target
        match order.verb:
            case Verb.FREEZE:
                self.control.is_frozen = True
            case Verb.UNFREEZE:
                self.control.is_frozen = False
            case Verb.PAUSE_USER:
                restraint.paused_users.add(target)
                self._scheduler.preempt_paused()
            case Verb.PAUSE_REQUEST:
                restraint.paused_requests.add(target)
                self._scheduler.preempt_paused()
            case Verb.RESUME_USER:
                restraint.paused_users.discard(target)
            case Verb.RESUME_REQUEST:
                restraint.paused_requests.discard(target)

    def _is_in_force(self, order: Order) -> bool:
        return any(
            act.action == order.verb.value and act.target == order.target
            for act in self.control.in_force
        )

    def _end(self, order: Order, now: float) -> None:
        for act in self.control.in_force:
            begun = next(verb for verb in Verb if verb.undone_by is order.verb)
            if act.action == begun.value and act.target == order.target:
                act.ended, act.ended_because = now, f"{order.by} said so"
                log.warning("control: %s", act)

    def as_dict(self) -> dict[str, Any]:
        """The control's state, looked at anew; JSON-ready. `now` is on the clock of its times."""
        now = self._clock()
        self._look(now)
        return {**self.control.as_dict(), "now": now}

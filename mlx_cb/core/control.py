"""The control loop: early signs go in, what is held back comes out, and every act is explained.

Pure logic over `Signs` and a `Restraint`; no clock, no scheduler. Each rule has an owner, a
threshold at which it acts and a lower one at which its acts are undone, one at a time, after a calm
that grows when the same trouble comes back: so it does not flap. What is done is recorded with its
cause, with what was not done instead, and with when and why it was undone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from mlx_cb.core.restraint import Restraint
from mlx_cb.core.signs import Signs

PATIENCE_S = 5.0  # how long an act is given to help before the next one is tried
CALM_S = 10.0  # how long a sign must stay low before an act is undone
LONGEST_CALM_S = 320.0
RELAPSE_S = 120.0  # the same trouble within this time after an undoing doubles the calm
LONGEST_S = 900.0  # no act lasts longer; if it is still needed the sign will say so
SMALLEST_SHARE = 0.125  # of a step's room for prefill
KEPT = 100  # records


class Action(Enum):
    """What the control may do, from mild to harsh."""

    SMALLER_QUANTUM = "smaller prefill quantum"
    PAUSE_BATCH = "batch class paused"
    HOLD_USER = "most served user held back"
    PAUSE_ADMISSION = "admission paused"
    ONE_AT_A_TIME = "one at a time"


@dataclass(frozen=True, slots=True)
class Rule:
    """A sign, who owns what it measures, its thresholds, and what may be done, mildest first."""

    sign: str
    unit: str
    owner: str
    measure: Callable[[Signs], float | None]
    begins_at: float
    ends_at: float
    holds_s: float
    ladder: tuple[Action, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "sign": self.sign,
            "unit": self.unit,
            "owner": self.owner,
            "begins_at": self.begins_at,
            "ends_at": self.ends_at,
            "holds_s": self.holds_s,
            "actions": [action.value for action in self.ladder],
        }


RULES = (
    Rule(
        "token gap p99 over the allowed gap", "x", "core.token_budget",
        lambda signs: signs.gap_ratio, 2.0, 1.2, 2.0,
        (Action.SMALLER_QUANTUM, Action.PAUSE_BATCH, Action.PAUSE_ADMISSION),
    ),
    Rule(
        "longest stall over the allowed gap", "x", "core.scheduler",
        lambda signs: signs.stall_ratio, 20.0, 5.0, 0.0,
        (Action.SMALLER_QUANTUM, Action.PAUSE_BATCH, Action.PAUSE_ADMISSION),
    ),
    Rule(
        "wait of a neglected user", "s", "core.policy",
        lambda signs: signs.longest_neglect_s, 5.0, 1.0, 0.0,
        (Action.PAUSE_BATCH, Action.HOLD_USER),
    ),
    Rule(
        "unfairness, 1 - Jain index", "", "core.policy",
        lambda signs: None if signs.jain is None else 1 - signs.jain, 0.3, 0.1, 5.0,
        (Action.HOLD_USER,),
    ),
    Rule(
        "preemptions", "1/s", "core.kv_cache_manager",
        lambda signs: signs.preemptions_per_s, 2.0, 0.2, 2.0,
        (Action.PAUSE_BATCH, Action.PAUSE_ADMISSION, Action.ONE_AT_A_TIME),
    ),
    Rule(
        "failed steps in a minute", "", "engine.core",
        lambda signs: float(signs.failed_steps), 3.0, 0.0, 0.0,
        (Action.ONE_AT_A_TIME,),
    ),
)  # fmt: skip


@dataclass(slots=True)
class Intervention:
    """One act, or the alarm when nothing could be done. Times of the scheduler's clock.

    Attributes:
        action: an `Action`'s name, an operator's order, or "alarm" when nothing was done.
        alternatives: what was not done, and why.
        by: `control`, or the operator's name.
        ended, ended_because: None and "" while it is in force.
    """

    number: int
    began: float
    action: str
    target: str
    cause: str
    alternatives: dict[str, str] = field(default_factory=dict)
    by: str = "control"
    ended: float | None = None
    ended_because: str = ""

    def __str__(self) -> str:
        of = f" ({self.target})" if self.target else ""
        if self.ended is not None:
            return f"{self.action}{of} undone: {self.ended_because}"
        others = "; ".join(f"not {name}: {why}" for name, why in self.alternatives.items())
        return f"{self.action}{of} by {self.by}, because {self.cause}" + (others and f" [{others}]")


@dataclass(slots=True)
class _State:
    """How one rule stands."""

    high_since: float | None = None
    calm_since: float | None = None
    acted: float | None = None
    undone: float | None = None
    calm_s: float = CALM_S
    alarm: Intervention | None = None
    in_force: list[Intervention] = field(default_factory=list)


class Control:
    """Acts on one scheduler's restraint. `look` is called every second or so."""

    def __init__(self, restraint: Restraint, *, is_frozen: bool = False) -> None:
        self.is_frozen = is_frozen
        self.records: deque[Intervention] = deque(maxlen=KEPT)
        self._begun: list[Intervention] = []  # an act in force may be older than the records
        self.signs: Signs | None = None
        self.num_acts: dict[str, int] = {action.value: 0 for action in Action}
        self._restraint = restraint
        self._states = [_State() for _ in RULES]
        self._number = 0

    def look(self, signs: Signs) -> list[Intervention]:
        """Act on what is seen; returns the records that are new, or that were ended now."""
        self.signs = signs
        changed: list[Intervention] = []
        for rule, state in zip(RULES, self._states, strict=True):
            value = rule.measure(signs)
            if value is not None and value >= rule.begins_at:
                changed += self._high(rule, state, value)
            elif value is None or value <= rule.ends_at:
                changed += self._calm(rule, state, value)
            else:
                state.high_since = state.calm_since = None
            changed += self._expire(rule, state)
        self._apply()
        return changed

    def _high(self, rule: Rule, state: _State, value: float) -> list[Intervention]:
        now = self._now
        state.calm_since = None
        if state.high_since is None:
            state.high_since = now
        lasted = now - state.high_since
        if lasted < rule.holds_s or (state.acted is not None and now - state.acted < PATIENCE_S):
            return []
        cause = (
            f"{rule.sign} is {_number(value)}{_unit(rule)}, at or above "
            f"{rule.begins_at:g}{_unit(rule)} for {lasted:.0f} s"
        )
        return self._act(rule, state, cause)

    def _act(self, rule: Rule, state: _State, cause: str) -> list[Intervention]:
        alternatives: dict[str, str] = {}
        chosen: Action | None = None
        for action in rule.ladder:
            if chosen is not None:
                alternatives[action.value] = f"harsher; follows if {PATIENCE_S:g} s do not help"
            elif reason := self._objection(action):
                alternatives[action.value] = reason
            else:
                chosen = action
        if chosen is None:
            if state.alarm is not None:
                return []
            now = self._now
            state.alarm = self.note("alarm", "", cause, now=now, alternatives=alternatives)
            return [state.alarm]
        assert self.signs is not None
        now = self._now
        if state.undone is not None and now - state.undone < RELAPSE_S and not state.in_force:
            state.calm_s = min(2 * state.calm_s, LONGEST_CALM_S)
        elif not state.in_force:
            state.calm_s = CALM_S
        target = (self.signs.most_served or "") if chosen is Action.HOLD_USER else ""
        act = self.note(chosen.value, target, cause, now=now, alternatives=alternatives)
        self.num_acts[chosen.value] += 1
        state.in_force.append(act)
        state.acted = now
        return [act]

    def _objection(self, action: Action) -> str:
        """Why an action would be of no use now; "" when it may be taken."""
        signs = self.signs
        assert signs is not None
        if self.is_frozen:
            return "the control is frozen"
        in_force = [act for state in self._states for act in state.in_force]
        names = {act.action for act in in_force}
        if action is Action.SMALLER_QUANTUM:
            if not signs.num_prefilled:
                return "nothing was prefilled lately"
            return "it is at its smallest" if self._prefill_share() <= SMALLEST_SHARE else ""
        if action is Action.PAUSE_BATCH and not signs.num_batch:
            return "nothing of the batch class is here"
        if action is Action.HOLD_USER:
            if signs.most_served is None:
                return "nobody has had far more than the fair share"
            held = {act.target for act in in_force if act.action == action.value}
            return f"{signs.most_served} is held back already" if signs.most_served in held else ""
        return "in force already" if action.value in names else ""

    def _calm(self, rule: Rule, state: _State, value: float | None) -> list[Intervention]:
        now = self._now
        state.high_since = None
        if state.calm_since is None:
            state.calm_since = now
        lasted = now - state.calm_since
        seen = "nothing to measure" if value is None else f"{_number(value)}{_unit(rule)}"
        because = (
            f"{rule.sign} ({seen}) has been at or below {rule.ends_at:g}{_unit(rule)} "
            f"for {lasted:.0f} s"
        )
        changed = []
        if state.alarm is not None and lasted >= CALM_S:
            changed.append(self._end(state.alarm, because))
            state.alarm = None
        if self.is_frozen or not state.in_force or lasted < state.calm_s:
            return changed
        act = state.in_force[-1]
        signs = self.signs
        if signs and act.target in signs.waits and signs.num_users > 1:
            return changed  # the user still has more waiting than others would like
        state.in_force.pop()
        state.undone = state.calm_since = now
        return [*changed, self._end(act, because)]

    def _expire(self, rule: Rule, state: _State) -> list[Intervention]:
        """Nothing lasts for ever, whatever the signs say."""
        now = self._now
        over = [act for act in state.in_force if now - act.began >= LONGEST_S]
        if self.is_frozen or not over:
            return []
        state.in_force = [act for act in state.in_force if act not in over]
        state.undone = now
        return [self._end(act, f"nothing lasts longer than {LONGEST_S:g} s") for act in over]

    def _end(self, act: Intervention, because: str) -> Intervention:
        act.ended, act.ended_because = self._now, because
        return act

    def _prefill_share(self) -> float:
        halvings = sum(
            act.action == Action.SMALLER_QUANTUM.value
            for state in self._states
            for act in state.in_force
        )
        return max(SMALLEST_SHARE, 0.5**halvings)

    def _apply(self) -> None:
        """Make the restraint what the acts in force say; operators' pauses are not touched."""
        in_force = [act for state in self._states for act in state.in_force]
        names = {act.action for act in in_force}
        restraint = self._restraint
        restraint.prefill_share = self._prefill_share()
        restraint.batch_paused = Action.PAUSE_BATCH.value in names
        restraint.admits = Action.PAUSE_ADMISSION.value not in names
        restraint.one_at_a_time = Action.ONE_AT_A_TIME.value in names
        held = Action.HOLD_USER.value
        restraint.held_users = {act.target for act in in_force if act.action == held}

    def note(
        self,
        action: str,
        target: str,
        cause: str,
        *,
        now: float,
        by: str = "control",
        alternatives: dict[str, str] | None = None,
    ) -> Intervention:
        """Record an act that begins now."""
        self._number += 1
        act = Intervention(self._number, now, action, target, cause, alternatives or {}, by)
        self.records.append(act)
        self._begun = [*self.in_force, act]
        return act

    @property
    def _now(self) -> float:
        assert self.signs is not None
        return self.signs.time

    @property
    def in_force(self) -> list[Intervention]:
        """Acts and alarms that have not ended."""
        return [act for act in self._begun if act.ended is None]

    def as_dict(self) -> dict[str, Any]:
        """What an operator reads; JSON-ready."""
        return {
            "frozen": self.is_frozen,
            "in_force": [asdict(act) for act in self.in_force],
            "records": [asdict(act) for act in self.records],
            "acts": dict(self.num_acts),
            "signs": None if self.signs is None else self.signs.as_dict(),
            "rules": [rule.as_dict() | {"value": self._value(rule)} for rule in RULES],
            "restraint": self._restraint.as_dict(),
        }

    def _value(self, rule: Rule) -> float | None:
        """What a rule's sign was at the last look."""
        return None if self.signs is None else rule.measure(self.signs)


def _unit(rule: Rule) -> str:
    return f" {rule.unit}" if rule.unit else ""


def _number(value: float) -> str:
    return f"{value:.3g}"

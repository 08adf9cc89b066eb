"""The goals between users, simulated: G16 (hog, fairness, weights, the control loop), G18
(overload), G19 (goodput).

On an M4 Max with an 8B model in 4 bits. A goal names what it compares; nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mlx_cb.bench.metrics import look_up, service_by_user
from mlx_cb.bench.sim.engines import Engine, Outcome, engine, simulate
from mlx_cb.bench.sim.machines import chip_named, model_named
from mlx_cb.bench.sim.ours import OurServer
from mlx_cb.bench.sim.substrate import Substrate, apple
from mlx_cb.bench.stats import summarize
from mlx_cb.bench.workloads.arriving import Hog, Poisson, Refusals
from mlx_cb.bench.workloads.base import Workload, in_group
from mlx_cb.bench.workloads.team import Backlog
from mlx_cb.core.control import Action, Intervention
from mlx_cb.standing import Standing

# The victims' lengths are those of a chat's further turns: an eighth of the trace's conversations.
HOG = Hog(hog_calls=60, hog_prompt=4096, hog_output=128, victims=7, turns=6, think_s=15, scale=8)
ALONE = Hog(hog_calls=0, victims=7, turns=6, think_s=15, scale=8)
BACKLOG = Backlog(users=4, calls=96, streams=12, prompt=512, output=128, growth=1.6)
EQUAL_SIZES = Backlog(users=3, calls=240, streams=48, prompt=512, output=128, growth=1.0)
WEIGHTS = {"user0": Standing(1.0), "user1": Standing(2.0), "user2": Standing(4.0)}
SATURATION = 0.5  # conversations per second that this machine can just take
MAX_WAIT_S = 10.0
# The peer refuses nobody, so where it is compared with ours neither does.
UNBOUND = "ours:max_queue_wait_s=1000000"
_PROGRESS = ("queued", "chunk", "first token")
FIRST_COME = "fcfs:max_queue_wait_s=1000000"


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that came out, and what it had to be."""

    goal: str
    what: str
    value: float
    threshold: float
    is_minimum: bool
    of: str = ""

    @property
    def is_met(self) -> bool:
        """On the right side of the threshold."""
        return self.value >= self.threshold if self.is_minimum else self.value <= self.threshold

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {
            "goal": self.goal,
            "what": self.what,
            "of": self.of,
            "value": self.value,
            "threshold": self.threshold,
            "is_minimum": self.is_minimum,
            "is_met": self.is_met,
        }


def machine() -> Substrate:
    """M4 Max, 8B."""
    return apple(chip_named("M4 Max"), model_named("Llama-3.1-8B-4bit"), 64)


def all_goals(seed: int, announce: Callable[[str], None] = lambda what: None) -> list[Goal]:
    """Simulate everything; takes about a minute."""
    goals = []
    for what, judge in (
        ("hog", hog),
        ("control", control),
        ("fairness", fairness),
        ("weights", weights),
        ("overload", overload),
        ("goodput", goodput),
    ):
        announce(what)
        goals += judge(seed)
    return goals


def _run(workload: Workload, chosen: Engine | str, seed: int) -> Outcome:
    started = engine(chosen) if isinstance(chosen, str) else chosen
    return simulate(workload.name, workload, started, machine(), seed=seed)


def _figure(outcome: Outcome, metric: str) -> float:
    value = look_up(outcome.figures, metric)
    if value is None:
        raise ValueError(f"the simulation of {outcome.label} gave no {metric}")
    return value


def hog(seed: int) -> list[Goal]:
    """G16: one user floods 60 long prompts, seven chat."""
    metric = "victims_ttft.p95"
    ours = _figure(_run(HOG, UNBOUND, seed), metric)
    peer = _figure(_run(HOG, "P", seed), metric)
    alone = _figure(_run(ALONE, "ours", seed), metric)
    return [
        Goal(
            "G16",
            "victims' TTFT p95 over the peer's",
            ours / peer,
            1 / 50,
            False,
            f"{ours:.3g} s of {peer:.3g} s",
        ),
        Goal(
            "G16",
            "victims' TTFT p95 over that without the hog",
            ours / alone,
            2.0,
            False,
            f"{ours:.3g} s of {alone:.3g} s",
        ),
    ]


def control(seed: int) -> list[Goal]:
    """Under fcfs the hog gets through: an alarm fires, the control acts, the tails return."""
    left = _run(HOG, f"{FIRST_COME},control=frozen", seed)
    acted = _run(HOG, FIRST_COME, seed)
    held = [act for act in acts(acted) if act.action == Action.HOLD_USER.value]
    began = held[0].began if held else float("inf")
    later = [
        record.ttft_s
        for record in in_group(acted.runs[-1].records, "victims")
        if record.sent_s + acted.runs[-1].began > began
    ]
    p95 = summarize(later).get("p95", float("inf"))
    base = _figure(left, "victims_ttft.p95")
    of = f"{p95:.3g} s of {base:.3g} s"
    explained = all(act.cause and act.alternatives and act.ended_because for act in held)
    return [
        Goal("control", "s until the hog is held back", began, 30.0, False, _told(held)),
        Goal("control", "victims' TTFT p95 after that, over frozen", p95 / base, 0.25, False, of),
        Goal("control", "acts without cause or end", float(not explained), 0, False),
    ]


def acts(outcome: Outcome) -> list[Intervention]:
    """What the control loop of a simulated server did, in order."""
    assert isinstance(outcome.server, OurServer)
    return list(outcome.server.governor.control.records)


def _told(held: list[Intervention]) -> str:
    if not held:
        return "never"
    first = held[0]
    return f"{first.cause}; undone: {first.ended_because}"


def fairness(seed: int) -> list[Goal]:
    """G16: four backlogged users of different sizes."""
    outcome = _run(BACKLOG, UNBOUND, seed)
    peer = _run(BACKLOG, "P", seed)
    of = f"peer {_figure(peer, 'jain'):.3f}"
    times = {user: _mean_time(outcome, user) for user in BACKLOG.names()}
    # A fair share of the machine is a machine that is as many times slower as there are users.
    over = {
        user: times[user] / (BACKLOG.users * _mean_time(_run(alone, UNBOUND, seed), user))
        for user, alone in zip(times, BACKLOG.alone(), strict=True)
    }
    worst = max(over, key=lambda user: over[user])
    jain = _figure(outcome, "jain")
    what = "longest mean wait for an answer over a fair share's"
    return [
        Goal("G16", "Jain's index of four backlogged users", jain, 0.97, True, of),
        Goal("G16", what, over[worst], 2.0, False, worst),
    ]


def _mean_time(outcome: Outcome, user: str) -> float:
    """Mean time from a user's calls to the ends of their answers."""
    records = [r for r in outcome.runs[-1].records if r.call.user == user and r.is_complete]
    return sum(r.ended_s - r.sent_s for r in records) / len(records)


def weights(seed: int) -> list[Goal]:
    """Weights 1:2:4 divide the machine 1:2:4."""
    base = engine(UNBOUND)
    outcome = _run(EQUAL_SIZES, Engine(base.label, base.settings, WEIGHTS), seed)
    served = service_by_user(outcome.runs[-1].records)
    per_weight = {user: served[user] / own.weight for user, own in WEIGHTS.items()}
    mean = sum(per_weight.values()) / len(per_weight)
    worst = max(abs(value / mean - 1) for value in per_weight.values())
    of = ":".join(f"{served[user] / served['user0']:.2f}" for user in WEIGHTS)
    return [Goal("G16", "largest deviation from weights 1:2:4", worst, 0.10, False, of)]


def overload(seed: int) -> list[Goal]:
    """G18: three times what the machine can take, judged as the measured goals are."""
    limited = f"ours:max_queue_wait_s={MAX_WAIT_S}"
    full = Poisson(mix="conv", rate=SATURATION, calls=200, scale=1)
    over = Refusals(mix="conv", rate=3 * SATURATION, calls=400, scale=1, max_wait_s=MAX_WAIT_S)
    saturated, flooded = _run(full, UNBOUND, seed), _run(over, limited, seed)
    speeds = [_figure(one, "saturated_tok_s") for one in (flooded, saturated)]
    retry = _figure(flooded, "retry_after_error.p50")
    still = longest_standstill(flooded)
    first = _figure(flooded, "longest_wait_over_limit") * MAX_WAIT_S
    of = f"{speeds[0]:.3g} of {speeds[1]:.3g}"
    waits = f"{still:.3g} s; longest to a first token {first:.3g} s, its own prefill included"
    part = speeds[0] / speeds[1]
    return [
        Goal("G18", "slowest refusal, s", _figure(flooded, "refused_after.max"), 0.05, False),
        Goal("G18", "Retry-After, median relative error", retry, 0.30, False),
        Goal("G18", "tokens/s at 3 times over that at saturation", part, 0.9, True, of),
        Goal(
            *("G18", "longest time without progress over the bound", still / MAX_WAIT_S, 1.5),
            *(False, waits),
        ),
        Goal("G18", "admitted and never answered", _figure(flooded, "unanswered"), 0, False),
    ]


def longest_standstill(outcome: Outcome) -> float:
    """Longest time that an admitted request waited for its next chunk or its first token.

    From the engine's own stories of the requests; the definition of starvation in performance.md.
    A stream gets a row in every step.
    """
    assert isinstance(outcome.server, OurServer)
    longest = 0.0
    for story in outcome.server.scheduler.journal.stories():
        events = [event for event in story["events"] if event["what"] in _PROGRESS]
        gaps = (two["time"] - one["time"] for one, two in pairwise(events))
        longest = max(longest, *gaps, 0.0)
    return longest


def goodput(seed: int) -> list[Goal]:
    """G19: good conversations on a busy machine, against the peer at defaults and tuned."""
    load = Poisson(mix="conv", rate=0.35, calls=400, scale=1, users=16)
    ours, peer, tuned = (_figure(_run(load, name, seed), "goodput") for name in (UNBOUND, "P", "T"))
    return [
        Goal(
            "G19",
            "goodput over the peer's",
            ours / peer if peer else float("inf"),
            3.0,
            True,
            f"{ours:.0%} of {peer:.0%}",
        ),
        Goal(
            "G19",
            "goodput over the tuned peer's",
            ours / tuned if tuned else float("inf"),
            2.0,
            True,
            f"{ours:.0%} of {tuned:.0%}",
        ),
    ]

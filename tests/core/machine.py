"""A scheduler on a machine that is simulated by a few numbers, and on a clock of its own.

Steps cost what performance.md measured of the demo model here: 60 ms, 3.2 ms for each row, and a
little for the context that is read. No test that uses it depends on how fast this machine is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from mlx_cb.config import SchedulerConfig
from mlx_cb.core.block_pool import BlockPool
from mlx_cb.core.control import Control, Intervention
from mlx_cb.core.kv_cache_manager import KVCacheManager
from mlx_cb.core.outputs import SampledToken
from mlx_cb.core.request import Request
from mlx_cb.core.scheduler import Scheduler
from mlx_cb.core.signs import Watch
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.standing import EQUAL, Standing

BASE, PER_ROW, PER_CONTEXT = 0.06, 0.0032, 1e-6
LOOK_EVERY_S = 1.0


@dataclass
class Machine:
    """One scheduler, stepped without a pipeline. `now` is in seconds."""

    scheduler: Scheduler
    control: Control | None = None
    now: float = 0.0
    first_token: dict[str, float] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)
    acts: list[Intervention] = field(default_factory=list)
    _names: count[int] = field(default_factory=count)
    _watch: Watch | None = None
    _looked: float = 0.0

    @classmethod
    def make(
        cls,
        *,
        num_blocks: int = 4000,
        block_size: int = 16,
        control: bool = False,
        **config: object,
    ) -> Machine:
        """With its control loop or without."""
        machine: Machine
        kv_cache = KVCacheManager(BlockPool(num_blocks), block_size, prefix_cache=True)
        scheduler = Scheduler(
            SchedulerConfig(**({"max_num_seqs": 8} | config)), kv_cache, clock=lambda: machine.now
        )
        machine = cls(scheduler)
        machine._watch = Watch(scheduler)
        if control:
            machine.control = Control(scheduler.entrance.restraint)
        return machine

    def add(
        self,
        user: str,
        prompt: int | list[int],
        output: int,
        standing: Standing = EQUAL,
        deadline: float | None = None,
    ) -> Request:
        """A request that comes now; a prompt of a length has tokens of its own."""
        number = next(self._names)
        if isinstance(prompt, int):
            prompt = [(number * 7919 + index) % 50_000 + 1 for index in range(prompt)]
        request = Request(
            request_id=f"{user}-{number}",
            token_ids=prompt.copy(),
            params=SamplingParams(max_tokens=output),
            max_output_tokens=output,
            eos_token_ids=frozenset(),
            seed=0,
            user=user,
            standing=standing,
            arrival_time=self.now,
            cache_salt=user.encode(),
            deadline=deadline,
        )
        self.scheduler.add(request)
        return request

    def waiting_of(self, user: str) -> int:
        """Unfinished requests of a user."""
        return sum(request.user == user for request in self.scheduler.requests.values())

    def step(self) -> None:
        """One step; idle time passes when there is nothing to run."""
        for output in self.scheduler.expire():
            self.finished[output.request_id] = self.now
        plan = self.scheduler.schedule()
        if plan.is_empty:
            self.now += 0.05
            self._look()
            return
        seconds = BASE + PER_ROW * plan.num_rows + PER_CONTEXT * plan.record.context_sum
        self.now += seconds
        outputs = self.scheduler.update(plan, [SampledToken(7) for _ in plan.sampling()], seconds)
        for output in outputs:
            self.first_token.setdefault(output.request_id, self.now)
            if output.finish_reason is not None:
                self.finished[output.request_id] = self.now
        assert self._watch is not None
        self._watch.saw(plan, self.now)
        self._look()

    def _look(self) -> None:
        if self.control is None or self.now - self._looked < LOOK_EVERY_S:
            return
        assert self._watch is not None
        self._looked = self.now
        self.acts += self.control.look(self._watch.read(self.now))

    def run(self, seconds: float, arrive: Callable[[Machine], None] = lambda machine: None) -> None:
        """Step for so long; `arrive` is asked before each step."""
        end = self.now + seconds
        while self.now < end:
            arrive(self)
            self.step()


def percentile(values: list[float], share: float) -> float:
    """The value at this place of the sorted list."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def jain(values: list[float]) -> float:
    """Jain's index."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))

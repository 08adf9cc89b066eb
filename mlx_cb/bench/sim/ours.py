"""Our server under virtual time: real scheduler, real admission control, modelled passes.

The order of things is the worker's: take in what has come, form a step, run it, hand out what it
gave. On a GPU a step is launched before the tokens of the one before it are read, as in
`engine.core`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mlx_cb.bench.metrics import Figures
from mlx_cb.bench.sim.client import Client, SimCall
from mlx_cb.bench.sim.clock import VirtualClock
from mlx_cb.bench.sim.cost import PassShape, draw_seconds
from mlx_cb.bench.sim.substrate import Substrate
from mlx_cb.bench.stats import summarize
from mlx_cb.config import SchedulerConfig
from mlx_cb.core.block_pool import BlockPool
from mlx_cb.core.kv_cache_manager import KVCacheManager
from mlx_cb.core.outputs import SampledToken
from mlx_cb.core.request import Request
from mlx_cb.core.scheduler import Scheduler
from mlx_cb.core.scheduler_output import SchedulerOutput
from mlx_cb.engine.admission import AdmissionControl
from mlx_cb.engine.governor import Governor
from mlx_cb.engine.messages import StepOutputs
from mlx_cb.errors import Overloaded
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.standing import EQUAL, Standing

BLOCK_SIZE = 16
IDLE_S = 0.001  # until an engine that could form no step tries again
MAX_IDLE = 10_000  # times in a row: then it never will


@dataclass(slots=True)
class _Launched:
    """A step on the device."""

    plan: SchedulerOutput
    began: float
    ends: float


@dataclass(slots=True)
class Waits:
    """How honest the front was to those whom it let in: predicted and real seconds of waiting."""

    pairs: list[tuple[float, float]] = field(default_factory=list)
    predicted: dict[str, tuple[float, float]] = field(default_factory=dict)

    def figures(self) -> Figures:
        """Relative errors of the predicted waits above a second."""
        errors = [abs(told - real) / real for told, real in self.pairs if min(told, real) > 1.0]
        return {"wait_error": summarize(errors)}


class OurServer:
    """One engine behind one front."""

    def __init__(
        self,
        clock: VirtualClock,
        substrate: Substrate,
        config: SchedulerConfig,
        *,
        standings: Mapping[str, Standing] | None = None,
        seed: int = 0,
    ) -> None:
        self.clock = clock
        self.substrate = substrate
        pool = BlockPool(substrate.num_blocks(BLOCK_SIZE))
        kv_cache = KVCacheManager(pool, BLOCK_SIZE, prefix_cache=True)
        config = replace(config, tile_rows=config.tile_rows or substrate.tile_rows)
        self.scheduler = Scheduler(config, kv_cache, clock=lambda: clock.now)
        self.governor = Governor(self.scheduler, lambda: clock.now)
        is_fair = config.policy in ("continuous", "fair")
        self.admission = AdmissionControl(
            config.max_num_seqs, config.max_queue_wait_s, is_fair=is_fair
        )
        self.waits = Waits()
        self._standings = standings or {}
        self._noise = random.Random(seed)
        self._inbox: list[SimCall] = []
        self._gone: list[SimCall] = []
        self._calls: dict[str, tuple[SimCall, Client]] = {}
        self._cached: dict[str, int] = {}  # of newcomers, for the next frame
        self._launched: _Launched | None = None
        self._is_busy = False
        self._last_ready = 0.0
        self._num_idle = 0
        self._next_token = 0

    # The front.

    def send(self, call: SimCall, client: Client) -> None:
        """Check, and hand to the engine; see SimServer."""
        front = self.substrate.front_s
        room = self.max_request_tokens - len(call.prompt)
        if room < 1:
            self.clock.after(front, functools.partial(client.end, call, "http_400", "too long"))
            return
        user, standing = call.call.user, self._standing(call)
        wait = self.admission.predicted_wait(user, standing, len(call.prompt))
        try:
            self.admission.check(user, standing)
            self.admission.check(user, standing, len(call.prompt))
        except Overloaded as error:
            call.record.retry_after_s = error.retry_after
            refuse = functools.partial(client.end, call, "http_429", error.message)
            self.clock.after(front, refuse)
            return
        number = str(call.number)
        self.admission.queue(number, len(call.prompt), user, standing)
        self._calls[number] = (call, client)
        self.waits.predicted[number] = (wait, self.clock.now)
        self.clock.after(front / 2, functools.partial(self._arrive, call))

    def _standing(self, call: SimCall) -> Standing:
        return self._standings.get(call.call.user, EQUAL)

    def hang_up(self, call: SimCall) -> None:
        """See SimServer."""
        self.admission.leave(str(call.number), self.clock.now)
        self.clock.after(self.substrate.front_s / 2, functools.partial(self._leave, call))

    def _arrive(self, call: SimCall) -> None:
        self._inbox.append(call)
        self._wake()

    def _leave(self, call: SimCall) -> None:
        self._gone.append(call)
        self._wake()

    def _deliver(self, frame: StepOutputs) -> None:
        self.admission.saw(frame, self.clock.now)
        for output in frame.outputs:
            found = self._calls.get(output.request_id)
            if found is None:
                continue
            call, client = found
            predicted = self.waits.predicted.pop(output.request_id, None)
            if predicted is not None:
                told, asked = predicted
                self.waits.pairs.append((told, self.clock.now - asked))
            if output.token_ids:
                client.hear(call, output.token_ids, output.num_cached_tokens)
            if output.finish_reason is not None:
                del self._calls[output.request_id]
                self.admission.leave(output.request_id, self.clock.now)
                client.end(call, *((output.error,) if output.error else ()))

    # The engine.

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt and output together."""
        pool = self.scheduler.kv_cache.pool
        return min(self.substrate.max_tokens, pool.capacity * BLOCK_SIZE)

    def _wake(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._step()

    def _drain(self) -> None:
        arrived, self._inbox = self._inbox, []
        for call in arrived:
            request = self._request(call)
            self.scheduler.add(request)
            if request.num_resident_tokens:
                self._cached[request.request_id] = request.num_resident_tokens
        gone, self._gone = self._gone, []
        for call in gone:
            self.scheduler.abort(str(call.number))
            self._calls.pop(str(call.number), None)

    def _request(self, call: SimCall) -> Request:
        return Request(
            request_id=str(call.number),
            token_ids=list(call.prompt),
            params=SamplingParams(temperature=0, ignore_eos=True),
            max_output_tokens=min(call.call.max_tokens, self.max_request_tokens - len(call.prompt)),
            eos_token_ids=frozenset(),
            seed=0,
            user=call.call.user,
            standing=self._standing(call),
            arrival_time=self.clock.now,
            cache_salt=call.call.user.encode() if self.substrate.salts_users else b"",
        )

    def _step(self) -> None:
        """One turn of the worker's loop, begun at this moment."""
        self._drain()
        if not self.scheduler.has_work and self._launched is None:
            self._is_busy = False
            return
        previous, self._launched = self._launched, None
        plan = self.scheduler.schedule()
        if not plan.is_empty:
            self._launched = self._launch(plan, previous)
        elif previous is None:
            self._idle()
            return
        self._num_idle = 0
        if not self.substrate.runs_beside_host:
            previous, self._launched = self._launched, None
        if previous is None:
            self.clock.at(self.clock.now, self._step)
        else:
            self.clock.at(previous.ends, functools.partial(self._collect, previous))

    def _idle(self) -> None:
        self._num_idle += 1
        if self._num_idle > MAX_IDLE:
            raise RuntimeError("the scheduler has work and forms no step")
        self.clock.after(IDLE_S, self._step)

    def _launch(self, plan: SchedulerOutput, previous: _Launched | None) -> _Launched:
        seconds = draw_seconds(self.substrate.ours, shape_of(plan), self._noise)
        began = self.clock.now if previous is None else max(self.clock.now, previous.ends)
        return _Launched(plan, self.clock.now, began + seconds)

    def _collect(self, step: _Launched) -> None:
        seconds = self.clock.now - max(step.began, self._last_ready)
        self._last_ready = self.clock.now
        sampled = []
        for _ in step.plan.sampling():
            self._next_token = (self._next_token + 1) % 2**30
            sampled.append(SampledToken(self._next_token))
        outputs = self.scheduler.update(step.plan, sampled, seconds)
        self.governor.saw(step.plan)
        record = step.plan.record
        computed = {chunk.request_id: chunk.start + chunk.num_tokens for chunk in record.prefills}
        frame = StepOutputs(outputs, record.rows_prefill, seconds, computed, self._cached)
        self._cached = {}
        self.clock.after(self.substrate.front_s / 2, functools.partial(self._deliver, frame))
        self.clock.after(self.substrate.host_seconds(len(sampled)), self._step)


def shape_of(plan: SchedulerOutput) -> PassShape:
    """What the pass of a plan computes."""
    chunks = plan.prefills
    in_chunks = sum(chunk.num_tokens for chunk in chunks)
    return PassShape(
        rows=plan.num_rows,
        sampled=len(plan.decodes) + sum(chunk.samples for chunk in chunks),
        context=plan.record.context_sum - in_chunks,
        chunks=len(chunks),
        pairs=sum(c.num_tokens * (c.start + c.num_tokens / 2) for c in chunks),
        scores=sum(c.num_tokens * (c.start + c.num_tokens) for c in chunks),
    )

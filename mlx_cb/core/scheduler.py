"""Decides, step by step, which tokens of which requests run. Owns every request's state.

There is no prefill phase and no decode phase: each request's `num_computed_tokens` catches up with
its `num_tokens`. Running decodes get a row first, always; what is left of the token budget goes to
prefill chunks in the policy's order. No MLX, no threads, no clock but the injected one.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable

from mlx_cb.config import SchedulerConfig
from mlx_cb.core.cost_model import StepCostModel
from mlx_cb.core.deadlines import Deadlines
from mlx_cb.core.entrance import Entrance
from mlx_cb.core.growth import Growth
from mlx_cb.core.integrity import check_places
from mlx_cb.core.journal import ChunkRecord, Journal, StepRecord, tell
from mlx_cb.core.kv_cache_manager import KVCacheManager
from mlx_cb.core.outputs import FinishReason, RequestOutput, SampledToken
from mlx_cb.core.policies import POLICIES
from mlx_cb.core.prefix_waits import SharedPrefix
from mlx_cb.core.pressure import Ladder, admission_order, choose_victim
from mlx_cb.core.request import Request, RequestEvent, RequestStatus
from mlx_cb.core.restoring import Restoring
from mlx_cb.core.scheduler_output import MAX_EXPLAINED, ScheduledChunk, SchedulerOutput
from mlx_cb.core.token_budget import StepShape, token_budget


class Scheduler:
    """Stages 1, 2, 4 and 5 of a step: queue, form, remove, refill."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.policy = POLICIES[config.policy]()
        self.entrance = Entrance(config, self.policy)
        self.service: defaultdict[str, float] = defaultdict(float)  # seconds by user, since start
        self.cost_model = StepCostModel()
        self.journal = Journal(config.journal_steps)
        self.requests: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.num_padding = 0
        self.pad_table = kv_cache.pool.allocate(1) if self.policy.pads_finished else []
        self.num_preemptions = 0
        self.growth = Growth(kv_cache)
        self.ladder = Ladder()
        self.restoring = Restoring(kv_cache)
        self.step = 0
        self._clock = clock
        self._deadlines = Deadlines()

    # Stage 1: queue.

    def add(self, request: Request) -> None:
        """Accept a request. The caller has checked that it can ever fit."""
        self.requests[request.request_id] = request
        self.waiting[request.request_id] = request
        self.policy.join(request.user, request.standing)
        self._deadlines.add(request)
        request.num_resident_tokens = self.kv_cache.num_resident_tokens(request)
        request.waiting_for = "next step"
        self._note(request, "queued", f"{request.num_prompt_tokens} prompt tokens")

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its blocks are free at once. None when it is not here (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        return self._finish(request, FinishReason.ABORT)

    def expire(self) -> list[RequestOutput]:
        """End the requests whose deadline has passed, with what they have produced."""
        if not self._deadlines:
            return []
        due = self._deadlines.due(self._clock())
        return [self._finish(request, FinishReason.DEADLINE) for request in due]

    @property
    def has_work(self) -> bool:
        """True while any request is unfinished."""
        return bool(self.requests)

    @property
    def is_held(self) -> bool:
        """True while all that is unfinished is paused by an operator: no step can advance it."""
        is_paused = self.entrance.restraint.is_paused
        return bool(self.requests) and all(map(is_paused, self.requests.values()))

    @property
    def num_running(self) -> int:
        """Requests that hold a place in the batch."""
        return len(self.decoding) + len(self.prefilling)

    def explain(self, request_id: str) -> dict[str, object] | None:
        """A request's life stage by stage, living or (recently) finished."""
        request = self.requests.get(request_id)
        if request is not None:
            return tell(request, self.step)
        return self.journal.story(request_id)

    # Stages 2 and 5: form the step's group, giving freed room to the waiting.

    def schedule(self) -> SchedulerOutput:
        """Form the next step. Counts of the chosen requests move on as if it had run."""
        self.step += 1
        plan = SchedulerOutput(StepRecord(self.step, self._clock()))
        self._schedule_decodes(plan)
        self._schedule_prefills(plan)
        self.kv_cache.order_moves(plan)
        plan.complete_record(self.cost_model, self.kv_cache.pool, len(self.waiting))
        if plan.is_empty:
            self.step -= 1
        else:
            self.journal.records.append(plan.record)
        return plan

    def _schedule_decodes(self, plan: SchedulerOutput) -> None:
        block_size, running = self.kv_cache.block_size, RequestStatus.RUNNING
        for request in self.decoding:
            if request.status is not running:
                continue  # preempted for a request before it in this very loop
            wanted = request.num_computed_tokens + 1
            if wanted >= request.max_num_tokens:  # its last token is in flight: no row is needed
                self.num_padding += self.policy.pads_finished
                continue
            if len(request.block_table) * block_size < wanted and not self._make_room(
                request, wanted, plan
            ):
                continue
            request.num_computed_tokens = wanted
            request.num_in_flight += 1
            plan.decodes.append(request)
        self.decoding = plan.decodes.copy()
        if not self.decoding:
            self.num_padding = 0
        plan.num_padding, plan.pad_table = self.num_padding, self.pad_table

    def _make_room(self, request: Request, num_tokens: int, plan: SchedulerOutput) -> bool:
        """Slots for `num_tokens`, taking others' blocks while there are none; see `choose_victim`.

        While decodes are chosen, one that has its row already may lose it; later, members of the
        plan are safe. False when the request had to give way itself, or has to wait.
        """
        while not self.kv_cache.allocate_slots(request, num_tokens):
            everyone = (*self.decoding, *self.prefilling)
            running = [r for r in everyone if r.status is RequestStatus.RUNNING]
            safe = plan.members() if request in self.prefilling else set()
            spare = [r for r in running if r is request or r.request_id not in safe]
            victim = choose_victim(spare, running, self.policy.charged)
            if victim is None:
                plan.pass_over(request, "blocks")
                return False
            plan.withdraw(victim)
            self._preempt(victim, plan, f"no block for {request.request_id}")
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, plan: SchedulerOutput, cause: str) -> None:
        """Take a request's blocks; it waits again, and what was written stays findable."""
        self.ladder.take_from(victim)
        self.kv_cache.remember(victim, min(victim.num_computed_tokens, victim.num_tokens))
        self._release(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        victim.waiting_for = "blocks"
        self.num_preemptions += 1
        self.waiting[victim.request_id] = victim
        if victim in self.prefilling:
            self.prefilling.remove(victim)
        plan.record.preempted[victim.request_id] = cause
        self._note(victim, "preempted", cause)

    def _release(self, request: Request) -> None:
        self.kv_cache.free(request)
        self.restoring.end(request)

    def _schedule_prefills(self, plan: SchedulerOutput) -> None:
        if not (self.waiting or self.prefilling):
            return
        self.restoring.advance(self.prefilling, plan, self._make_room)
        num_decodes = len(plan.decodes)
        context = sum(request.num_computed_tokens for request in plan.decodes)
        joining = len(self.prefilling) + len(self.waiting)
        crowd = min(num_decodes + joining, self.config.max_num_seqs)
        prefix = max((request.num_computed_tokens for request in self.prefilling), default=0)
        shape = StepShape(num_decodes, crowd, context, prefix)
        budget = token_budget(self.config, self.cost_model, shape)
        plan.record.token_budget = budget
        # Something always moves: a full house of decodes leaves one quantum to those who wait.
        share = int(self.entrance.restraint.prefill_share * (budget - num_decodes))
        room = max(share, min(budget, self.kv_cache.block_size))
        self.entrance.open((*self.decoding, *self.prefilling))
        blocks_short = bool(plan.record.preempted)
        for request in self._prefill_candidates(plan):
            if len(plan.record.passed_over) >= MAX_EXPLAINED and room <= 0:
                break
            if room <= 0:
                self.kv_cache.note_parting(request)
                plan.pass_over(request, "budget")
            elif request.status is RequestStatus.RUNNING:
                room -= self._schedule_chunk(plan, request, room)
            elif reason := self.entrance.refusal(request):
                plan.pass_over(request, reason)
            elif not self.policy.pads_finished and (shared := self.kv_cache.in_the_making(request)):
                room -= self._wait_for_prefix(plan, request, shared, room)
            elif blocks_short or not self._admit(plan, request):
                # Whoever comes next must not take the blocks that this one is waiting for.
                blocks_short = True
                plan.pass_over(request, "blocks")
            else:
                self.entrance.joined(request)
                room -= self._schedule_chunk(plan, request, room)
        self.ladder.stopped_admissions += blocks_short

    def _prefill_candidates(self, plan: SchedulerOutput) -> list[Request]:
        if not self.prefilling and self.num_running >= self.config.max_num_seqs:
            for request in self.waiting.values():
                plan.pass_over(request, "slots")
                if len(plan.record.passed_over) >= MAX_EXPLAINED:
                    break
            return []
        ready = [request for request in self.waiting.values() if request.num_in_flight == 0]
        wanting, rows_per_s = (*self.prefilling, *ready), 1 / self.cost_model.per_row
        return self.entrance.arrange(self.policy.order(wanting, plan.record.started, rows_per_s))

    def _admit(self, plan: SchedulerOutput, request: Request) -> bool:
        if not self.growth.has_room(request, (*self.decoding, *self.prefilling)):
            return False
        cached = self.kv_cache.take_prefix(request)
        if request.admitted_time is None:
            request.admitted_time = plan.record.started
            request.num_cached_tokens = cached
        del self.waiting[request.request_id]
        request.status = RequestStatus.RUNNING
        request.waiting_for = ""
        self.prefilling.append(request)
        plan.record.admitted.append(request.request_id)
        self._note(request, "admitted", f"{cached} tokens cached")
        self.restoring.begin(request, plan)
        return True

    def _wait_for_prefix(
        self, plan: SchedulerOutput, request: Request, shared: SharedPrefix, room: int
    ) -> int:
        """Another one computes what this one needs, so its turn goes there; returns rows given.

        Nobody waits longer so than if each computed everything: the rows are those of its turn.
        """
        plan.pass_over(request, "shared prefix")
        missing = shared.num_tokens - shared.request.num_computed_tokens
        if missing <= 0 or shared.request not in self.prefilling:
            return 0  # on its way
        return self._schedule_chunk(plan, shared.request, min(room, missing))

    def _schedule_chunk(self, plan: SchedulerOutput, request: Request, room: int) -> int:
        """Give a request up to `room` rows, once per step; returns how many it got."""
        if any(chunk.request is request for chunk in plan.prefills):
            return 0
        start = request.num_computed_tokens
        count = min(request.num_uncomputed_tokens, room)
        if request in self.restoring:
            plan.pass_over(request, "ssd")
            return 0
        if not self._make_room(request, start + count, plan):
            return 0
        plan.copy_promised(request, start // self.kv_cache.block_size)
        request.num_computed_tokens = start + count
        self.ladder.compute(request, start, start + count)
        samples = request.num_uncomputed_tokens == 0
        plan.prefills.append(ScheduledChunk(request, start, count, samples))
        plan.record.prefills.append(ChunkRecord(request.request_id, start, count))
        self._note(request, "chunk", f"tokens {start} to {start + count}")
        if samples:
            request.num_in_flight += 1
            self.prefilling.remove(request)
            insort(self.decoding, request, key=admission_order)
        return count

    # Stage 4: remove the finished.

    def update(
        self, plan: SchedulerOutput, sampled: list[SampledToken], seconds: float
    ) -> list[RequestOutput]:
        """Take in a step of `seconds`: one token per `plan.sampling()`. Returns the deltas."""
        record = plan.record
        record.seconds = seconds
        self.cost_model.observe(plan.num_rows, record.context_sum, seconds, record.pairs)
        for (user, rank), part in plan.shares(self.cost_model).items():
            self.policy.charge(user, rank, part * seconds)
            self.service[user] += part * seconds
        for chunk in plan.prefills:
            if chunk.request.status is RequestStatus.RUNNING:
                self.kv_cache.remember(chunk.request, chunk.start + chunk.num_tokens)
                self.kv_cache.remember_rest(chunk.request, chunk.start + chunk.num_tokens)
        now = self._clock()
        outputs = []
        for request, token in zip(plan.sampling(), sampled, strict=True):
            request.num_in_flight -= 1
            if request.status is not RequestStatus.FINISHED:
                outputs.append(self._append(request, token, plan, now))
        return outputs

    def fail(self, plan: SchedulerOutput, message: str) -> list[RequestOutput]:
        """A step went wrong: its requests end with an error, the others go on."""
        requests = {r.request_id: r for r in plan.decodes}
        requests |= {c.request.request_id: c.request for c in plan.prefills}
        outputs = [
            self._finish(request, FinishReason.ERROR, error=message)
            for request in requests.values()
            if request.status is not RequestStatus.FINISHED
        ]
        self.kv_cache.forget_all()
        return outputs

    def preempt_paused(self) -> None:
        """What an operator has paused gives its place and blocks to others, and waits again."""
        plan = SchedulerOutput(StepRecord(self.step, self._clock()))
        for request in [*self.prefilling, *self.decoding]:
            if self.entrance.restraint.is_paused(request):
                self._preempt(request, plan, "paused by the operator")
        self.decoding = [r for r in self.decoding if r.status is RequestStatus.RUNNING]

    def restart_running(self, cause: str) -> None:
        """Send every running request back to the queue, because the blocks' content is lost."""
        record = StepRecord(self.step, self._clock())
        for request in [*self.prefilling, *self.decoding]:
            request.num_in_flight = 0
            self._preempt(request, SchedulerOutput(record), cause)
        self.decoding = []
        self.kv_cache.forget_all()

    def forget_past(self) -> None:
        """Begin anew, with what was learned about costs: no journal, no findable blocks."""
        assert not self.requests
        self.step = 0
        self.journal = Journal(self.config.journal_steps)
        self.service.clear()
        self.kv_cache.forget_all()
        self.kv_cache.forget_stats()

    def _append(
        self, request: Request, token: SampledToken, plan: SchedulerOutput, now: float
    ) -> RequestOutput:
        token_ids = request.token_ids
        is_full = len(token_ids) % self.kv_cache.block_size == 0
        if is_full and request.status is RequestStatus.RUNNING:
            self.kv_cache.remember(request, len(token_ids))
        if request.first_token_time is None:
            request.first_token_time = now
            self._note(request, "first token", "")
        before = len(token_ids)
        reason = request.take(token.token_id)
        kept = token_ids[before:]
        if reason is not None:
            plan.record.finished[request.request_id] = reason.value
            self.growth.note(request)
            self._finish(request, reason)
        return request.delta(token, kept, reason)

    def _finish(
        self, request: Request, reason: FinishReason, error: str | None = None
    ) -> RequestOutput:
        """Stage 4 for one request: out of every list, blocks given back, story kept."""
        self.waiting.pop(request.request_id, None)
        if request in self.prefilling:
            self.prefilling.remove(request)
        if request in self.decoding:
            self.decoding.remove(request)
            self.num_padding += self.policy.pads_finished
        self._release(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finished_time = self._clock()
        request.waiting_for = ""
        del self.requests[request.request_id]
        self.policy.leave(request.user, request.standing)
        self._note(request, "finished", error or reason.value)
        self.journal.keep_story(request, self.step)
        return request.last_output(error)

    def _note(self, request: Request, what: str, detail: str) -> None:
        request.events.append(RequestEvent(self._clock(), self.step, what, detail))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every request and every block is where it should be."""
        check_places(self.requests, self.waiting, [*self.prefilling, *self.decoding])
        tables = [self.pad_table, *(request.block_table for request in self.requests.values())]
        self.kv_cache.pool.check_integrity(tables)

"""Decides, step by step, which tokens of which requests run. Owns every request's state.

There is no prefill phase and no decode phase: each request's `num_computed_tokens` catches up with
its `num_tokens`. Running decodes get a row first, always; what is left of the token budget goes to
prefill chunks in the policy's order. No MLX, no threads, no clock but the injected one.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable

from mlx_cb.config import SchedulerConfig
from mlx_cb.core.cost_model import StepCostModel
from mlx_cb.core.journal import ChunkRecord, Journal, StepRecord, tell
from mlx_cb.core.kv_cache_manager import KVCacheManager, PrefixStats
from mlx_cb.core.outputs import FinishReason, RequestOutput, SampledToken
from mlx_cb.core.policy import POLICIES
from mlx_cb.core.request import Request, RequestEvent, RequestStatus
from mlx_cb.core.scheduler_output import ScheduledChunk, SchedulerOutput
from mlx_cb.core.token_budget import StepShape, token_budget

MAX_EXPLAINED = 32  # waiting requests whose reason is recorded per step


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
        self.cost_model = StepCostModel()
        self.journal = Journal(config.journal_steps)
        self.requests: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.num_padding = 0
        self.pad_table = kv_cache.pool.allocate(1) if self.policy.pads_finished else []
        self.num_preemptions = 0
        self.service: defaultdict[str, float] = defaultdict(
            float
        )  # measured seconds by user, since start
        self.step = 0
        self._clock = clock

    # Stage 1: queue.

    def add(self, request: Request) -> None:
        """Accept a request. The caller has checked that it can ever fit."""
        self.requests[request.request_id] = request
        self.waiting[request.request_id] = request
        self.policy.join(request.user, request.standing)
        request.waiting_for = "next step"
        self._note(request, "queued", f"{request.num_prompt_tokens} prompt tokens")

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its blocks are free at once. None when it is not here (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        return self._finish(request, FinishReason.ABORT)

    @property
    def has_work(self) -> bool:
        """True while any request is unfinished."""
        return bool(self.requests)

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
        self._complete_record(plan)
        if plan.is_empty:
            self.step -= 1
        else:
            self.journal.records.append(plan.record)
        return plan

    def _schedule_decodes(self, plan: SchedulerOutput) -> None:
        block_size = self.kv_cache.block_size
        still_decoding = []
        for request in self.decoding:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for a request before it in this very loop
            if request.awaits_last_token:
                self.num_padding += self.policy.pads_finished
                continue
            if len(
                request.block_table
            ) * block_size <= request.num_computed_tokens and not self._make_room(
                request, request.num_computed_tokens + 1, plan
            ):
                continue
            request.num_computed_tokens += 1
            request.num_in_flight += 1
            still_decoding.append(request)
        self.decoding = still_decoding
        plan.decodes = still_decoding.copy()
        if not self.decoding:
            self.num_padding = 0
        plan.num_padding, plan.pad_table = self.num_padding, self.pad_table

    def _make_room(self, request: Request, num_tokens: int, plan: SchedulerOutput) -> bool:
        """Slots for `num_tokens`, preempting the youngest while there are none.

        Requests that already have rows in this plan are safe: decodes are visited oldest first.
        False when the request itself was the youngest and had to go.
        """
        while not self.kv_cache.allocate_slots(request, num_tokens):
            planned = {id(r) for r in plan.decodes} | {id(c.request) for c in plan.prefills}
            running = [
                candidate
                for candidate in (*self.decoding, *self.prefilling)
                if candidate.status is RequestStatus.RUNNING and id(candidate) not in planned
            ]
            victim = max(running, key=_admission_order)
            self._preempt(victim, plan, f"no block for {request.request_id}")
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, plan: SchedulerOutput, cause: str) -> None:
        """Take a request's blocks; it waits again with its output kept and is recomputed later."""
        self.kv_cache.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        victim.waiting_for = "blocks"
        self.num_preemptions += 1
        self.waiting[victim.request_id] = victim
        if victim in self.prefilling:
            self.prefilling.remove(victim)
        plan.record.preempted[victim.request_id] = cause
        self._note(victim, "preempted", cause)

    def _schedule_prefills(self, plan: SchedulerOutput) -> None:
        if not (self.waiting or self.prefilling):
            return
        num_decodes = len(plan.decodes)
        context = sum(request.num_computed_tokens for request in plan.decodes)
        joining = len(self.prefilling) + len(self.waiting)
        crowd = min(num_decodes + joining, self.config.max_num_seqs)
        budget = token_budget(self.config, self.cost_model, StepShape(num_decodes, crowd, context))
        plan.record.token_budget = budget
        # Something always moves: a full house of decodes leaves one quantum to those who wait.
        room = max(budget - num_decodes, min(budget, self.kv_cache.block_size))
        may_admit = self.policy.may_admit(self.num_running)
        places = {
            user: self.policy.max_running(user, self.config.max_num_seqs)
            for user in {request.user for request in self.waiting.values()}
        }
        running = Counter(request.user for request in (*self.decoding, *self.prefilling))
        blocks_short = bool(plan.record.preempted)
        for request in self._prefill_candidates(plan):
            if len(plan.record.passed_over) >= MAX_EXPLAINED and room <= 0:
                break
            if room <= 0:
                self._pass_over(plan, request, "budget")
            elif request.status is RequestStatus.RUNNING:
                room -= self._schedule_chunk(plan, request, room)
            elif not may_admit:
                self._pass_over(plan, request, "batch to end")
            elif self.num_running >= self.config.max_num_seqs:
                self._pass_over(plan, request, "slots")
            elif running[request.user] >= places[request.user]:
                self._pass_over(plan, request, "fair share")
            elif blocks_short or not self._admit(plan, request):
                # Whoever comes next must not take the blocks that this one is waiting for.
                blocks_short = True
                self._pass_over(plan, request, "blocks")
            else:
                running[request.user] += 1
                room -= self._schedule_chunk(plan, request, room)

    def _prefill_candidates(self, plan: SchedulerOutput) -> list[Request]:
        if not self.prefilling and self.num_running >= self.config.max_num_seqs:
            for request in self.waiting.values():
                self._pass_over(plan, request, "slots")
                if len(plan.record.passed_over) >= MAX_EXPLAINED:
                    break
            return []
        ready = [request for request in self.waiting.values() if request.num_in_flight == 0]
        return self.policy.order((*self.prefilling, *ready), plan.record.started)

    def _admit(self, plan: SchedulerOutput, request: Request) -> bool:
        headroom = len(self.decoding) + sum(
            self.kv_cache.num_missing_blocks(other) for other in self.prefilling
        )
        if not self.kv_cache.can_admit(request, headroom=headroom):
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
        return True

    def _schedule_chunk(self, plan: SchedulerOutput, request: Request, room: int) -> int:
        """Give a request up to `room` rows; returns how many it got."""
        start = request.num_computed_tokens
        count = min(request.num_uncomputed_tokens, room)
        if not self._make_room(request, start + count, plan):
            return 0
        request.num_computed_tokens = start + count
        samples = request.num_uncomputed_tokens == 0
        plan.prefills.append(ScheduledChunk(request, start, count, samples))
        plan.record.prefills.append(ChunkRecord(request.request_id, start, count))
        self._note(request, "chunk", f"tokens {start} to {start + count}")
        if samples:
            request.num_in_flight += 1
            self.prefilling.remove(request)
            insort(self.decoding, request, key=_admission_order)
        return count

    def _pass_over(self, plan: SchedulerOutput, request: Request, reason: str) -> None:
        request.waiting_for = reason
        request.waits[reason] = request.waits.get(reason, 0) + 1
        if len(plan.record.passed_over) < MAX_EXPLAINED:
            plan.record.passed_over[request.request_id] = reason

    def _complete_record(self, plan: SchedulerOutput) -> None:
        record = plan.record
        plan.num_blocks = len(self.kv_cache.pool.blocks)
        record.decodes = [request.request_id for request in plan.decodes]
        record.padding = plan.num_padding
        record.num_waiting = len(self.waiting)
        record.context_sum = sum(request.num_computed_tokens for request in plan.decodes) + sum(
            chunk.start + chunk.num_tokens for chunk in plan.prefills
        )
        record.predicted_seconds = self.cost_model.predict(plan.num_rows, record.context_sum)
        record.blocks_used = self.kv_cache.pool.num_used
        record.blocks_available = self.kv_cache.pool.num_available

    # Stage 4: remove the finished.

    def update(
        self, plan: SchedulerOutput, sampled: list[SampledToken], seconds: float
    ) -> list[RequestOutput]:
        """Take in what a step chose, one SampledToken per `plan.sampling()`; returns the deltas.

        `seconds` is the measured time of the step.
        """
        plan.record.seconds = seconds
        self.cost_model.observe(plan.num_rows, plan.record.context_sum, seconds)
        for user, part in plan.shares(self.cost_model).items():
            self.policy.charge(user, part * seconds)
            self.service[user] += part * seconds
        for chunk in plan.prefills:
            if chunk.request.status is RequestStatus.RUNNING:
                self.kv_cache.remember(chunk.request, chunk.start + chunk.num_tokens)
        now = self._clock()
        outputs = []
        for request, token in zip(plan.sampling(), sampled, strict=True):
            request.num_in_flight -= 1
            if request.status is not RequestStatus.FINISHED:
                outputs.append(self._append(request, token, plan, now))
        return outputs

    def fail(self, plan: SchedulerOutput, message: str) -> list[RequestOutput]:
        """A step went wrong: its requests end with an error, the others go on."""
        self.kv_cache.pool.forget_all()
        requests = {r.request_id: r for r in plan.decodes}
        requests |= {c.request.request_id: c.request for c in plan.prefills}
        return [
            self._finish(request, FinishReason.ERROR, error=message)
            for request in requests.values()
            if request.status is not RequestStatus.FINISHED
        ]

    def restart_running(self, cause: str) -> None:
        """Send every running request back to the queue, because the blocks' content is lost."""
        record = StepRecord(self.step, self._clock())
        for request in [*self.prefilling, *self.decoding]:
            request.num_in_flight = 0
            self._preempt(request, SchedulerOutput(record), cause)
        self.decoding = []
        self.kv_cache.pool.forget_all()

    def forget_past(self) -> None:
        """Begin anew, with what was learned about costs: no journal, no findable blocks."""
        assert not self.requests
        self.step = 0
        self.journal = Journal(self.config.journal_steps)
        self.service.clear()
        self.kv_cache.pool.forget_all()
        self.kv_cache.stats = PrefixStats()

    def _append(
        self, request: Request, token: SampledToken, plan: SchedulerOutput, now: float
    ) -> RequestOutput:
        token_ids = request.token_ids
        if (
            len(token_ids) % self.kv_cache.block_size == 0
            and request.status is RequestStatus.RUNNING
        ):
            self.kv_cache.remember(request, len(token_ids))
        if request.first_token_time is None:
            request.first_token_time = now
            self._note(request, "first token", "")
        reason, stop_token_id, kept = None, None, [token.token_id]
        if request.max_output_tokens == 0:
            reason, kept = FinishReason.LENGTH, []
        elif token.token_id in request.stop_token_ids:
            reason, stop_token_id, kept = FinishReason.STOP, token.token_id, []
        token_ids += kept
        num_output = len(token_ids) - request.num_prompt_tokens
        if reason is None and num_output >= request.max_output_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            plan.record.finished[request.request_id] = reason.value
            self._finish(request, reason)
        return RequestOutput(
            request.request_id,
            kept,
            logprobs=[token.logprobs] if kept and token.logprobs else None,
            prompt_logprobs=token.prompt_logprobs,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            embedding=token.embedding,
        )

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
        self.kv_cache.free(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finished_time = self._clock()
        request.waiting_for = ""
        del self.requests[request.request_id]
        self.policy.leave(request.user)
        self._note(request, "finished", error or reason.value)
        self.journal.keep_story(request, self.step)
        return RequestOutput(
            request.request_id,
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            error=error,
        )

    def _note(self, request: Request, what: str, detail: str) -> None:
        request.events.append(RequestEvent(self._clock(), self.step, what, detail))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every request and every block is where it should be."""
        placed = [*self.waiting.values(), *self.prefilling, *self.decoding]
        assert len(placed) == len({request.request_id for request in placed})
        for request in placed:
            assert self.requests[request.request_id] is request
            assert request.status is not RequestStatus.FINISHED
            assert (request.request_id in self.waiting) == (
                request.status is not RequestStatus.RUNNING
            )
        assert all(not request.block_table for request in self.waiting.values())
        tables = [request.block_table for request in self.requests.values()]
        self.kv_cache.pool.check_integrity([*tables, self.pad_table])


def _admission_order(request: Request) -> tuple[float, float, str]:
    return (request.admitted_time or 0.0, request.arrival_time, request.request_id)

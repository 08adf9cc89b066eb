"""The step journal: what each step did and why, in a bounded ring that is always on."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from mlx_cb.core.request import Request


@dataclass(slots=True)
class ChunkRecord:
    """Part of a prefill: tokens `start` to `start + num_tokens` of a request."""

    request_id: str
    start: int
    num_tokens: int


@dataclass(slots=True)
class StepRecord:
    """One step through the five stages: queue, form, advance, remove, refill.

    Attributes:
        started: seconds of the scheduler's clock when the step was formed.
        decodes: ids of the requests with one decode row each.
        prefills: chunks of prefill in the same forward pass.
        padding: rows computed for nobody (static policy only).
        passed_over: waiting requests that got nothing, with the reason.
        token_budget, predicted_seconds: from the cost model; seconds: measured, None until read.
        context_sum: tokens attended to, over all rows' requests.
        pairs: tokens that each row of a chunk attends to, summed over the chunks' rows.
        admitted, preempted, finished: requests that joined and left, with cause.
        blocks_used, blocks_available: after the step was formed.
    """

    step: int
    started: float
    decodes: list[str] = field(default_factory=list)
    prefills: list[ChunkRecord] = field(default_factory=list)
    padding: int = 0
    num_waiting: int = 0
    passed_over: dict[str, str] = field(default_factory=dict)
    token_budget: int = 0
    predicted_seconds: float = 0.0
    seconds: float | None = None
    context_sum: int = 0
    pairs: int = 0
    admitted: list[str] = field(default_factory=list)
    preempted: dict[str, str] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    blocks_used: int = 0
    blocks_available: int = 0

    @property
    def rows_decode(self) -> int:
        """Decode rows of the step."""
        return len(self.decodes)

    @property
    def rows_prefill(self) -> int:
        """Prefill rows of the step."""
        return sum(chunk.num_tokens for chunk in self.prefills)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with the row counts."""
        return asdict(self) | {
            "rows_decode": self.rows_decode,
            "rows_prefill": self.rows_prefill,
        }


class Journal:
    """The newest `max_steps` records, and the stories of as many requests."""

    def __init__(self, max_steps: int = 4096, max_requests: int = 1024) -> None:
        self.records: deque[StepRecord] = deque(maxlen=max_steps)
        self._max_requests = max_requests
        self._finished: dict[str, dict[str, Any]] = {}

    def last(self, count: int) -> list[dict[str, Any]]:
        """The newest `count` records, oldest first."""
        if count <= 0:
            return []
        return [record.as_dict() for record in list(self.records)[-count:]]

    def keep_story(self, request: Request, step: int) -> None:
        """Remember a finished request's story; the oldest story goes when there are too many."""
        self._finished[request.request_id] = tell(request, step)
        while len(self._finished) > self._max_requests:
            del self._finished[next(iter(self._finished))]

    def stories(self) -> list[dict[str, Any]]:
        """All stories that are kept, oldest first."""
        return list(self._finished.values())

    def story(self, request_id: str) -> dict[str, Any] | None:
        """Story of a finished request, None when unknown or forgotten."""
        return self._finished.get(request_id)


def tell(request: Request, step: int) -> dict[str, Any]:
    """A request's life stage by stage, JSON-ready; times in seconds of the scheduler's clock."""
    return {
        "request_id": request.request_id,
        "user": request.user,
        "status": request.status.value,
        "waiting_for": request.waiting_for,
        "waited_steps": dict(request.waits),
        "finish_reason": request.finish_reason.value if request.finish_reason else None,
        "queued": request.arrival_time,
        "admitted": request.admitted_time,
        "first_token": request.first_token_time,
        "finished": request.finished_time,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_output_tokens": request.num_output_tokens,
        "num_preemptions": request.num_preemptions,
        "blocks": len(request.block_table),
        "step": step,
        "events": [asdict(event) for event in request.events],
    }

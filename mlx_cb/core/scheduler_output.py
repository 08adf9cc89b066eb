"""The plan of one step, as the scheduler hands it to the runner."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_cb.core.block_pool import BlockPool
from mlx_cb.core.cost_model import StepCostModel, chunk_pairs
from mlx_cb.core.journal import StepRecord
from mlx_cb.core.request import Request
from mlx_cb.core.ssd_tier import BlockContent

MAX_EXPLAINED = 32  # waiting requests whose reason is recorded per step


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens `start` to `start + num_tokens` of a request; `samples` when they are its last."""

    request: Request
    start: int
    num_tokens: int
    samples: bool

    @property
    def pairs(self) -> int:
        """Tokens that each of its rows attends to, summed."""
        return chunk_pairs(self.start, self.num_tokens)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Block `target` gets the content of block `source` before the step runs."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StateContent:
    """A request gets the recurrent state after its first `num_tokens` tokens back."""

    request: Request
    content_hash: bytes
    num_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    """The plan of one step. Decode rows come first, then the chunks; one forward runs them all.

    `num_padding` rows are computed for nobody, over the block in `pad_table` (static policy only).
    Block ids are below `num_blocks`. Before the rows run, `stores` are copied out of their blocks,
    then `restores` are put into theirs and `states` are given back, then `copies` happen, all at
    once; `fetches` are names of what is to be read from the SSD meanwhile. `restoring` are the
    requests that wait for that, or whose blocks `restores` are.
    """

    record: StepRecord
    decodes: list[Request] = field(default_factory=list)
    prefills: list[ScheduledChunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    num_padding: int = 0
    num_blocks: int = 0
    pad_table: list[int] = field(default_factory=list)
    stores: list[BlockContent] = field(default_factory=list)
    restores: list[BlockContent] = field(default_factory=list)
    states: list[StateContent] = field(default_factory=list)
    fetches: list[bytes] = field(default_factory=list)
    restoring: list[Request] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to run."""
        return not (self.decodes or self.prefills)

    @property
    def num_rows(self) -> int:
        """Tokens in the step."""
        return len(self.decodes) + self.num_padding + sum(c.num_tokens for c in self.prefills)

    def members(self) -> set[str]:
        """Ids of the requests that have rows in this step, or got blocks back for it."""
        chunks = (chunk.request for chunk in self.prefills)
        return {request.request_id for request in (*self.decodes, *chunks, *self.restoring)}

    def withdraw(self, request: Request) -> None:
        """Take back a request's decode row, if it has one."""
        if request in self.decodes:
            self.decodes.remove(request)
            request.num_computed_tokens -= 1
            request.num_in_flight -= 1

    def sampling(self) -> list[Request]:
        """Requests that get a token from this step, in the order of the logit rows."""
        return [*self.decodes, *(chunk.request for chunk in self.prefills if chunk.samples)]

    def copy_promised(self, request: Request, index: int) -> None:
        """A request's block `index` begins with what another block holds, if that was promised."""
        if request.copy_from is not None:
            self.copies.append(BlockCopy(request.copy_from, request.block_table[index]))
            request.copy_from = None

    def pass_over(self, request: Request, reason: str) -> None:
        """Note why a request gets nothing from this step."""
        request.waiting_for = reason
        request.waits[reason] = request.waits.get(reason, 0) + 1
        if len(self.record.passed_over) < MAX_EXPLAINED:
            self.record.passed_over[request.request_id] = reason

    def complete_record(self, cost_model: StepCostModel, pool: BlockPool, num_waiting: int) -> None:
        """Write down what the step holds, now that it is formed."""
        record = self.record
        self.num_blocks = len(pool.blocks)
        record.decodes = [request.request_id for request in self.decodes]
        record.padding = self.num_padding
        record.num_waiting = num_waiting
        in_chunks = sum(chunk.start + chunk.num_tokens for chunk in self.prefills)
        # A list: this is done for every stream at every step, and a generator takes twice as long.
        in_decodes = sum([request.num_computed_tokens for request in self.decodes])
        record.context_sum = in_decodes + in_chunks
        record.pairs = sum(chunk.pairs for chunk in self.prefills)
        record.predicted_seconds = cost_model.predict(
            self.num_rows, record.context_sum, record.pairs
        )
        record.blocks_used = pool.num_used
        record.blocks_available = pool.num_available

    def shares(self, cost_model: StepCostModel) -> dict[tuple[str, int], float]:
        """Each account's (user and rank) part of the step's cost, by rows and context read."""
        if self.is_empty:
            return {}
        per_row = cost_model.base / self.num_rows + cost_model.per_row
        per_context = cost_model.per_context
        costs: dict[tuple[str, int], float] = {}
        for request in self.decodes:
            account = request.account
            cost = per_row + per_context * len(request.token_ids)
            costs[account] = costs.get(account, 0.0) + cost
        for chunk in self.prefills:
            cost = per_row * chunk.num_tokens + per_context * (chunk.start + chunk.num_tokens)
            cost += cost_model.per_pair * chunk.pairs
            account = chunk.request.account
            costs[account] = costs.get(account, 0.0) + cost
        total = sum(costs.values())
        return {account: cost / total for account, cost in costs.items()}

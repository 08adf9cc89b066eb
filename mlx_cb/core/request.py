"""One generation inside the engine: its tokens, its blocks, its progress and its story."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mlx_cb.core.checkpoints import BorderState
from mlx_cb.core.outputs import FinishReason, RequestOutput, SampledToken
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.standing import EQUAL, Standing


class RequestStatus(Enum):
    """Where a request stands. PREEMPTED waits again, with its output kept."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """State of one generation. Times are seconds of the scheduler's clock.

    `token_ids` holds the prompt and everything generated so far. `num_computed_tokens` counts the
    positions whose keys and values are written by a launched step; it catches up with
    `num_tokens`, chunk by chunk or token by token. `num_in_flight` is 1 while a launched step has
    chosen a token that nobody has read yet: the next row then takes its token id on the device.

    Attributes:
        max_output_tokens: resolved limit (params, context, pool), at least what params allow.
        max_num_tokens: prompt and that.
        seed: of the request's random numbers; drawn when the client sent none.
        waiting_for, waits: what it waits for now, and for how many steps it waited for what.
        is_plain_greedy: the next token is the arg max of the model's own logits.
        cache_salt: keeps one user's prefixes apart from another's.
        shared_salt, num_shared_blocks: what its first blocks are known by instead, and how many,
            when the text begins with a prompt that is marked as shared.
        deadline: when it ends at the latest, with what it has then; None for no such time.
        num_resident_tokens: how much of it was in the prefix cache when it came.
        account: the user and the rank that its service is charged to.
        most_computed_tokens: what it had computed when it last gave way.
        copy_from: block whose beginning is copied into the next one that is taken.
        resume_state: what recurrent layers remember of the prefix that was found, for the runner.
        checkpoint_tokens: block borders at which such a state is worth saving, ascending.
        border_state: that of the newest block border the text has passed, from the runner.
        border_hash: the content at the border whose state was kept last.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    max_output_tokens: int
    eos_token_ids: frozenset[int]
    seed: int
    user: str = "local"
    standing: Standing = EQUAL
    arrival_time: float = 0.0
    cache_salt: bytes = b""
    shared_salt: bytes = b""
    num_shared_blocks: int = 0
    deadline: float | None = None
    num_resident_tokens: int = 0
    account: tuple[str, int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    status: RequestStatus = RequestStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_cached_tokens: int = 0
    num_hashed_blocks: int = 0
    most_computed_tokens: int = 0
    copy_from: int | None = None
    resume_state: Any = None
    checkpoint_tokens: tuple[int, ...] = ()
    border_state: BorderState | None = None
    border_hash: bytes | None = None
    stop_token_ids: frozenset[int] = field(init=False)
    is_plain_greedy: bool = field(init=False)
    finish_reason: FinishReason | None = None
    admitted_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    events: list[RequestEvent] = field(default_factory=list)
    waiting_for: str = ""
    waits: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.account = (self.user, self.standing.rank)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_num_tokens = self.num_prompt_tokens + self.max_output_tokens
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        self.stop_token_ids = eos | frozenset(self.params.stop_token_ids)
        self.is_plain_greedy = self.params.is_plain_greedy

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and read so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Rows this request still needs before its next token can be chosen."""
        return len(self.token_ids) + self.num_in_flight - self.num_computed_tokens

    def take(self, token_id: int) -> FinishReason | None:
        """Append a chosen token, unless it is the mark of an end; why it was the last, or None."""
        if self.max_output_tokens == 0:
            return FinishReason.LENGTH
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        self.token_ids.append(token_id)
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_num_tokens else None

    def delta(
        self, token: SampledToken, kept: list[int], reason: FinishReason | None
    ) -> RequestOutput:
        """What one chosen token adds, of which `kept` belongs to the answer."""
        return RequestOutput(
            self.request_id,
            kept,
            logprobs=[token.logprobs] if kept and token.logprobs else None,
            prompt_logprobs=token.prompt_logprobs,
            finish_reason=reason,
            stop_token_id=token.token_id if reason is FinishReason.STOP else None,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            embedding=token.embedding,
        )

    def last_output(self, error: str | None) -> RequestOutput:
        """The end of a request that has ended without another token."""
        return RequestOutput(
            self.request_id,
            finish_reason=self.finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            error=error,
        )


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A turn in a request's life, for `/status/requests/{id}`."""

    time: float
    step: int
    what: str
    detail: str = ""

"""What a load run is made of: calls, the lanes that send them, and the record each call leaves.

Plain data. Knows nothing about HTTP, tokenizers or how a plan is drawn up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a prompt is made of, by length; the words follow from the seeds.

    Attributes:
        fresh: tokens that no other prompt has.
        seed: decides the fresh words.
        shared: leading tokens, the same in all prompts with this `shared_seed`.
        shared_seed: decides the shared words.
        conversation: when set, the prompt is everything said so far in this conversation (prompts
            and answers) followed by the fresh tokens; `shared` opens its first turn only.
    """

    fresh: int
    seed: int
    shared: int = 0
    shared_seed: int = 0
    conversation: str | None = None

    @property
    def tokens(self) -> int:
        """Length without the conversation before it."""
        return self.shared + self.fresh


@dataclass(frozen=True, slots=True)
class Call:
    """One request to be sent.

    Attributes:
        max_tokens: output limit, tokens.
        user: whose request it is.
        group: subgroup it is reported in, e.g. "short".
        think_s: pause before it is sent, seconds.
        cancel_after_s: the client hangs up this long after sending; None waits for the end.
        body: further body fields, e.g. temperature.
    """

    prompt: Prompt
    max_tokens: int
    user: str = "local"
    group: str = "all"
    think_s: float = 0.0
    cancel_after_s: float | None = None
    body: tuple[tuple[str, Scalar], ...] = ()


@dataclass(frozen=True, slots=True)
class Milestone:
    """A moment in the run: `calls` calls of `group` have had `chunks` chunks each, or have ended.

    `chunks=None` means ended, `group=None` any group.
    """

    group: str | None
    calls: int
    chunks: int | None = None


@dataclass(slots=True)
class Lane:
    """Sends its calls one after the other. Lanes may hold the *same* deque: then they share it,
    and each takes the next call when its last one has ended.

    `starts_at_s` counts from the start of the run, or from the milestone if there is one.
    """

    calls: deque[Call]
    starts_at_s: float = 0.0
    starts_when: Milestone | None = None


@dataclass(slots=True)
class Plan:
    """All lanes of one run; equal for every server that is compared."""

    lanes: list[Lane]

    def calls(self) -> list[Call]:
        """All calls, each once, lanes in order."""
        queues = {id(lane.calls): lane.calls for lane in self.lanes}
        return [call for queue in queues.values() for call in queue]


@dataclass(slots=True)
class CallRecord:
    """What became of a call. Times are seconds since the run began.

    Attributes:
        chunk_times_s: arrival of each chunk that carried content.
        prompt_tokens, output_tokens, cached_tokens: as the server counted them; without its count,
            output tokens are the number of chunks.
        failure: kind of failure (`http_429`, `connect`, `cut`, …), None for success.
        cancelled: the client hung up on purpose; not a failure.
        retry_after_s: when a refusal said to come back.
    """

    call: Call
    sent_s: float
    ended_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    failure: str | None = None
    detail: str = ""
    cancelled: bool = False
    retry_after_s: float | None = None

    @property
    def is_complete(self) -> bool:
        """Ended as asked, with at least one chunk of content."""
        return self.failure is None and not self.cancelled and bool(self.chunk_times_s)

    @property
    def ttft_s(self) -> float:
        """Sent to first content, seconds."""
        return self.chunk_times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies: pauses between chunks that follow each other, seconds."""
        times = self.chunk_times_s
        return [after - before for before, after in pairwise(times)]

    @property
    def tokens_per_chunk(self) -> float:
        """Above 1 where a server merges tokens into one chunk."""
        return self.output_tokens / len(self.chunk_times_s)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, seconds; None with fewer than two tokens."""
        if self.output_tokens < 2 or len(self.chunk_times_s) < 2:
            return None
        # The first chunk may carry several tokens, the last chunk's arrival ends the span.
        later = self.output_tokens - self.tokens_per_chunk
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / later


@dataclass(slots=True)
class Run:
    """The records of one plan sent to one server.

    Attributes:
        began: monotonic clock at the start, seconds; journals of the same machine share it.
        last_sent_s: when the last call was sent: until then the load was full.
    """

    records: list[CallRecord]
    began: float
    last_sent_s: float
    steps: list[dict[str, float]] = field(default_factory=list)

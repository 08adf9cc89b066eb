"""The plan of one step, as the scheduler hands it to the runner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mlx_cb.core.journal import StepRecord
from mlx_cb.core.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens `start` to `start + num_tokens` of a request; `samples` when they are its last."""

    request: Request
    start: int
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class SchedulerOutput:
    """The plan of one step. Decode rows come first, then the chunks; one forward runs them all.

    `num_padding` rows are computed for nobody, over the block in `pad_table` (static policy only).
    """

    record: StepRecord
    decodes: list[Request] = field(default_factory=list)
    prefills: list[ScheduledChunk] = field(default_factory=list)
    num_padding: int = 0
    pad_table: list[int] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to run."""
        return not (self.decodes or self.prefills)

    @property
    def num_rows(self) -> int:
        """Tokens in the step."""
        return len(self.decodes) + self.num_padding + sum(c.num_tokens for c in self.prefills)

    def sampling(self) -> Iterator[Request]:
        """Requests that get a token from this step, in the order of the logit rows."""
        yield from self.decodes
        yield from (chunk.request for chunk in self.prefills if chunk.samples)

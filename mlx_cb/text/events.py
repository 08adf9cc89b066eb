"""What a model's output means: the events that every dialect turns into its own bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class EndReason(Enum):
    """Why a text ended, as clients see it."""

    STOP = "the model ended its turn"
    STOP_STRING = "a stop string appeared"
    LENGTH = "no more tokens, or no more time, were allowed"
    TOOL_CALLS = "the model calls tools"


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its natural log-probability.

    `bytes` is None for a token that stands for no text (a control token).
    """

    text: str
    bytes: bytes | None
    logprob: float
    top: list[ScoredToken] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer; `logprobs` covers exactly the tokens that end in `text`."""

    text: str
    logprobs: list[ScoredToken] | None = None


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins: `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call's arguments, as JSON text."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of every text. `stop` is the stop string that ended it."""

    reason: EndReason
    stop: str | None = None


OutputEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | Finish

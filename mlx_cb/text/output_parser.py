"""From the engine's tokens to `OutputEvent`s, for one generation.

Owns the order of the stages: detokenize, stop strings, markers of reasoning and tool calls; and
which token's log-probability belongs to which piece of text. Knows nothing about dialects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_cb.core.outputs import FinishReason, RequestOutput, TokenLogprobs
from mlx_cb.text.detokenizer import new_detokenizer
from mlx_cb.text.events import (
    EndReason,
    Finish,
    OutputEvent,
    ScoredToken,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from mlx_cb.text.harmony import HarmonyFormat, HarmonySections
from mlx_cb.text.sections import OutputFormat, Sections
from mlx_cb.text.stop_strings import StopMatch, StopStrings
from mlx_cb.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """How one generation's output is read.

    Attributes:
        stops: stop strings.
        output_format: markers of reasoning and tool calls; None for plain text.
        written: the beginning of the answer that the prompt already holds (a forced call).
        most_calls: end after so many tool calls; None for no limit.
        in_reasoning: the prompt already opened the reasoning.
        follows_text: the output goes on the prompt's text (completions, prefill).
        top_logprobs: alternatives shown per token; None shows no log-probabilities.
    """

    stops: tuple[str, ...] = ()
    output_format: OutputFormat | HarmonyFormat | None = None
    written: str = ""
    most_calls: int | None = None
    in_reasoning: bool = False
    follows_text: bool = False
    top_logprobs: int | None = None


class OutputParser:
    """Feed it outputs until `is_finished`; every text ends with exactly one `Finish`."""

    def __init__(self, tokenizer: Tokenizer, options: ParserOptions) -> None:
        shown = _special_ids(tokenizer, options.output_format)
        self._detokenizer = new_detokenizer(tokenizer, shown, follows_text=options.follows_text)
        self._stops = StopStrings(options.stops) if options.stops else None
        self._sections: Sections | HarmonySections | None = None
        self._most_calls = options.most_calls
        if options.output_format is not None:
            in_reasoning = options.in_reasoning
            self._sections = options.output_format.new_sections(in_reasoning=in_reasoning)
            self._sections.feed(options.written)
        self._scores: _Scores | None = None
        if options.top_logprobs is not None:
            self._scores = _Scores(tokenizer)
        self.is_finished = False
        self.num_tokens = 0
        self.num_reasoning_tokens = 0

    def feed(self, output: RequestOutput) -> list[OutputEvent]:
        """Events of one engine output; [] while text is held back."""
        self.num_tokens += len(output.token_ids)
        if self._scores is None:
            text = self._detokenizer.feed(output.token_ids)
        else:
            text = self._feed_scored(output)
        if self._sections is not None and self._sections.in_reasoning:
            self.num_reasoning_tokens += len(output.token_ids)
        if output.finish_reason is None:
            events = self._read(text) if text else []
        else:
            events = self._end(text + self._detokenizer.finish(), output.finish_reason)
        return events

    def _feed_scored(self, output: RequestOutput) -> str:
        assert self._scores is not None
        pieces = []
        for token_id, logprobs in zip(output.token_ids, output.logprobs or (), strict=True):
            pieces.append(self._detokenizer.feed((token_id,)))
            self._scores.add(logprobs, len(pieces[-1]))
        return "".join(pieces)

    def _read(self, text: str) -> list[OutputEvent]:
        if self._stops is None:
            return self._meaning(text)
        safe = self._stops.feed(text)
        if isinstance(safe, StopMatch):
            return self._finish(safe.text, EndReason.STOP_STRING, safe.stop)
        return self._meaning(safe) if safe else []

    def _end(self, text: str, finish_reason: FinishReason) -> list[OutputEvent]:
        is_cut = finish_reason in (FinishReason.LENGTH, FinishReason.DEADLINE)
        reason = EndReason.LENGTH if is_cut else EndReason.STOP
        if self._stops is not None:
            safe = self._stops.feed(text)
            if isinstance(safe, StopMatch):
                return self._finish(safe.text, EndReason.STOP_STRING, safe.stop)
            text = safe + self._stops.finish()
        return self._finish(text, reason)

    def _finish(self, text: str, reason: EndReason, stop: str | None = None) -> list[OutputEvent]:
        self.is_finished = True
        scores = None
        if self._scores is not None:
            # A stop string cuts the text, and with it the tokens after the cut.
            is_cut = reason is EndReason.STOP_STRING
            scores = self._scores.release(len(text)) if is_cut else self._scores.release_all()
        if self._sections is not None:
            return self._sections.finish(text, Finish(reason, stop), scores)
        delta = [TextDelta(text, scores)] if text or scores else []
        return [*delta, Finish(reason, stop)]

    def _meaning(self, text: str) -> list[OutputEvent]:
        scores = self._scores.release(len(text)) if self._scores is not None else None
        if self._sections is None:
            return [TextDelta(text, scores)]
        sections = self._sections
        events = sections.feed(text, scores)
        num_whole = sections.num_calls - sections.num_broken
        if self._most_calls is not None and num_whole >= self._most_calls:
            return self._end_at_call(events)
        return events

    def _end_at_call(self, events: list[OutputEvent]) -> list[OutputEvent]:
        """The events up to the last call that is allowed, and the end."""
        assert self._most_calls is not None
        assert self._sections is not None
        last = self._most_calls + self._sections.num_broken - 1
        self.is_finished = True
        kept: list[OutputEvent] = []
        for event in events:
            is_extra = isinstance(event, ToolCallStart) and event.index > last
            is_after = isinstance(event, TextDelta) and kept and _call_index(kept[-1]) == last
            if is_extra or is_after:
                break
            kept.append(event)
        return [*kept, Finish(self._sections.end_reason)]


class _Scores:
    """Log-probabilities that wait until the text of their tokens is shown."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: deque[tuple[int, ScoredToken]] = deque()
        self._incomplete: list[ScoredToken] = []
        self._end = 0
        self._shown = 0

    def add(self, logprobs: TokenLogprobs, num_characters: int) -> None:
        """Add a token that completed so many characters; 0 goes with the token that completes."""
        self._end += num_characters
        self._incomplete.append(scored_token(self._tokenizer, logprobs))
        if num_characters:
            self._waiting.extend((self._end, token) for token in self._incomplete)
            self._incomplete = []

    def release(self, num_characters: int) -> list[ScoredToken]:
        """Tokens whose text is shown, now that so many more characters are."""
        self._shown += num_characters
        released = []
        while self._waiting and self._waiting[0][0] <= self._shown:
            released.append(self._waiting.popleft()[1])
        return released

    def release_all(self) -> list[ScoredToken]:
        """Every token left, at an end that cuts nothing."""
        released = [token for _, token in self._waiting] + self._incomplete
        self._waiting.clear()
        self._incomplete = []
        return released


def scored_token(tokenizer: Tokenizer, logprobs: TokenLogprobs) -> ScoredToken:
    """A token's log-probability with the texts of its alternatives."""
    top = [
        _one(tokenizer, token_id, logprob)
        for token_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    ]
    return _one(tokenizer, logprobs.token_id, logprobs.logprob, top)


def _one(
    tokenizer: Tokenizer, token_id: int, logprob: float, top: Sequence[ScoredToken] = ()
) -> ScoredToken:
    value = tokenizer.token_bytes[token_id]
    hidden = token_id in tokenizer.special_ids
    # JSON has no infinity: the lowest number that clients are known to expect stands for it.
    score = max(logprob, -9999.0)
    text = value.decode("utf-8", "replace")
    return ScoredToken(text, None if hidden else value, score, list(top))


def _call_index(event: OutputEvent) -> int | None:
    return event.index if isinstance(event, (ToolCallStart, ToolCallDelta)) else None


def _special_ids(
    tokenizer: Tokenizer, output_format: OutputFormat | HarmonyFormat | None
) -> frozenset[int]:
    if output_format is None:
        return frozenset()
    ids = (tokenizer.token_id(text) for text in output_format.markers)
    return frozenset(i for i in ids if i is not None)

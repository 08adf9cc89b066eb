"""Which markers a checkpoint puts around its reasoning, and whether a prompt opened them."""

from __future__ import annotations

from mlx_cb.text.sections import Markers

# Start, end. A checkpoint uses a pair when both texts are single tokens of its vocabulary, or
# (for pairs of several tokens) when its template writes the end.
_TOKEN_PAIRS = (
    Markers("<think>", "</think>"),
    Markers("<longcat_think>", "</longcat_think>"),
    Markers("<|think:start|>", "<|think:end|>"),
    Markers("<seed:think>", "</seed:think>"),
    Markers("[THINK]", "[/THINK]"),
)
_TEXT_PAIRS = (
    (Markers("<|channel>thought", "<channel|>"), "<channel|>"),
    (Markers("<|open|>think<|sep|>", "<|close|>think<|sep|>"), "<|close|>"),
)


def find_reasoning_markers(vocabulary_has, template: str) -> Markers | None:  # type: ignore[no-untyped-def]
    """The pair this checkpoint uses, or None.

    `vocabulary_has(text)` says whether a text is one token.
    """
    for markers in _TOKEN_PAIRS:
        if vocabulary_has(markers.start) and vocabulary_has(markers.end):
            return markers
        if markers.end in template:
            return markers
    for markers, token in _TEXT_PAIRS:
        if vocabulary_has(token):
            return markers
    return None


def opens_reasoning(prompt: str, markers: Markers | None) -> bool:
    """True when the prompt ends inside reasoning: its template opened it for the model."""
    if markers is None:
        return False
    start = prompt.rfind(markers.start)
    return start >= 0 and prompt[start + len(markers.start) :].strip() == ""

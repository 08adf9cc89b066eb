"""Token ids to text while they arrive: the pieces joined equal `Tokenizer.decode` of all ids.

Owns what must be remembered between two pieces: half a character, a run of byte tokens, the
leading space. Knows nothing about stop strings or markers.

One difference to `Tokenizer.decode` is wanted: a run of more than `LONGEST_HELD_RUN` byte tokens
is released while it goes on, so that scripts which a sentencepiece vocabulary spells in bytes
still stream. The texts then differ only if such a run is not UTF-8.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Protocol

from mlx_cb.text.token_bytes import DecoderKind, TokenBytes
from mlx_cb.text.tokenizer import Tokenizer

LONGEST_HELD_RUN = 16
REPLACEMENT = "\ufffd"
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Text out of token ids, a piece at a time."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """Text that the ids complete; never half a character."""
        ...

    def finish(self) -> str:
        """What is still held: at most one replacement character for half a character."""
        ...


def new_detokenizer(
    tokenizer: Tokenizer, shown: Set[int] = frozenset(), *, follows_text: bool = False
) -> Detokenizer:
    """A detokenizer for one stream.

    Args:
        shown: special tokens whose text is part of the output (markers of tool calls).
        follows_text: the stream goes on a text, so that a sentencepiece leading space is real.
    """
    hidden = tokenizer.special_ids - shown
    kind = tokenizer.token_bytes.kind
    if kind is DecoderKind.BYTE_LEVEL:
        return ByteLevelDetokenizer(tokenizer.token_bytes, hidden)
    if kind is DecoderKind.OTHER:
        return WindowDetokenizer(tokenizer, hidden)
    strip = kind is DecoderKind.SENTENCEPIECE_STRIPPED and not follows_text
    return SentencepieceDetokenizer(tokenizer.token_bytes, hidden, strip)


class ByteLevelDetokenizer:
    """GPT-2 style vocabularies: every token is bytes, characters may span tokens."""

    __slots__ = ("_bytes", "_decoder", "_hidden")

    def __init__(self, token_bytes: TokenBytes, hidden: Set[int]) -> None:
        self._bytes = token_bytes
        self._hidden = hidden
        self._decoder = _new_utf8_decoder("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        hidden, token_bytes = self._hidden, self._bytes
        piece = b"".join([token_bytes[i] for i in token_ids if i not in hidden])
        return self._decoder.decode(piece)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class SentencepieceDetokenizer:
    """Llama 2 style vocabularies: tokens are text, rare characters are runs of byte tokens."""

    __slots__ = ("_bytes", "_hidden", "_run", "_strip")

    def __init__(self, token_bytes: TokenBytes, hidden: Set[int], strip: bool) -> None:
        self._bytes = token_bytes
        self._hidden = hidden
        self._strip = strip
        self._run = bytearray()

    def feed(self, token_ids: Iterable[int]) -> str:
        pieces = []
        for token_id in token_ids:
            if token_id in self._hidden:
                continue
            if token_id in self._bytes.byte_ids:
                self._run += self._bytes[token_id]
                continue
            pieces.append(self._end_run() + self._bytes[token_id].decode())
        if len(self._run) > LONGEST_HELD_RUN:
            pieces.append(self._release_whole_characters())
        return self._strip_first("".join(pieces))

    def finish(self) -> str:
        return self._strip_first(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            # As tokenizers' ByteFallback does: one mark for each byte of an ill-formed run.
            return REPLACEMENT * len(run)

    def _release_whole_characters(self) -> str:
        decoder = _new_utf8_decoder("strict")
        try:
            text = decoder.decode(bytes(self._run))
        except UnicodeDecodeError:
            return self._end_run()
        self._run = bytearray(decoder.getstate()[0])
        return text

    def _strip_first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """Any other decoder: decodes a short window of ids twice and emits what is new."""

    __slots__ = ("_hidden", "_ids", "_prefix_end", "_tokenizer")

    LONGEST_WINDOW = 64

    def __init__(self, tokenizer: Tokenizer, hidden: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids: list[int] = []
        self._prefix_end = 0

    def feed(self, token_ids: Iterable[int]) -> str:
        pieces = []
        for token_id in token_ids:
            if token_id not in self._hidden:
                self._ids.append(token_id)
                pieces.append(self._new_text(self._is_held))
        return "".join(pieces)

    def finish(self) -> str:
        return self._new_text(lambda text: False)

    def _is_held(self, text: str) -> bool:
        return text.endswith(REPLACEMENT) and len(self._ids) < self.LONGEST_WINDOW

    def _new_text(self, is_held: Callable[[str], bool]) -> str:
        before = self._decode(self._ids[: self._prefix_end])
        after = self._decode(self._ids)
        if len(after) <= len(before) or is_held(after):
            return ""
        # The last emitted tokens stay as context: decoders join words by what stands before.
        self._ids = self._ids[self._prefix_end :]
        self._prefix_end = len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

"""The bytes that each token stands for, by the kind of decoder its tokenizer has.

Owns the two decoders that nearly every checkpoint uses, as `tokenizers` defines them: ByteLevel
(GPT-2's byte alphabet) and the sentencepiece chain Replace, ByteFallback, Fuse and maybe Strip.
Knows nothing about streams.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class DecoderKind(Enum):
    """How the texts of tokens are joined."""

    BYTE_LEVEL = "byte level"
    SENTENCEPIECE = "sentencepiece"
    SENTENCEPIECE_STRIPPED = "sentencepiece, one leading space removed"
    OTHER = "other"

    @classmethod
    def of(cls, decoder: dict[str, Any] | None) -> DecoderKind:
        """Classify the `decoder` entry of a tokenizer.json."""
        decoder = decoder or {}
        chain = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
        if [part.get("type") for part in chain] == ["ByteLevel"]:
            return cls.BYTE_LEVEL
        if [part.get("type") for part in chain][:3] != ["Replace", "ByteFallback", "Fuse"]:
            return cls.OTHER
        if chain[0].get("pattern") != {"String": "▁"} or chain[0].get("content") != " ":
            return cls.OTHER
        if len(chain) == 3:
            return cls.SENTENCEPIECE
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        return cls.SENTENCEPIECE_STRIPPED if chain[3:] == [strip] else cls.OTHER


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, reversed."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return alphabet


_ALPHABET = byte_alphabet()


class TokenBytes:
    """Maps a token id to its bytes, filled as tokens are seen."""

    def __init__(self, backend: tokenizers.Tokenizer, kind: DecoderKind) -> None:
        self.kind = kind
        self._backend = backend
        self._known: dict[int, bytes] = {}
        names = (f"<0x{byte:02X}>" for byte in range(256))
        ids = (backend.token_to_id(name) for name in names)
        #: sentencepiece's `<0x0A>` tokens, each one raw byte
        self.byte_ids = frozenset(i for i in ids if i is not None)

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token; empty for an id outside the vocabulary (padded embeddings)."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._find(token_id)
        return known

    def _find(self, token_id: int) -> bytes:
        text = self._backend.id_to_token(token_id)
        if text is None:
            return b""
        if self.kind is DecoderKind.BYTE_LEVEL:
            values = [_ALPHABET.get(character) for character in text]
            # A token with any character outside the alphabet (an added one) is plain text.
            return text.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        if self.kind is DecoderKind.OTHER:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        if match := _BYTE_TOKEN.match(text):
            return bytes([int(match[1], 16)])
        return text.replace("▁", " ").encode()

"""A checkpoint's tokenizer: text to token ids, ids to text, bytes of one token.

Owns the reading of `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json`. Knows
nothing about chat messages (see `chat_template`), streams (see `detokenizer`) or the engine.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from mlx_cb.errors import UnsupportedModel
from mlx_cb.text.older_files import convert_older_files
from mlx_cb.text.tiktoken_file import find_vocabulary, tokenizer_json
from mlx_cb.text.token_bytes import DecoderKind, TokenBytes

# A Unicode noncharacter put inside a spelled control token, so that it is not matched as one.
GUARD_CHARACTERS = tuple(chr(code) for code in range(0xFDD2, 0xFDF0))


class AddedToken(msgspec.Struct, frozen=True):
    """One entry of `added_tokens` in tokenizer.json."""

    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The few parts of tokenizer.json that are looked at here."""

    decoder: dict[str, Any] | None = None
    added_tokens: list[AddedToken] = []


class Tokenizer:
    """Encodes and decodes; safe to share between threads."""

    def __init__(self, content: bytes, config: dict[str, Any] | None = None) -> None:
        """`content` is the text of a tokenizer.json, `config` that of tokenizer_config.json."""
        try:
            self.backend = tokenizers.Tokenizer.from_buffer(content)
            parsed = msgspec.json.decode(content, type=_TokenizerFile)
        except Exception as error:  # tokenizers raises bare Exception for a malformed file
            raise UnsupportedModel(f"tokenizer.json cannot be read: {error}") from error
        self.backend.no_truncation()
        self.backend.no_padding()
        self.content = content
        self.config = config or {}
        self.added_tokens = {token.id: token for token in parsed.added_tokens}
        self.special_ids = frozenset(t.id for t in parsed.added_tokens if t.special)
        self.special_tokens = {t.content: t.id for t in parsed.added_tokens if t.special}
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        self.token_bytes = TokenBytes(self.backend, DecoderKind.of(parsed.decoder))

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a model folder. Raises UnsupportedModel when there is none."""
        config: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                config.update(msgspec.json.decode((folder / name).read_bytes(), type=dict))
        if (folder / "tokenizer.json").is_file():
            return cls((folder / "tokenizer.json").read_bytes(), config)
        vocabulary = find_vocabulary(folder)
        if vocabulary is not None:
            return cls(tokenizer_json(vocabulary, config), config)
        return cls(convert_older_files(folder), config)

    def token_name(self, key: str) -> str | None:
        """Text of a named special token such as `bos_token`, None if the checkpoint has none."""
        value = self.config.get(key)
        return value.get("content") if isinstance(value, dict) else value

    def token_id(self, text: str) -> int | None:
        """Id of a token by its exact vocabulary text."""
        return self.backend.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; spelled control tokens become those tokens."""
        # encode_batch lets go of the GIL, encode does not: a long prompt must not stop the loop.
        encoded = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded[0].ids

    def encode_guarded(self, text: str, guard: str) -> list[int]:
        """Token ids of `text` in which spellings broken by `guard` are plain text.

        The stretch between two real added tokens that holds a guard is encoded by a tokenizer
        without added tokens; the tokenizer splits at added tokens anyway, so borders do not move.
        """
        if guard not in text:
            return self.encode(text, add_special_tokens=False)
        ids: list[int] = []
        normal: list[str] = []
        for stretch in self._added_token_pattern.split(text):
            if guard not in stretch:
                normal.append(stretch)
                continue
            ids += self.encode("".join(normal), add_special_tokens=False)
            normal = []
            plain = self._without_added_tokens.encode_batch_fast([stretch.replace(guard, "")])
            ids += plain[0].ids
        return ids + self.encode("".join(normal), add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, all at once."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def _added_token_pattern(self) -> re.Pattern[str]:
        longest_first = sorted((t.content for t in self.added_tokens.values()), key=len)[::-1]
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    @cached_property
    def _without_added_tokens(self) -> tokenizers.Tokenizer:
        parts = msgspec.json.decode(self.content, type=dict[str, msgspec.Raw])
        parts["added_tokens"] = msgspec.Raw(b"[]")
        parts["post_processor"] = msgspec.Raw(b"null")
        return tokenizers.Tokenizer.from_buffer(msgspec.json.encode(parts))


def tokenizer_file(folder: Path, cache_dir: Path) -> Path:
    """A tokenizer.json of a model folder; one that was converted is kept in the cache.

    Raises UnsupportedModel when the folder has no tokenizer that can be read.
    """
    own = folder / "tokenizer.json"
    if own.is_file():
        return own
    content = Tokenizer.load(folder).content
    digest = hashlib.blake2b(content, digest_size=6).hexdigest()
    kept = cache_dir / "tokenizers" / f"{digest}.json"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_bytes(content)
        partial.rename(kept)
    return kept

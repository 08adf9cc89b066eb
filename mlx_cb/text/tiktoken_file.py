"""Reads a vocabulary in tiktoken's form: a line per token, its bytes in base64 and its rank.

Such a file does not say how text is cut before merging; that is in a Python file beside it, which
is never run here. The cuts are known by the name of the tokenizer's class. Knows no streams.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mlx_cb.errors import UnsupportedModel
from mlx_cb.text.token_bytes import byte_alphabet

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _reserved(config: dict[str, Any], first: int) -> Iterable[str]:
    """256 control tokens behind the ranks, named by the config where they have a name."""
    entries = config.get("added_tokens_decoder") or {}
    named = {int(token_id): entry["content"] for token_id, entry in entries.items()}
    last = max([first + 256, *(token_id + 1 for token_id in named)])
    return (named.get(i, f"<|reserved_token_{i}|>") for i in range(first, last))


def _qwen(_: dict[str, Any], __: int) -> Iterable[str]:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return names + [f"<|extra_{n}|>" for n in range(205)]


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a class of tokenizers cuts text (Oniguruma's syntax), and its control tokens."""

    pattern: str
    control_tokens: Callable[[dict[str, Any], int], Iterable[str]]
    normalizer: str | None = None


#: By `tokenizer_class`. Sources: tokenization_kimi.py of Kimi-K2 and Kimi-Linear,
#: tokenization_qwen.py of Qwen-7B.
KINDS = {
    "TikTokenTokenizer": _Kind(
        rf"[\p{{Han}}]+|{_LEAD}{_UPPER}*{_LOWER}+{_ENDING}?|{_LEAD}{_UPPER}+{_LOWER}*{_ENDING}?"
        rf"|\p{{N}}{{1,3}}|{_REST}",
        _reserved,
    ),
    "QWenTokenizer": _Kind(rf"{_ENDING}|{_LEAD}\p{{L}}+|\p{{N}}|{_REST}", _qwen, "NFC"),
}


def find_vocabulary(folder: Path) -> Path | None:
    """The tiktoken file of a model folder."""
    found = [*folder.glob("tiktoken.model"), *sorted(folder.glob("*.tiktoken"))]
    return found[0] if found else None


def tokenizer_json(file: Path, config: dict[str, Any]) -> bytes:
    """Text of a tokenizer.json with the same tokens; `config` is tokenizer_config.json's.

    Raises UnsupportedModel for a class whose cuts are not known, or a file that cannot be read.
    """
    kind = KINDS.get(str(config.get("tokenizer_class")))
    if kind is None:
        raise UnsupportedModel(
            f"{file.name} needs the Python file of {config.get('tokenizer_class')!r}, which is not "
            f"run; read are {', '.join(KINDS)}. Hint: add the model's tokenizer.json."
        )
    ranks = _ranks(file)
    letters = {value: letter for letter, value in byte_alphabet().items()}

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    split = {"type": "Split", "pattern": {"Regex": kind.pattern}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": token_id, "content": name, "special": True} | flags
        for token_id, name in enumerate(kind.control_tokens(config, len(ranks)), start=len(ranks))
    ]
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": kind.normalizer} if kind.normalizer else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                split | {"behavior": "Isolated", "invert": False},
                byte_level | {"use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {spell(token): rank for token, rank in ranks.items()},
            "merges": [[spell(left), spell(right)] for left, right in _merges(ranks)],
            # tiktoken takes a whole piece that is a token before it merges anything.
            "ignore_merges": True,
        },
    }
    return msgspec.json.encode(content)


def _ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise UnsupportedModel(f"{file} is not a tiktoken vocabulary: {error}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UnsupportedModel(f"{file} is not a tiktoken vocabulary: its ranks have gaps")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Pairs in the order in which tiktoken joins them: by the joined token's rank."""
    found = []
    for token, rank in ranks.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        found += [(rank, pair) for pair in known]
    found.sort(key=lambda entry: entry[0])
    return [pair for _, pair in found]

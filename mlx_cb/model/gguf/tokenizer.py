"""Rebuilds a Hugging Face tokenizer from a GGUF file's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_cb.errors import UnsupportedModel
from mlx_cb.model.gguf.file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "▁"

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a byte-level vocabulary's text is cut before merging, and what goes with it.

    Attributes:
        takes_whole: a piece that is a token is taken before anything is merged.
        begins: texts begin with the BOS token where the file does not say.
    """

    pre_tokenizers: list[dict[str, Any]]
    normalizer: str | None = None
    takes_whole: bool = False
    begins: bool = False


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return [split | {"invert": False}, _BYTE_LEVEL | {"use_regex": False}]


_LLAMA3 = _Cut(_split(_WORDS % "{1,3}"), takes_whole=True, begins=True)
_QWEN2 = _Cut(_split(_WORDS % ""), normalizer="NFC")
#: By `tokenizer.ggml.pre`; what belongs to a name is llama.cpp's decision (src/llama-vocab.cpp).
_CUTS: dict[str, _Cut] = {
    "smollm": _Cut(
        [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL | {"use_regex": True}]
    ),
    "gpt-2": _Cut([_BYTE_LEVEL | {"use_regex": True}]),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _Cut(_split(_TEKKEN), takes_whole=True, begins=True),
}


def tokenizer_json(file: GGUFFile) -> dict[str, Any]:
    """Content of tokenizer.json. Raises UnsupportedModel, naming the kind that is not read."""
    metadata = file.metadata
    kind, cut = metadata.get("tokenizer.ggml.model"), _cut_name(metadata)
    if kind == "gpt2" and cut in _CUTS:
        model = _byte_level(metadata, _CUTS[cut])
    elif kind == "llama":
        model = _sentencepiece(metadata)
    else:
        raise UnsupportedModel(
            f"{file.path} has a {kind!r} tokenizer of the kind {cut!r}, which is not converted. "
            "Hint: use the safetensors checkpoint."
        )
    return {"version": "1.0", "added_tokens": _added(metadata), **model} | {
        "post_processor": _post_processor(metadata)
    }


def _cut_name(metadata: dict[str, Any]) -> str:
    return str(metadata.get("tokenizer.ggml.pre", "gpt-2"))


def _begins(metadata: dict[str, Any]) -> bool:
    """True when every text begins with the BOS token."""
    said = metadata.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    if metadata.get("tokenizer.ggml.bos_token_id") is None:
        return False
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    return is_sentencepiece or _CUTS[_cut_name(metadata)].begins


def _added(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": token_id, "content": token, "special": kind == _CONTROL} | flags
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _post_processor(metadata: dict[str, Any]) -> dict[str, Any] | None:
    if not _begins(metadata):
        return None
    bos = metadata["tokenizer.ggml.bos_token_id"]
    token = metadata["tokenizer.ggml.tokens"][bos]
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": index}} for index, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [first, text[0]],
        "pair": [first, text[0], first, text[1]],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }


def _byte_level(metadata: dict[str, Any], cut: _Cut) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "normalizer": {"type": cut.normalizer} if cut.normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cut.pre_tokenizers},
        "decoder": _BYTE_LEVEL | {"add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]],
            "ignore_merges": cut.takes_whole,
        },
    }


def _sentencepiece(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    restore = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    normalizers: list[dict[str, Any]] = [replace]
    decoders: list[dict[str, Any]] = [restore, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": _merges(tokens, metadata["tokenizer.ggml.scores"]),
        },
    }


def _merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Pairs in the order in which sentencepiece would join them: by the joined piece's score."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, pair) for pair in known]
    found.sort(key=lambda entry: (entry[0], len(entry[1][0]), len(entry[1][1])), reverse=True)
    return [pair for _, pair in found]


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """Content of tokenizer_config.json, chat template included."""
    metadata = file.metadata
    tokens = metadata["tokenizer.ggml.tokens"]

    def token(kind: str) -> str | None:
        token_id = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return None if token_id is None else tokens[token_id]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "add_bos_token": _begins(metadata),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
        "chat_template": metadata.get("tokenizer.chat_template"),
    }

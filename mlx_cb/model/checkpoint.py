"""What a checkpoint's small files say beside the weights: where turns end, how long texts may be,
how its makers sample. Reads configs and tokenizer files; loads no weights.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec

from mlx_cb.errors import InvalidRequest
from mlx_cb.sampling_params import MODEL_DEFAULTS, SamplingParams

_log = logging.getLogger(__name__)

DEFAULT_MAX_MODEL_LEN = 8192
#: What families call the context they were trained on, the usual name first.
_CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "model_max_length",
    "block_size",
)

#: Tokens that end a turn where a chat template writes them, whatever the configs forgot.
_TURN_ENDINGS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<|endofturn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|message_sep|>",
)
#: Templates with this token use `<|end|>` between the parts of one turn.
_HARMONY = "<|return|>"


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty when there is no such file."""
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def eos_token_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """Ids that end the model's turn: what the configs name, the tokenizer's own, the template's.

    `config` is the model's, in which mlx-lm has put generation_config.json's ids first.
    """
    found: set[int] = set()
    generation = read_json(folder / "generation_config.json")
    text_config = config.get("text_config") or {}
    for source in (config, text_config, generation):
        value = source.get("eos_token_id")
        found.update([value] if isinstance(value, int) else value or [])
    tokenizer = read_json(folder / "tokenizer_config.json")
    ids = _added_ids(folder, tokenizer)
    eos = tokenizer.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos in ids:
        found.add(ids[eos])
    template = _chat_template(folder, tokenizer)
    if "eos_token_id" not in generation and _HARMONY not in template:
        found.update(ids[name] for name in _TURN_ENDINGS if name in ids and name in template)
    return frozenset(found)


def says_where_turns_end(folder: Path) -> bool:
    """True when the makers list the endings, or the template has markers that are known."""
    if "eos_token_id" in read_json(folder / "generation_config.json"):
        return True
    template = _chat_template(folder, read_json(folder / "tokenizer_config.json"))
    return any(name in template for name in (*_TURN_ENDINGS, _HARMONY))


def _added_ids(folder: Path, tokenizer: dict[str, Any]) -> dict[str, int]:
    file = folder / "tokenizer.json"
    if file.is_file():
        parsed = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
        return {token.content: token.id for token in parsed.added_tokens}
    decoder = tokenizer.get("added_tokens_decoder") or {}
    return {entry["content"]: int(token_id) for token_id, entry in decoder.items()}


def _chat_template(folder: Path, tokenizer: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    value = read_json(folder / "chat_template.json").get("chat_template")
    value = value or tokenizer.get("chat_template") or ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def max_model_len(config: dict[str, Any], wanted: int | None) -> int:
    """Longest text in tokens: the trained context, stretched where the config scales positions.

    `max_position_embeddings` is already the stretched length, except where a scaling names an
    original length whose multiple is longer.
    """
    named = [config[name] for name in _CONTEXT_NAMES if config.get(name)]
    limit = int(named[0]) if named else DEFAULT_MAX_MODEL_LEN
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # Some name a scaling per kind of layer.
    for kind in (scaling, *(inner for inner in scaling.values() if isinstance(inner, dict))):
        original, factor = kind.get("original_max_position_embeddings"), kind.get("factor")
        if original and factor:
            limit = max(limit, int(original * factor))
    return min(limit, wanted or limit)


def generation_defaults(folder: Path) -> dict[str, float]:
    """How the model's makers sample, from generation_config.json; empty when they do not say."""
    generation = read_json(folder / "generation_config.json")
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    found: dict[str, float] = {}
    for name in MODEL_DEFAULTS:
        value = generation.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            _log.warning("generation_config.json of %s is not followed: %s", folder, error)
        else:
            found[name] = value
    return found

"""Which GGUF families are read, and what their tensors and settings are called in mlx-lm."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_cb.errors import UnsupportedModel
from mlx_cb.model.gguf.file import GGUFFile

_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA3_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: Divisors of llama 3's rotary frequencies; the settings behind them are read back from them.
_ROPE_DIVISORS = "rope_freqs.weight"
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_ROPE_CONTEXT = 8192
#: gemma 3 of 27B: its queries are scaled by the width per head, not by the head's own.
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True, slots=True)
class Family:
    """One family: names of its tensors, and what differs from llama.

    Attributes:
        interleaved_rotary: q and k rows come pair by pair and have to be put back.
        norm_offset: subtracted from norm weights, where GGUF has added what mlx-lm adds itself.
        dtype: of plain values and scales; float16 is too narrow for some.
    """

    model_type: str
    names: dict[str, str] = field(default_factory=lambda: _LLAMA_NAMES)
    interleaved_rotary: bool = False
    norm_offset: float = 0.0
    dtype: mx.Dtype = mx.float16


FAMILIES = {
    "llama": Family("llama", interleaved_rotary=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", _LLAMA_NAMES | _HEAD_NORMS),
    "gemma3": Family(
        "gemma3_text",
        _LLAMA_NAMES | _HEAD_NORMS | _GEMMA3_NAMES,
        norm_offset=1.0,
        dtype=mx.bfloat16,
    ),
}


def family_of(file: GGUFFile) -> Family:
    """The family of a file. Raises UnsupportedModel, naming it, when it is not read."""
    architecture = file.metadata.get("general.architecture")
    family = FAMILIES.get(str(architecture))
    if family is None:
        raise UnsupportedModel(
            f"{file.path} holds a model of the family {architecture!r}; from GGUF only "
            f"{', '.join(FAMILIES)} are read. Hint: use the safetensors checkpoint."
        )
    return family


def weight_name(name: str, family: Family) -> str:
    """mlx-lm's name of a GGUF tensor. Raises UnsupportedModel, naming it, without one."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    stem = family.names.get(match.group(2)) if match else None
    if match is None or stem is None:
        raise UnsupportedModel(
            f"the GGUF tensor {name!r} has no counterpart in mlx-lm's {family.model_type}. "
            "Hint: use the safetensors checkpoint."
        )
    prefix = f"model.layers.{match.group(1)}." if match.group(1) else ""
    return f"{prefix}{stem}.{match.group(3)}"


def config_of(file: GGUFFile, family: Family) -> dict[str, Any]:
    """The config.json of a file. Raises UnsupportedModel for a missing setting, by its name."""
    metadata = file.metadata
    prefix = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{prefix}.{key}", default)
        if value is None:
            raise UnsupportedModel(f"{file.path} has no '{prefix}.{key}' in its metadata")
        return value

    heads, width = get("attention.head_count"), get("embedding_length")
    config = {
        "model_type": family.model_type,
        "hidden_size": width,
        "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", width // heads),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, prefix),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": _endings(metadata),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
    }
    if family.model_type == "gemma3_text":
        is_27b = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
        config |= {
            "query_pre_attn_scalar": width // heads if is_27b else config["head_dim"],
            "sliding_window": get("attention.sliding_window"),
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
        }
    return config


def _endings(metadata: dict[str, Any]) -> list[int]:
    """Ids that end a text, a turn (eot) or a message to a tool (eom)."""
    names = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    return sorted({metadata[name] for name in names if name in metadata})


def _rope_scaling(file: GGUFFile, prefix: str) -> dict[str, Any] | None:
    if _ROPE_DIVISORS in file.tensors:
        return _llama3_scaling(file, prefix)
    kind = file.metadata.get(f"{prefix}.rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": file.metadata[f"{prefix}.rope.scaling.factor"]}
    context = file.metadata.get(f"{prefix}.rope.scaling.original_context_length")
    if kind == "yarn" and context:
        return scaling | {"original_max_position_embeddings": context}
    if kind != "linear":
        raise UnsupportedModel(
            f"{file.path} scales its rotary positions by {kind!r}, which is not read. "
            "Hint: use the safetensors checkpoint."
        )
    return scaling


def _llama3_scaling(file: GGUFFile, prefix: str) -> dict[str, Any]:
    """Llama 3's settings, accepted only when they give exactly the divisors in the file."""
    found = file.tensors[_ROPE_DIVISORS].data.view(np.float32).reshape(-1)
    factor, theta = float(found.max()), file.metadata[f"{prefix}.rope.freq_base"]
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    exponents = np.arange(0, 2 * found.size, 2) / (2 * found.size)
    turns = _LLAMA3_ROPE_CONTEXT * theta**-exponents / (2 * np.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1 - share) / factor + share)
    if not np.allclose(found, expected, rtol=1e-3):
        raise UnsupportedModel(
            f"the GGUF tensor {_ROPE_DIVISORS!r} holds rotary divisors that are not llama 3's. "
            "Hint: use the safetensors checkpoint."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "original_max_position_embeddings": _LLAMA3_ROPE_CONTEXT,
        **_LLAMA3_ROPE,
    }

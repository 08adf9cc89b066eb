"""Turns a llama-family GGUF file into a folder that mlx-lm loads, once, in the cache.

Knows GGUF's names and layouts; knows nothing about serving. Quantized tensors keep their bits:
Q4_0, Q4_1 and Q8_0 are MLX's affine form with groups of 32.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_cb.errors import UnsupportedModel

GROUP_SIZE = 32
FORMAT_VERSION = 1  # of the converted folder; a new one converts again

_TENSOR_NAMES = {
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
_CONTROL_TOKEN = 3

#: How a vocabulary's text is cut before byte-pair merging, by `tokenizer.ggml.pre`.
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
    "gpt-2": [
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def convert(file: Path, cache_dir: Path) -> Path:
    """Folder with config, weights and tokenizer of a GGUF file, converted once.

    Raises UnsupportedModel, naming the tensor, type or tokenizer that has no counterpart.
    """
    state = file.stat()
    key = f"{file.resolve()}:{state.st_size}:{state.st_mtime_ns}:{FORMAT_VERSION}"
    digest = hashlib.blake2b(key.encode(), digest_size=6).hexdigest()
    target = cache_dir / "gguf" / f"{file.stem}-{digest}"
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".convert-", dir=target.parent))
    try:
        _write_folder(file, scratch)
        try:
            os.rename(scratch, target)
        except OSError:
            if not (target / "config.json").exists():  # another process was not faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write_folder(file: Path, folder: Path) -> None:
    try:
        loaded: Any = mx.load(str(file), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise UnsupportedModel(
            f"{file} cannot be read as GGUF: {error}. Hint: the file may be cut off, or use a "
            "quantization other than Q4_0, Q4_1, Q8_0 or F16."
        ) from error
    tensors, metadata = loaded
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(
            f"{file} holds a model of the family {architecture!r}; from GGUF only 'llama' is read. "
            "Hint: use the safetensors checkpoint."
        )
    config = _config(metadata, has_head="output.weight" in tensors)
    quantized = any(name.endswith(".scales") for name in tensors)
    if quantized:
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": 4}
    weights = {_tensor_name(name): array for name, array in tensors.items()}
    _unpermute_rotary(weights, config)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(file, metadata)))
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(metadata), indent=1))
    # Last, because its presence says that the folder is complete.
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _config(metadata: dict[str, Any], *, has_head: bool) -> dict[str, Any]:
    def number(key: str, default: float | None = None) -> Any:
        value = metadata.get(f"llama.{key}", default)
        if value is None:
            raise UnsupportedModel(f"the GGUF file has no 'llama.{key}' in its metadata")
        return value.item() if isinstance(value, mx.array) else value

    heads = number("attention.head_count")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": number("context_length"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "tie_word_embeddings": not has_head,
        "eos_token_id": _token_id(metadata, "eos"),
        "bos_token_id": _token_id(metadata, "bos"),
        "torch_dtype": "float16",
    }


def _tensor_name(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|scales|biases|bias)", name)
    stem = _TENSOR_NAMES.get(match.group(2)) if match else None
    if match is None or stem is None:
        raise UnsupportedModel(f"the GGUF tensor {name!r} has no counterpart in mlx-lm's llama")
    prefix = f"model.layers.{match.group(1)}." if match.group(1) else ""
    return f"{prefix}{stem}.{match.group(3)}"


def _unpermute_rotary(weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    """Put the rows of q and k back into half-split order.

    llama-family GGUF interleaves each head's rotary pairs; mlx-lm (like Hugging Face) keeps the
    two halves apart. Rows move whole, so quantized rows move with their scales.
    """
    for name, array in weights.items():
        for projection, heads in (
            ("q_proj", config["num_attention_heads"]),
            ("k_proj", config["num_key_value_heads"]),
        ):
            if f".{projection}." in name:
                paired = array.reshape(heads, -1, 2, *array.shape[1:])
                weights[name] = paired.swapaxes(1, 2).reshape(array.shape)


def _token_id(metadata: dict[str, Any], kind: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return None if value is None else int(value.item())


def _tokenizer(file: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """Content of a Hugging Face tokenizer.json for a byte-level BPE vocabulary."""
    kind, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or cut not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{file} has a {kind!r} tokenizer of the kind {cut!r}, which is not converted. "
            "Hint: use the safetensors checkpoint."
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"].tolist()
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type == _CONTROL_TOKEN
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[cut]},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]

    def token(kind: str) -> str | None:
        token_id = _token_id(metadata, kind)
        return None if token_id is None else tokens[token_id]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata["llama.context_length"].item()),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }

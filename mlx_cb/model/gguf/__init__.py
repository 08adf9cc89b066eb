"""Turns a GGUF file into a folder that mlx-lm loads, once, in the cache.

Knows nothing about serving. Quantized tensors keep their bits where MLX has the same form; what has
no counterpart is refused with the tensor, type or tokenizer named.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_cb.errors import UnsupportedModel
from mlx_cb.model.gguf.families import Family, config_of, family_of, weight_name
from mlx_cb.model.gguf.file import GGUFFile
from mlx_cb.model.gguf.tensors import GROUP_SIZE, convert_tensor
from mlx_cb.model.gguf.tokenizer import tokenizer_config, tokenizer_json

FORMAT_VERSION = 3  # of the converted folder; a new one converts again
_NOT_WEIGHTS = {"rope_freqs.weight"}  # what it says is in the config


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


def _write_folder(path: Path, folder: Path) -> None:
    file = GGUFFile(path)
    parts = file.metadata.get("split.count", 1)
    if parts > 1:
        raise UnsupportedModel(
            f"{path} is one of {parts} parts of a model. Hint: join them, e.g. with llama.cpp's "
            "gguf-split --merge, or use the safetensors checkpoint."
        )
    family = family_of(file)
    config = config_of(file, family)
    tokenizer = tokenizer_json(file)
    weights, quantization = _weights(file, family, config)
    if quantization:
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": 4, **quantization}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(file), indent=1))
    # Last, because its presence says that the folder is complete.
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _weights(
    file: GGUFFile, family: Family, config: dict[str, Any]
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """All arrays by mlx-lm's names, and the quantization of each layer that has one."""
    weights: dict[str, mx.array] = {}
    quantization: dict[str, Any] = {}
    for name, tensor in file.tensors.items():
        if name in _NOT_WEIGHTS:
            continue
        stem, _, suffix = weight_name(name, family).rpartition(".")
        is_norm = "norm" in stem
        converted = convert_tensor(tensor, mx.float32 if is_norm else family.dtype)
        for kind, array in converted.arrays.items():
            if is_norm:  # before the type narrows, because one plus little is rounded hard
                array = (array - family.norm_offset).astype(family.dtype)
            if family.interleaved_rotary:
                array = _unpermute_rotary(stem, array, config)
            weights[f"{stem}.{suffix if kind == 'weight' else kind}"] = array
        if converted.bits is not None:
            quantization[stem] = {"group_size": GROUP_SIZE, "bits": converted.bits}
    return weights, quantization


def _unpermute_rotary(stem: str, array: mx.array, config: dict[str, Any]) -> mx.array:
    """Put the rows of q and k back into half-split order.

    llama-family GGUF interleaves each head's rotary pairs; mlx-lm (like Hugging Face) keeps the
    two halves apart. Rows move whole, so quantized rows move with their scales.
    """
    heads_of = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    heads = heads_of.get(stem.rpartition(".")[2])
    if heads is None:
        return array
    paired = array.reshape(heads, -1, 2, *array.shape[1:])
    return paired.swapaxes(1, 2).reshape(array.shape)

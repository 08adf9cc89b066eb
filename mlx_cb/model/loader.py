"""Loads weights into one of mlx-lm's model classes, whole or not at all."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx.utils import tree_flatten, tree_map

from mlx_cb.config import ModelConfig
from mlx_cb.errors import ModelNotFound, OutOfMemory, UnsupportedModel
from mlx_cb.model.checkpoint import (
    eos_token_ids,
    generation_defaults,
    max_model_len,
    read_json,
)
from mlx_cb.model.pooling import as_generating, pooling_of
from mlx_cb.model.resolve import resolve
from mlx_cb.model.weight_layout import lay_out_for_blas

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
MAX_MEMORY_SHARE = 0.7  # of what is available, for the weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run and what its files say about it.

    Attributes:
        quantization: describes the weights as they are computed with, None for plain ones.
        generation_defaults: sampling parameters for clients that name none.
        pooling: `mean` or `last` for an embedding model, None for one that generates.
    """

    model: nn.Module
    config: dict[str, Any]
    path: Path
    architecture: str
    dtype: mx.Dtype
    quantization: str | None
    num_parameters: int
    weights_bytes: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    generation_defaults: dict[str, float] = field(default_factory=dict)
    pooling: str | None = None


def load(config: ModelConfig) -> LoadedModel:
    """Load a model. Raises ModelNotFound, UnsupportedModel or OutOfMemory in one sentence."""
    opened = open_model(config)
    check_memory(opened.path.name, opened.weights_bytes)
    if mx.default_device().type == mx.DeviceType.cpu:
        lay_out_for_blas(opened.model)
    try:
        mx.eval(opened.model.parameters())
    except (ValueError, RuntimeError, OSError) as error:
        raise _load_error(opened.path, error) from error
    return opened


def open_model(config: ModelConfig) -> LoadedModel:
    """The model as it would be loaded, its weights still in the files.

    Raises ModelNotFound or UnsupportedModel in one sentence.
    """
    path = resolve(config)
    _check_config(path)
    _check_files(path)
    from mlx_lm.utils import get_total_parameters, load_model

    try:
        pooling = pooling_of(path, config.embeddings)
        given = {} if pooling is None else as_generating(path)
        model, model_config = load_model(path, lazy=True, **given)
        model_config = dict(model_config)
        parameters = get_total_parameters(model)
        dtype = _compute_dtype(config, model, parameters)
        if dtype is not None:
            _expand(model, dtype)
        if config.adapter is not None:
            from mlx_cb.model.adapter import apply_adapter

            apply_adapter(model, Path(config.adapter).expanduser())
    except SystemExit as error:  # a model file that wants a package which is not installed
        raise UnsupportedModel(
            f"{path}: mlx-lm's file for this family needs a package that is not installed. "
            "Hint: its name is in the line above."
        ) from error
    except (ValueError, KeyError, TypeError, RuntimeError, OSError) as error:
        raise _load_error(path, error) from error
    text_config = {**model_config, **(model_config.get("text_config") or {})}
    return LoadedModel(
        model=model,
        config=text_config,
        path=path,
        architecture=str(model_config.get("model_type")),
        dtype=_activation_dtype(model),
        quantization=_describe_quantization(model),
        num_parameters=parameters,
        weights_bytes=sum(array.nbytes for array in _arrays(model)),
        max_model_len=max_model_len(text_config, config.max_model_len),
        eos_token_ids=eos_token_ids(path, model_config),
        generation_defaults=generation_defaults(path),
        pooling=pooling,
    )


def _check_files(path: Path) -> None:
    """Every shard that the index names must be there, and every safetensors file whole."""
    shards = sorted(path.glob("model*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(name for name in named if not (path / name).is_file())
        if missing:
            raise ModelNotFound(
                f"{path} lacks {len(missing)} of {len(named)} weight files, first {missing[0]}. "
                "Hint: download the model again."
            )
    if not shards:
        raise ModelNotFound(
            f"{path} holds no model*.safetensors file. Hint: download the weights, or convert them."
        )
    for shard in shards:
        if not shard.is_file():
            raise ModelNotFound(f"{shard} leads nowhere. Hint: download the model again.")
        size = shard.stat().st_size
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(length)) if 0 < length <= size - 8 else None
            except ValueError:
                header = None
        expected = -1
        if header is not None:
            ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
            expected = 8 + length + max(ends, default=0)
        if size != expected:
            raise ModelNotFound(
                f"{shard} is damaged or cut off: it has {size} bytes"
                f"{f' of {expected}' if expected > 0 else ''}. Hint: download it again."
            )


def _check_config(path: Path) -> None:
    """The config must be an object that names its family, and no program of its own."""
    file = path / "config.json"
    try:
        config = read_json(file)
    except ValueError as error:
        raise UnsupportedModel(
            f"{file} is not JSON ({error}). Hint: download the model again."
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UnsupportedModel(
            f"{file} has no model_type, so nobody knows how to run this model. "
            "Hint: is this the folder of a language model, with its original config?"
        )
    if named := config.get("model_file"):
        raise UnsupportedModel(
            f"{path} wants its own program {named!r} to be run, which is never done here. "
            "Hint: take a model of a family that mlx-lm knows."
        )


def _load_error(path: Path, error: Exception) -> Exception:
    if isinstance(error, (UnsupportedModel, OutOfMemory, ModelNotFound)):
        return error
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "not supported" in text:
        return UnsupportedModel(f"{path}: {text} Hint: see the supported models in the README.")
    return UnsupportedModel(
        f"{path} cannot be loaded: {text}. Hint: the files may be damaged or for another program."
    )


def _compute_dtype(config: ModelConfig, model: nn.Module, parameters: int) -> mx.Dtype | None:
    """Type that all weights are expanded to, None to compute with them as they are.

    On the CPU backend a quantized product is scalar and does not batch, and only float32 reaches
    the BLAS, so float32 is taken when it fits.
    """
    if config.dtype != "auto":
        if config.dtype not in DTYPES:
            raise UnsupportedModel(f"dtype {config.dtype!r} is not one of {', '.join(DTYPES)}")
        return DTYPES[config.dtype]
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    fits = parameters * 4 < MAX_MEMORY_SHARE * psutil.virtual_memory().available
    return mx.float32 if on_cpu and fits else None


def check_memory(name: str, weights_bytes: int) -> None:
    """Raise OutOfMemory when the weights are larger than what is available."""
    available = psutil.virtual_memory().available
    if weights_bytes > available:
        raise OutOfMemory(
            f"The weights of {name} take {weights_bytes / 2**30:.1f} GiB and "
            f"{available / 2**30:.1f} GiB of memory are available. "
            "Hint: take a smaller or more quantized model."
        )


def _expand(model: nn.Module, dtype: mx.Dtype) -> None:
    """Replace quantized weights by plain ones, lazily.

    Every second layer goes to a stream of its own: expanding is scalar work and most of a start on
    the CPU backend, which runs one stream on one core.
    """
    from mlx_lm.utils import dequantize_model

    # Scales first: a dequantized weight has the type of its scales.
    model.update(
        tree_map(
            lambda array: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array,
            model.parameters(),
        )
    )
    with mx.stream(mx.new_stream(mx.default_device())):
        for layer in getattr(model, "layers", [])[::2]:
            dequantize_model(layer)
    dequantize_model(model)


def _arrays(model: nn.Module) -> list[mx.array]:
    leaves: Any = tree_flatten(model.parameters())
    return [array for _, array in leaves]


def _activation_dtype(model: nn.Module) -> mx.Dtype:
    """The floating type that most parameters have, scales included."""
    sizes: dict[mx.Dtype, int] = {}
    for array in _arrays(model):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.size
    return max(sizes, key=lambda dtype: sizes[dtype])


def _describe_quantization(model: nn.Module) -> str | None:
    kinds = {
        f"{module.bits}-bit group {module.group_size}"
        for module in model.modules()
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    }
    return ", ".join(sorted(kinds)) or None

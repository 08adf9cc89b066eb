"""Puts a LoRA or DoRA adapter into a loaded model, and into its weights where they are plain."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear
from mlx_lm.tuner.utils import load_adapters

from mlx_cb.errors import ModelNotFound, UnsupportedModel

_ADAPTED = (LoRALinear, LoRAEmbedding, LoRASwitchLinear, DoRALinear, DoRAEmbedding)
_FILES = ("adapter_config.json", "adapters.safetensors")


def apply_adapter(model: nn.Module, folder: Path) -> None:
    """Load an adapter as mlx-lm writes it. Quantized layers keep it beside their weights.

    Raises ModelNotFound for a folder without one, UnsupportedModel for one of another model.
    """
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise ModelNotFound(
            f"{folder} has no {' and no '.join(missing)}, so it is not an adapter. "
            "Hint: name the folder that mlx_lm.lora wrote."
        )
    try:
        load_adapters(model, str(folder))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnsupportedModel(
            f"the adapter {folder} does not fit the model: {error}. "
            "Hint: was it trained on another model?"
        ) from error
    model.eval()
    _fuse_plain(model)


def _fuse_plain(model: nn.Module) -> None:
    """Add the change to plain weights, so that a step does not compute it again."""
    fused = []
    for name, module in model.named_modules():
        if isinstance(module, _ADAPTED):
            inner = module.embedding if "embedding" in module else module.linear
            if "scales" not in inner:
                fused.append((name, module.fuse()))
    if fused:
        model.update_modules(tree_unflatten(fused))

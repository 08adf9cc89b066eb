"""Builds a tiny random model of any family."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path, tree_unflatten
from mlx_lm.models.bitlinear_layers import BitLinear

from tests.families.configs import config

WEIGHT_SCALE = 2.0
EMBEDDING_SCALE = 0.5
NOISE = 0.1


def build(family: str, settings: dict[str, Any] | None = None, seed: int = 0) -> nn.Module:
    """A float32 model whose next token depends on what it attended to.

    `settings` stand for the family's tiny configuration when given.
    """
    mx.random.seed(seed)
    # Only asked for by the olmo file, to see whether it is there; nothing in it is used.
    sys.modules.setdefault("hf_olmo", ModuleType("hf_olmo"))
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model: Any = module.Model(module.ModelArgs.from_dict(settings or config(family)))
    _replace_metal_only(model)
    # Matrices larger than their default, so that what was attended to decides the next token;
    # noise on everything, because biases, sinks and gates start at zero and would test nothing.
    model.update(tree_map_with_path(_randomize, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _replace_metal_only(model: nn.Module) -> None:
    """Packed ternary products exist as a Metal kernel only; plain ones of the same shape do."""
    replacements = [
        (name, nn.Linear(module.in_features, module.out_features, bias=module.bias is not None))
        for name, module in model.named_modules()
        if isinstance(module, BitLinear)
    ]
    model.update_modules(tree_unflatten(replacements))


def _randomize(path: str, array: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    scale = 1.0
    if array.ndim > 1 and path.endswith("weight"):
        # Small embeddings: a tied head would else only repeat the last token.
        scale = EMBEDDING_SCALE if "embed" in path or "wte" in path else WEIGHT_SCALE
    return array.astype(mx.float32) * scale + NOISE * mx.random.normal(array.shape)

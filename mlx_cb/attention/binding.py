"""Lets mlx-lm's own layers attend over blocks, by rebinding one name in the model's own modules."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from mlx_cb.attention.cache import PagedKV
from mlx_cb.attention.latent import RotatedScores
from mlx_cb.errors import UnsupportedModel

_NAME = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's function of this name, which also understands handles of keys in blocks.

    Dispatch is on the keys and never on `cache`: layers that share another layer's keys pass no
    cache at all.
    """
    if not isinstance(keys, PagedKV):
        return base.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )
    if isinstance(mask, RotatedScores) and mask.layer is keys.cache.layer:
        return keys.cache.attend_latent(queries, mask.queries, scale)
    if mask is not None:
        raise UnsupportedModel("a layer built its own attention mask, which blocks cannot follow")
    return keys.cache.attend(queries, scale, sinks)


def bind(model: nn.Module) -> int:
    """Rebind the attention function in the modules that define this model's layers.

    Only where the name is mlx-lm's own function (or already ours). Returns the number of modules
    bound; zero means that the model attends in a way of its own.
    """
    names = {type(module).__module__ for module in model.modules()}
    bound = 0
    for name in names:
        module = sys.modules.get(name)
        current = getattr(module, _NAME, None)
        if current is base.scaled_dot_product_attention:
            setattr(module, _NAME, scaled_dot_product_attention)
        if current in (base.scaled_dot_product_attention, scaled_dot_product_attention):
            bound += 1
    return bound

"""Lays float32 weights out in memory the way the CPU's BLAS reads them; knows no model.

A layer's product is `x @ weight.T`, with `weight` (outputs, inputs). OpenBLAS packs the weights
anew for every product, and packs rows of outputs up to twice as fast as rows of inputs: with the
few rows of a decode step the packing is most of the product. Only the strides change: shape,
values and the bits of every product stay the same.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


def lay_out_for_blas(model: nn.Module) -> int:
    """Store the float32 weights of linear layers and embeddings inputs first, lazily.

    An embedding is laid out too, because a tied one is the largest product of a step; looking a
    row up in it takes longer then, by less than the product saves.

    Returns: the number of layers laid out.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight.dtype == mx.float32:
            module.weight = mx.contiguous(module.weight.T).T
            count += 1
    return count

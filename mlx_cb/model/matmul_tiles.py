"""How many rows MLX's matrix products on this machine compute at once.

On a GPU a step of 33 rows then takes as long as one of 64, on a CPU one of 63 rows longer than one
of 64: steps are best made of whole tiles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlx_cb.attention.select import runs_on_metal
from mlx_cb.attention.tuning import gpu_architecture

TILE = 32  # measured: mlx PR #3863 (M3 Max), constant from 10 to 32 rows and double at 33
WIDE_TILE = 64  # with matrix units in the GPU's cores: generation 17 (M5) on
_WIDE_FROM = 17
#: OpenBLAS (kernels for Haswell and Zen) takes rows by fours; two and one that are left over are
#: each another pass over the weights. Measured here, products of the demo model's shapes: 269 ms
#: for 63 rows and 237 for 64, 130 for 15 and 98 for 16.
CPU_TILE = 4
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def tile_rows(config: Mapping[str, Any], *, is_quantized: bool) -> int:
    """Rows of a tile for the model with this configuration; 1 where there are no steps in cost.

    A mixture of experts reads more experts with every row, and MLX's CPU backend takes quantized
    weights row by row.
    """
    if any((config.get(name) or 0) > 1 for name in _EXPERTS):
        return 1
    if not runs_on_metal():
        return 1 if is_quantized else CPU_TILE
    return tile_of(gpu_architecture())


def tile_of(architecture: str) -> int:
    """Of a dense model on a GPU called like `applegpu_g16s`."""
    generation = re.search(r"_g(\d+)", architecture)
    return WIDE_TILE if generation and int(generation[1]) >= _WIDE_FROM else TILE

"""How many tokens a step may hold: by predicted time, not by count.

Source: performance.md §2 (tiles) and §3; the dynamic control that Sarathi-Serve (Agrawal et al.
2024) leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_cb.config import SchedulerConfig
from mlx_cb.core.cost_model import StepCostModel

#: Times a step of decodes alone that a step may take: more shortens what a long prompt waits, less
#: the streams' gaps beside it. At 2.8 a prompt of 1024 tokens beside 8 streams takes 1.3 to 1.6
#: times its time on an idle machine, and their gaps 2.9 times those before it
#: (docs/performance.md).
STRETCH = 2.8
IDLE_STRETCH = 2.5  # times the inter-token target that a step without streams may take
EFFICIENT = 4.0  # times the smallest step: from there on a prefill step is nearly as good as any


@dataclass(frozen=True, slots=True)
class StepShape:
    """What is known of a step before prefill is added.

    Attributes:
        num_decodes: rows that are in it anyway.
        crowd: rows of decode that there will be once those who wait have joined.
        context: tokens that the decodes attend to.
        prefix: tokens before the longest running prompt's next chunk; each of its rows reads all.
    """

    num_decodes: int
    crowd: int
    context: int
    prefix: int = 0


def token_budget(config: SchedulerConfig, cost_model: StepCostModel, shape: StepShape) -> int:
    """Most rows of the step, the decodes included; at least one.

    While streams run, the step stays within a few times the gap that they will have anyway with
    everyone joined; while none runs, it is as large as it takes to prefill efficiently.
    """
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    target = config.itl_target_ms / 1e3
    if shape.num_decodes == 0:
        target = max(IDLE_STRETCH * target, EFFICIENT * cost_model.predict(1, 0))
    else:
        target = max(target, STRETCH * cost_model.predict(shape.crowd, shape.context))
    rows = cost_model.rows_within(target, shape.context, shape.num_decodes, shape.prefix)
    return _whole_tiles(rows, shape.num_decodes, config.tile_rows or 1)


def _whole_tiles(rows: int, num_decodes: int, tile: int) -> int:
    """Round down to tiles: one row more than a tile costs as much as two tiles.

    A tile that the decodes do not fill is there in any case, and is left to prefill.
    """
    if tile == 1:
        return rows
    return tile * max(rows // tile, num_decodes // tile + 1)

"""How many tokens a step may hold: by predicted time, not by count.

Source: performance.md §3; the dynamic control that Sarathi-Serve (Agrawal et al. 2024) leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_cb.config import SchedulerConfig
from mlx_cb.core.cost_model import StepCostModel

STRETCH = 2.5  # times the inter-token target, or a step of decodes alone, that a step may take
EFFICIENT = 4.0  # times the smallest step: from there on a prefill step is nearly as good as any


@dataclass(frozen=True, slots=True)
class StepShape:
    """What is known of a step before prefill is added.

    Attributes:
        num_decodes: rows that are in it anyway.
        crowd: rows of decode that there will be once those who wait have joined.
        context: tokens that the decodes attend to.
    """

    num_decodes: int
    crowd: int
    context: int


def token_budget(config: SchedulerConfig, cost_model: StepCostModel, shape: StepShape) -> int:
    """Most rows of the step, the decodes included; at least one.

    While streams run, the step stays within a few times the gap that they will have anyway with
    everyone joined; while none runs, it is as large as it takes to prefill efficiently.
    """
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    target = config.itl_target_ms / 1e3
    if shape.num_decodes == 0:
        target = max(STRETCH * target, EFFICIENT * cost_model.predict(1, 0))
    else:
        target = max(target, STRETCH * cost_model.predict(shape.crowd, shape.context))
    return cost_model.rows_within(target, shape.context)

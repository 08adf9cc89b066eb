"""mlx-cb: continuous batching for language models on MLX.

Public names: `LLM`, `EngineConfig`, `SamplingParams`. Import this package before MLX, so that on
Linux a fast BLAS is there when MLX looks for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_cb.config import EngineConfig
from mlx_cb.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mlx_cb.engine.llm import LLM

__all__ = ["LLM", "EngineConfig", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Late, so that the command line does not load MLX to print its help.
    if name == "LLM":
        from mlx_cb.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'mlx_cb' has no attribute {name!r}")

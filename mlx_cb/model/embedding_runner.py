"""Runs an embedding model's steps: the same batches, and one vector per text instead of tokens.

A text's chunks come in whatever steps the scheduler makes; the states of its tokens are added up
as they come (mean), or the last one is taken (last). Knows nothing about who asked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_cb.core.outputs import SampledToken
from mlx_cb.core.request import Request
from mlx_cb.model.cache_spec import CacheSpec
from mlx_cb.model.loader import LoadedModel
from mlx_cb.model.pooling import MEAN, trunk_of
from mlx_cb.model.runner import LaunchedStep, ModelRunner, RunnerSettings
from mlx_cb.model.sampler import SampleRow


class EmbeddingRunner(ModelRunner):
    """A ModelRunner whose rows are the trunk's states, (R, hidden size)."""

    def __init__(self, loaded: LoadedModel, spec: CacheSpec, *, settings: RunnerSettings) -> None:
        """Raises UnsupportedModel when the family's trunk cannot be run alone."""
        trunk = replace(loaded, model=trunk_of(loaded.model))
        super().__init__(trunk, spec, settings=settings)
        self._takes_mean = loaded.pooling == MEAN
        self._sums: dict[str, NDArray[np.float32]] = {}

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that has ended."""
        self._sums.pop(request_id, None)
        super().forget(request_id)

    def reset(self) -> None:
        """Give up everything that is kept between steps, after a step that failed."""
        self._sums.clear()
        super().reset()

    def _wants_logits(self, request: Request) -> bool:
        return True

    def _choose_now(
        self, logits: mx.array | None, requests: list[Request], rows: list[SampleRow]
    ) -> mx.array | None:
        return None  # there is nothing to choose, and the states are wanted on the host

    def _choose_late(self, step: LaunchedStep) -> NDArray[Any]:
        return np.zeros(len(step.requests), dtype=np.int64)

    def _collect_prompt_logprobs(self, step: LaunchedStep, logits: Any) -> None:
        """Add up the states of a chunk's tokens, all but the text's last."""
        first = 0
        for chunk, count in step.batch.prompt_rows:
            request_id = chunk.request.request_id
            part = logits[first : first + count].sum(axis=0, dtype=np.float32)
            known = self._sums.get(request_id) if chunk.start > 0 else None
            self._sums[request_id] = part if known is None else known + part
            first += count

    def _sampled_token(self, request: Request, token_id: int, logits: Any) -> SampledToken:
        vector = np.array(logits, dtype=np.float32)
        if self._takes_mean:
            vector += self._sums.pop(request.request_id, np.float32(0.0))
            vector /= request.num_prompt_tokens
        length = float(np.linalg.norm(vector))
        return SampledToken(
            token_id, embedding=(vector / max(length, 1e-12)).astype("<f4").tobytes()
        )

"""The device sampler over sample_rows: the tokens of sampler.choose_on_host, without a sort.

Owns: turning rows' parameters into the kernel's columns, and the proof before its first use. Knows
nothing about penalties, biases or grammars: logits come adjusted.
"""

from __future__ import annotations

import logging

import mlx.core as mx

from mlx_cb.attention.kernels import Launcher
from mlx_cb.model import sampler
from mlx_cb.model.metal_cases import SampleCase, filters_of
from mlx_cb.model.metal_ops import sample_rows
from mlx_cb.model.sampler import SampleRow

_log = logging.getLogger(__name__)


class MetalSampler:
    """Chooses tokens on the device; falls back to the sorting sampler if the kernel is wrong."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self._usable: bool | None = None

    def choose(self, logits: mx.array, rows: list[SampleRow]) -> mx.array:
        """Token id of each row of adjusted (R, V) logits, as a lazy (R,) int32 array."""
        params = [row.request.params for row in rows]
        if all(p.is_greedy for p in params) or not self._is_usable():
            return sampler.choose_on_device(logits, rows)
        columns = [
            (1, 1.0, 0.0, 0.0)
            if p.is_greedy
            else (p.top_k or 0, p.top_p, p.min_p, min(row.uniform, 1.0 - 2.0**-24))
            for p, row in zip(params, rows, strict=True)
        ]
        temperature = mx.array([[1.0 if p.is_greedy else p.temperature] for p in params])
        _, token = sample_rows(
            logits.astype(mx.float32) / temperature, filters_of(columns), self._launch
        )
        return token

    def _is_usable(self) -> bool:
        if self._usable is None:
            self._usable = self._proves_right()
        return self._usable

    def _proves_right(self) -> bool:
        for vocabulary in (300, 5000):
            problem = SampleCase(vocabulary).build()
            try:
                error = problem.error(problem.run(self._launch))
            except (RuntimeError, ValueError) as failure:
                _log.warning("Metal kernel sample_rows is switched off: %s", str(failure)[:300])
                return False
            if not error <= problem.tolerance:
                _log.warning("Metal kernel sample_rows is switched off: error %.1e", error)
                return False
        return True

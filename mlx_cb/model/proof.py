"""Proves a layout by numbers at load: its logits must be those of mlx-lm's own run of the model.

The trials of `probe` find what cannot run; this finds what would run and be wrong, also in a file
that nobody has tested: one of a newer mlx-lm, or one that comes with a checkpoint. A layout that
disagrees is passed over for a slower one, and a model without one that agrees is refused.
"""

from __future__ import annotations

import logging

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from mlx_cb.attention.reference import ReferenceBackend
from mlx_cb.errors import UnsupportedModel
from mlx_cb.model.cache_spec import CacheSpec
from mlx_cb.model.probe import TRIAL_BLOCK_SIZE, TrialRun, layouts

_log = logging.getLogger(__name__)

#: Least cosine between the logits of a row and mlx-lm's, each around its mean. What is wrong is
#: far below; narrow types round differently in rows of another number, and an expert may change.
LEAST_LIKENESS = {mx.float32: 0.9999}
LEAST_LIKENESS_NARROW = 0.98

_TEXTS = ([3, 17, 5, 41, 8, 29, 60, 2, 11], [23, 7, 52, 14, 90, 31, 4, 77, 19])

Logits = NDArray[np.float64]


def prove(model: nn.Module, architecture: str, dtype: mx.Dtype) -> CacheSpec:
    """The fastest layout whose logits agree with mlx-lm's own; `dtype` is the activations'.

    Raises UnsupportedModel with the family's name and the reason.
    """
    least = LEAST_LIKENESS.get(dtype, LEAST_LIKENESS_NARROW)
    wanted: list[Logits] = []
    faults = []
    for spec in layouts(model, architecture):
        wanted = wanted or _own_logits(model, architecture)
        fault = _fault(model, spec, wanted, least)
        if fault is None:
            return spec
        faults.append(f"{spec.layout.value}: {fault}")
        _log.warning("%s is not run in a layout that differs, %s", architecture, faults[-1])
    raise UnsupportedModel(
        f"{architecture} is not served: no layout gives mlx-lm's own logits ({'; '.join(faults)})"
    )


def _own_logits(model: nn.Module, architecture: str) -> list[Logits]:
    """(tokens, vocabulary) for each text, through mlx-lm's own caches."""
    try:
        return [
            _numbers(model(mx.array([text]), cache=make_prompt_cache(model))[0]) for text in _TEXTS
        ]
    except Exception as error:
        raise UnsupportedModel(f"{architecture} does not run here: {error}") from error


def _fault(model: nn.Module, spec: CacheSpec, wanted: list[Logits], least: float) -> str | None:
    """How a short run of two texts differs from mlx-lm's; None when it agrees."""
    try:
        run = TrialRun(model, spec, ReferenceBackend(TRIAL_BLOCK_SIZE))
        for step in run.steps(_TEXTS):
            logits = _numbers(step.logits)
            for row, (text, count) in zip(logits, step.seen, strict=False):
                likeness = _cosine(row, wanted[text][count - 1])
                if not likeness >= least:  # NaN is no agreement either
                    return f"likeness {likeness:.4f} behind {count} tokens"
    except Exception as error:
        return str(error)
    return None


def _numbers(logits: mx.array) -> Logits:
    return np.array(logits.astype(mx.float32)).astype(np.float64)


def _cosine(left: Logits, right: Logits) -> float:
    if np.allclose(left, right, rtol=1e-4, atol=1e-6):  # also where all are alike, or zero
        return 1.0
    left, right = left - left.mean(), right - right.mean()
    return float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))

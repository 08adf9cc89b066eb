"""Tells one loaded model from any other, so that nothing kept on disk meets the wrong one.

By what is loaded, not by where from: a folder can be replaced, a revision can move.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_cb.model.cache_spec import CacheSpec
from mlx_cb.model.loader import LoadedModel

SAMPLED = 256  # numbers of every parameter


def fingerprint(loaded: LoadedModel, spec: CacheSpec, block_size: int) -> bytes:
    """32 bytes over the architecture, its settings, samples of every weight, and a block's form.

    An adapter, another revision, type or quantization changes some number of nearly every weight
    or their shapes, so samples tell.
    """
    digest = hashlib.blake2b(digest_size=32)
    facts = [
        loaded.architecture,
        json.dumps(loaded.config, sort_keys=True, default=str),
        str(loaded.dtype),
        version("mlx-lm"),
        spec.layout.value,
        repr(spec.layers),
        str(block_size),
    ]
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    named = sorted(_parameters(loaded))
    samples = [_sample(array) for _, array in named]
    mx.eval(samples)
    for (name, array), sample in zip(named, samples, strict=True):
        digest.update(f"{name} {array.shape} {array.dtype}\0".encode())
        digest.update(np.array(sample).tobytes())
    return digest.digest()


def _parameters(loaded: LoadedModel) -> list[tuple[str, mx.array]]:
    named: list[tuple[str, mx.array]] = tree_flatten(loaded.model.parameters())  # type: ignore[assignment]
    return named


def _sample(array: mx.array) -> mx.array:
    """Bytes of numbers spread evenly over an array."""
    flat = array.reshape(-1)
    step = max(1, flat.size // SAMPLED)
    return mx.contiguous(flat[::step]).view(mx.uint8)

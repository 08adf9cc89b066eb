"""What the kernels must compute, in float64 numpy, written to be read rather than to be fast.

Owns: attention, affine dequantization, matmul and the sampler's cut as formulas. Knows nothing
about pools, tiles or MLX.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Mask:
    """window: keys a row sees, itself included; softcap: scores are squashed to +-softcap."""

    scale: float
    window: int | None = None
    softcap: float | None = None


def attend(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    mask: Mask,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Causal attention where query row i is token n - rows + i of n.

    Args:
        queries: (rows, Hq, D). keys: (n, Hkv, D). values: (n, Hkv, DV). sinks: (Hq,) or None.

    Returns:
        (rows, Hq, DV) float64; zero where a row sees no key and there is no sink.
    """
    rows, heads, _ = queries.shape
    n, kv_heads, value_dim = values.shape
    out = np.zeros((rows, heads, value_dim))
    for row in range(rows):
        position = n - rows + row
        first = 0 if mask.window is None else max(0, position + 1 - mask.window)
        seen = slice(first, position + 1)
        if position < 0:
            continue
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = keys[seen, kv].astype(np.float64) @ queries[row, head].astype(np.float64)
            scores = scores * mask.scale
            if mask.softcap is not None:
                scores = mask.softcap * np.tanh(scores / mask.softcap)
            top = scores.max() if sinks is None else max(scores.max(), float(sinks[head]))
            weights = np.exp(scores - top)
            total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head] - top))
            out[row, head] = weights @ values[seen, kv].astype(np.float64) / total
    return out


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """uint32 (..., W) -> codes (..., W * 32 / bits), lowest bits first: MLX's packing."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], -1)


def dequantize(
    codes: np.ndarray, scale: np.ndarray, bias: np.ndarray | None, group: int
) -> np.ndarray:
    """codes (..., D), scale and bias (..., D / group) -> float64 (..., D)."""
    out = codes.astype(np.float64) * np.repeat(scale.astype(np.float64), group, -1)
    return out if bias is None else out + np.repeat(bias.astype(np.float64), group, -1)


def lowest_kept(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[float, float]:
    """The cut of one row of logits (V,).

    Returns:
        The lowest kept logit, and the probability mass (of what top-k left) strictly above it.
    """
    x = logits.astype(np.float64)
    order = np.sort(x)[::-1]
    if 0 < top_k < len(x):
        order = order[order >= order[top_k - 1]]
    mass = np.exp(order - order[0])
    mass /= mass.sum()
    keep = len(order)
    if 0.0 < top_p < 1.0:
        keep = int(np.searchsorted(np.cumsum(mass), top_p)) + 1
    cut = order[min(keep, len(order)) - 1]
    if min_p > 0.0:
        cut = max(cut, order[0] + np.log(min(min_p, 1.0)))
    return float(cut), float(mass[order > cut].sum())


def draw(logits: np.ndarray, threshold: float, uniform: float) -> tuple[int, float]:
    """The token that inverse CDF chooses among logits (V,) >= threshold, in the order of ids.

    Returns:
        The token, and how far (in probability) `uniform` is from the nearest boundary.
    """
    x = logits.astype(np.float64)
    kept = np.flatnonzero(x >= threshold)
    mass = np.exp(x[kept] - x.max())
    cumulative = np.cumsum(mass) / mass.sum()
    index = min(int(np.searchsorted(cumulative, uniform, side="right")), len(kept) - 1)
    return int(kept[index]), float(np.abs(cumulative[:-1] - uniform).min(initial=1.0))

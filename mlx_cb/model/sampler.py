"""Chooses the next token of every row of a step, in one pass, each row by its own parameters.

A request's random numbers depend on its seed and the token's position only, never on its batch
mates or on how it was scheduled. Two ways to draw: on the device (pure MLX, nothing is read back,
so the next step can be launched first), and on the host (NumPy, for the CPU backend, whose exp is
scalar and whose logits are in host memory anyway). A test holds them equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_cb.core.outputs import TokenLogprobs
from mlx_cb.core.request import Request
from mlx_cb.sampling_params import SamplingParams

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
BANNED = -1e30
#: Tokens with at least this share of the best one's probability are looked at for top_p, in turn.
CANDIDATE_WEIGHTS = (2.0**-5, 2.0**-10, 2.0**-16)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row to choose a token for. `position` is the place the token will have in its text."""

    request: Request
    position: int

    @property
    def uniform(self) -> float:
        """The row's random number in [0, 1)."""
        return uniform(self.request.seed, self.position)


def uniform(seed: int, position: int) -> float:
    """Random number in [0, 1) of a seed and a position: two rounds of SplitMix64 (Steele 2014)."""
    mixed = _mix64(_mix64(seed + _GOLDEN) ^ (position * _GOLDEN))
    return (mixed >> 11) * 2.0**-53


def _mix64(value: int) -> int:
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _bans_ending(row: SampleRow) -> bool:
    return row.position < row.request.num_prompt_tokens + row.request.params.min_tokens


def _is_adjusted(row: SampleRow) -> bool:
    params = row.request.params
    return bool(params.logit_bias) or params.has_penalties or _bans_ending(row)


def adjust(logits: Any, rows: list[SampleRow], xp: Any) -> Any:
    """Apply biases, penalties and banned endings to the rows that have any.

    Args:
        logits: (R, V) float32, NumPy or MLX as `xp` says. Not changed.
        rows: R rows.

    Returns: logits of the same kind; the very same array when no row is adjusted.
    """
    found = (_adjustment(index, row, logits.shape[-1]) for index, row in enumerate(rows))
    entries = [entry for entry in found if entry is not None]
    if not entries:
        return logits
    row_ids, token_ids, factors, offsets = (
        xp.array(np.concatenate([entry[part] for entry in entries])) for part in range(4)
    )
    values = logits[row_ids, token_ids]
    values = xp.where(values > 0, values / factors, values * factors) + offsets
    adjusted = np.array(logits) if xp is np else mx.array(logits)
    adjusted[row_ids, token_ids] = values
    return adjusted


def _adjustment(index: int, row: SampleRow, vocab_size: int) -> tuple[NDArray[Any], ...] | None:
    """Sparse change of one row: row ids, token ids, repetition factors, offsets."""
    if not _is_adjusted(row):
        return None
    request, params = row.request, row.request.params
    history = np.array(request.token_ids, dtype=np.int64)
    output = history[request.num_prompt_tokens :]
    bias_ids = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64)
    endings = list(request.eos_token_ids | request.stop_token_ids) if _bans_ending(row) else []
    ending_ids = np.array(endings, dtype=np.int64)
    seen = history if params.has_penalties else history[:0]
    token_ids = np.unique(np.concatenate([seen, bias_ids, ending_ids]))
    token_ids = token_ids[token_ids < vocab_size]
    factors = np.ones(len(token_ids), dtype=np.float32)
    offsets = np.zeros(len(token_ids), dtype=np.float32)
    if params.has_penalties:
        counts = np.zeros(vocab_size, dtype=np.float32)
        np.add.at(counts, output, 1.0)
        counts = counts[token_ids]
        factors[np.isin(token_ids, history)] = params.repetition_penalty
        offsets -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    for token_id, bias in params.logit_bias:
        # -100 bans and 100 forces, whatever the model's own logits are.
        strong = BANNED if bias <= -100 else -BANNED if bias >= 100 else bias
        offsets[token_ids == token_id] += strong
    offsets[np.isin(token_ids, ending_ids)] = BANNED
    row_ids = np.full(len(token_ids), index, dtype=np.int64)
    return row_ids, token_ids, factors, offsets


class Allowed(Protocol):
    """The tokens that a row may choose from."""

    def allows(self, token_id: int) -> bool:
        """Whether this token is among them."""

    def ids(self) -> NDArray[np.int64]:
        """All of them, ascending; at least one."""


def choose_on_host(
    logits: NDArray[np.float32], rows: list[SampleRow], allowed: Mapping[int, Allowed] | None = None
) -> NDArray[np.int64]:
    """Token id of each row of adjusted (R, V) logits.

    Args:
        logits: (R, V) float32.
        rows: R rows, or none when all take the best token.
        allowed: row → the tokens it may choose from, for the rows that may not choose from all.
    """
    chosen = np.argmax(logits, axis=-1)
    bound = allowed or {}
    for index, row in enumerate(rows):
        params, mask = row.request.params, bound.get(index)
        if mask is None:
            if not params.is_greedy:
                chosen[index] = _draw(logits[index], params, row.uniform)
        elif not params.is_greedy or not mask.allows(int(chosen[index])):
            ids = mask.ids()
            left = logits[index][ids]
            best = left.argmax() if params.is_greedy else _draw(left, params, row.uniform)
            chosen[index] = ids[best]
    return chosen


def _draw(logits: NDArray[np.float32], params: SamplingParams, u: float) -> int:
    """Inverse-CDF draw from one row: temperature, then top_k, top_p and min_p.

    The tokens that are kept stand in the order of their ids, so that nothing has to be sorted
    when all are.
    """
    weights = np.exp((logits - logits.max()) / np.float32(params.temperature))
    if 0 < params.top_k < len(weights) or params.top_p < 1.0 or params.min_p > 0.0:
        kept_ids = _kept(weights, params)
        return int(kept_ids[_pick(np.cumsum(weights[kept_ids], dtype=np.float64), u)])
    return _pick(np.cumsum(weights, dtype=np.float64), u)


def _kept(weights: NDArray[np.float32], params: SamplingParams) -> NDArray[np.int64]:
    """Ascending ids of the tokens within top_k, top_p and min_p; `weights` peak at 1."""
    ids, total = _candidates(weights, params)
    candidates = weights[ids]
    top = np.sort(candidates)[::-1]
    # The smallest set that reaches top_p, at least the best token.
    target = params.top_p * total * (1 - 1e-12)
    kept = int(np.searchsorted(np.cumsum(top, dtype=np.float64), target)) + 1
    probable = int(np.searchsorted(-top, -params.min_p, side="right"))
    limit = params.top_k if params.top_k > 0 else len(top)
    kept = max(1, min(kept, probable, limit, len(top)))
    border = top[kept - 1]
    within = np.flatnonzero(candidates >= border)
    if len(within) > kept:
        # Equals at the border: the lower ids stay.
        equals = within[candidates[within] == border]
        within = np.setdiff1d(within, equals[kept - len(within) :], assume_unique=True)
    return ids[within]


def _candidates(
    weights: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[np.int64], float]:
    """Ascending ids of tokens among which all kept ones are, and the weight that top_p is of.

    Few of a vocabulary's tokens are likely, so that comparing with a fixed weight leaves little to
    sort; a lower one is tried when it leaves too little.
    """
    if 0 < params.top_k < len(weights):
        first = len(weights) - params.top_k
        ids = np.flatnonzero(weights >= np.partition(weights, first)[first])
        largest = np.sort(weights[ids])[-params.top_k :]  # equals at the border may be more
        return ids, float(largest.sum(dtype=np.float64))
    total = float(weights.sum(dtype=np.float64))
    for cut in CANDIDATE_WEIGHTS:
        ids = np.flatnonzero(weights >= cut)
        if params.min_p >= cut or weights[ids].sum(dtype=np.float64) >= params.top_p * total:
            return ids, total
    return np.arange(len(weights)), total


def _best(scores: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest scores, largest first, lower ids first among equals."""
    if count < len(scores):
        token_ids = np.argpartition(scores, len(scores) - count)[len(scores) - count :]
        token_ids.sort()
    else:
        token_ids = np.arange(len(scores))
    return token_ids[np.argsort(-scores[token_ids], kind="stable")]


def _pick(cumulative: NDArray[np.float64], u: float) -> int:
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(index, len(cumulative) - 1)


def choose_on_device(logits: mx.array, rows: list[SampleRow]) -> mx.array:
    """Token id of each row of adjusted (R, V) logits, as a lazy (R,) int32 array."""
    best = mx.argmax(logits, axis=-1).astype(mx.int32)
    if all(row.request.params.is_greedy for row in rows):
        return best
    params = [row.request.params for row in rows]

    def column(values: list[float], dtype: mx.Dtype = mx.float32) -> mx.array:
        return mx.array(values, dtype=dtype)[:, None]

    vocab_size = logits.shape[-1]
    temperature = column([1.0 if p.is_greedy else p.temperature for p in params])
    token_ids = mx.argsort(-logits, axis=-1)
    scaled = mx.take_along_axis(logits, token_ids, axis=-1) / temperature
    weights = mx.exp(scaled - scaled[:, :1])
    rank = mx.arange(vocab_size)[None]
    weights = mx.where(rank < column([p.top_k or vocab_size for p in params], mx.int32), weights, 0)
    cumulative = mx.cumsum(weights, axis=-1)
    before = cumulative - weights
    nucleus = column([p.top_p for p in params]) * cumulative[:, -1:]
    kept = (before < nucleus) & (weights >= column([p.min_p for p in params]))
    weights = mx.where(kept | (rank == 0), weights, 0)
    by_id = mx.put_along_axis(mx.zeros_like(weights), token_ids, weights, axis=-1)
    cumulative = mx.cumsum(by_id, axis=-1)
    target = column([row.uniform for row in rows]) * cumulative[:, -1:]
    drawn = mx.sum(cumulative <= target, axis=-1)
    last = vocab_size - 1 - mx.argmax(by_id[:, ::-1] > 0, axis=-1)
    drawn = mx.minimum(drawn, last).astype(mx.int32)
    return mx.where(mx.array([p.is_greedy for p in params]), best, drawn)


def logprobs_of(logits: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of one row of unmodified logits, with the `num_top` best alternatives."""
    peak = logits.max()
    log_total = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    top_ids = _best(logits, num_top) if num_top else np.zeros(0, dtype=np.int64)
    return TokenLogprobs(
        token_id=token_id,
        logprob=min(0.0, float(logits[token_id]) - log_total),
        rank=int((logits > logits[token_id]).sum()) + 1,
        top_ids=top_ids.tolist(),
        top_logprobs=[min(0.0, float(logits[i]) - log_total) for i in top_ids],
    )

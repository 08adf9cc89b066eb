"""Random problems for every attention kernel, with a float64 answer.

Owns: what is generated (poisoned stale memory included) and how an answer is judged. Knows nothing
about who launches the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from mlx_cb.attention.kernels import KernelCall, Launcher
from mlx_cb.attention.kv_quantize import quantize_rows
from mlx_cb.attention.mla_decode import LatentPool, mla_calls, mla_decode
from mlx_cb.attention.oracle import Mask, attend, dequantize, unpack
from mlx_cb.attention.paged import AttentionShape, KVPool, PagedContext, QuantizedRows
from mlx_cb.attention.paged_decode import decode_calls, paged_decode
from mlx_cb.attention.paged_prefill import PrefillChunks, paged_prefill, prefill_call
from mlx_cb.attention.tuning import Tuning

QUANTIZED = ("int8", "int4")
TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 2e-2, mx.float32: 1e-5}
"""Largest error allowed, relative to the largest magnitude of the answer."""


@dataclass(frozen=True)
class Problem:
    """One kernel's arguments, ready to launch.

    `run` takes the launcher; `calls` are its dispatches (a second one takes the outputs of the
    first as its first inputs).
    """

    name: str
    expected: np.ndarray
    tolerance: float
    calls: list[KernelCall]
    run: Callable[[Launcher], mx.array]

    def error(self, answer: mx.array) -> float:
        """Largest difference from the oracle over the answer's scale; NaN counts as infinite."""
        got = np.array(answer.astype(mx.float32)).astype(np.float64).reshape(self.expected.shape)
        scale = max(float(np.abs(self.expected).max()), 1e-6)
        error = float(np.abs(got - self.expected).max() / scale)
        return error if np.isfinite(error) else float("inf")


@dataclass(frozen=True)
class AttentionCase:
    """A problem of paged_decode (`chunks` empty) or paged_prefill.

    Attributes:
        kv: `same` as dtype, the name of another float type, `int8` or `int4`.
        contexts: tokens per sequence; for decode the `rows` new ones included.
        chunks: query rows per sequence for prefill.
        sharpness: factor of the usual scale; at 64 a softmax without a maximum overflows.
    """

    dtype: mx.Dtype = mx.float16
    kv: str = "same"
    dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    group: int = 1
    kv_heads: int = 1
    contexts: tuple[int, ...] = (33,)
    chunks: tuple[int, ...] = ()
    rows: int = 1
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    sharpness: float = 1.0
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def name(self) -> str:
        kind = f"prefill{self.chunks}" if self.chunks else f"decode r{self.rows}"
        dtype = str(self.dtype).removeprefix("mlx.core.")
        options = [
            f"{key}={getattr(self, key)}"
            for key in ("window", "softcap", "sinks", "sharpness")
            if getattr(self, key) not in (None, False, 1.0)
        ]
        return (
            f"{kind} {dtype} kv={self.kv} D={self.dim}/{self.value_dim} G={self.group} "
            f"Hkv={self.kv_heads} BS={self.block_size} ctx={self.contexts} "
            f"part={self.tuning.partition} {' '.join(options)}"
        ).strip()

    def build(self, seed: int = 0) -> Problem:
        rng = np.random.default_rng(seed)
        store = _PagedStore(self, rng)
        counts = self.chunks or (self.rows,) * len(self.contexts)
        heads = self.kv_heads * self.group
        queries = _rounded(rng.standard_normal((sum(counts), heads, self.dim)), self.dtype)
        sinks = rng.standard_normal(heads).astype(np.float32) if self.sinks else None
        shape = AttentionShape(
            self.sharpness * self.dim**-0.5, self.window, self.softcap, self.rows
        )
        mask = Mask(shape.scale, self.window, self.softcap)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        expected = np.concatenate(
            [
                attend(queries[starts[i] : starts[i + 1]], *store.tokens[i], mask, sinks)
                for i in range(len(counts))
            ]
        )
        sink_values = None if sinks is None else mx.array(sinks)
        q = mx.array(queries).astype(self.dtype)
        pool, context, tuning = store.pool, store.context, self.tuning
        ragged = PrefillChunks(starts)

        def run(launch: Launcher) -> mx.array:
            if self.chunks:
                return paged_prefill(q, pool, context, ragged, shape, sink_values, tuning, launch)
            return paged_decode(q, pool, context, shape, sink_values, tuning, launch)

        if self.chunks:
            calls = [prefill_call(q, pool, context, ragged, shape, sink_values, tuning)]
        else:
            calls = decode_calls(q, pool, context, shape, sink_values, tuning)
        return Problem(self.name, expected, TOLERANCE[self.dtype], calls, run)


def _rounded(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """float32 values that `dtype` holds exactly."""
    return np.array(mx.array(x.astype(np.float32)).astype(dtype).astype(mx.float32))


class _PagedStore:
    """Scatters random keys and values over shuffled blocks; all else in the pool is NaN, and table
    entries that no context needs point far outside it."""

    def __init__(self, case: AttentionCase, rng: np.random.Generator) -> None:
        size = case.block_size
        needed = [-(-n // size) for n in case.contexts]
        blocks = sum(needed) + 3
        order = rng.permutation(blocks)
        width = max(*needed, 1) + 1
        tables = np.full((len(needed), width), 1 << 28, np.int32)
        at = 0
        for i, n in enumerate(needed):
            tables[i, :n] = order[at : at + n]
            at += n
        self.context = PagedContext.from_host(tables, np.array(case.contexts, np.int32))
        pools = []
        self.tokens: list[tuple[np.ndarray, np.ndarray]] = []
        sides = []
        for dim in (case.dim, case.value_dim):
            pool = np.full((blocks, case.kv_heads, size, dim), np.nan, np.float32)
            for i, n in enumerate(case.contexts):
                rows = rng.standard_normal((n, case.kv_heads, dim))
                t = np.arange(n)
                pool[tables[i, t // size], :, t % size] = rows
            stored, values = _store(pool, case)
            pools.append(stored)
            sides.append(values)
        for i, n in enumerate(case.contexts):
            t = np.arange(n)
            ids = tables[i, t // size] if n else t
            self.tokens.append((sides[0][ids, :, t % size], sides[1][ids, :, t % size]))
        self.pool = (
            KVPool.dense(*pools) if case.kv not in QUANTIZED else KVPool.quantized(*pools)  # type: ignore[arg-type]
        )


def _store(pool: np.ndarray, case: AttentionCase) -> tuple[mx.array | QuantizedRows, np.ndarray]:
    """The pool in the case's format, and the values that a perfect reader gets out of it."""
    if case.kv not in QUANTIZED:
        array = mx.array(pool).astype(case.dtype if case.kv == "same" else getattr(mx, case.kv))
        return array, np.array(array.astype(mx.float32))
    stored = quantize_reference(pool, 8 if case.kv == "int8" else 4)
    return stored, dequantized(stored)


def quantize_reference(x: np.ndarray, bits: int) -> QuantizedRows:
    """Groups of 32 as kv_quantize makes them; a NaN group gets NaN scales."""
    groups = x.reshape(*x.shape[:-1], -1, 32).astype(np.float64)
    stale = np.asarray(np.isnan(groups).any(-1))
    groups = np.where(stale[..., None], 0.0, groups)
    if bits == 8:
        scale = (np.abs(groups).max(-1) / 127).astype(np.float16)
        bias = np.zeros_like(scale)
    else:
        scale = ((groups.max(-1) - groups.min(-1)) / 15).astype(np.float16)
        bias = groups.min(-1).astype(np.float16)
    step = np.where(scale > 0, scale.astype(np.float64), 1.0)
    codes = np.rint((groups - bias[..., None].astype(np.float64)) / step[..., None])
    limits = (-127, 127) if bits == 8 else (0, 15)
    codes = codes.clip(*limits).reshape(x.shape)
    scale[stale] = np.nan
    if bits == 8:
        return QuantizedRows(
            mx.array(codes.astype(np.int8)), mx.array(scale), mx.zeros((8,), mx.float16)
        )
    words = codes.astype(np.uint32).reshape(*x.shape[:-1], -1, 8) << np.arange(
        0, 32, 4, dtype=np.uint32
    )
    packed = np.bitwise_or.reduce(words, -1)
    return QuantizedRows(mx.array(packed), mx.array(scale), mx.array(bias))


def dequantized(rows: QuantizedRows) -> np.ndarray:
    """The float64 values of quantized rows."""
    codes = np.array(rows.codes)
    if rows.codes.dtype == mx.int8:
        return dequantize(codes, np.array(rows.scale), None, 32)
    return dequantize(unpack(codes, 4), np.array(rows.scale), np.array(rows.bias), 32)


@dataclass(frozen=True)
class QuantizeCase:
    """A problem of kv_quantize; judged after dequantization, in steps of the scale."""

    dtype: mx.Dtype = mx.float16
    bits: int = 8
    shape: tuple[int, ...] = (5, 2, 64)

    @property
    def name(self) -> str:
        return (
            f"kv_quantize {str(self.dtype).removeprefix('mlx.core.')} bits={self.bits} {self.shape}"
        )

    def build(self, seed: int = 0) -> Problem:
        from mlx_cb.attention.kv_quantize import quantize_call

        rng = np.random.default_rng(seed)
        x = _rounded(
            rng.standard_normal(self.shape) * rng.uniform(0.1, 9, (*self.shape[:-1], 1)), self.dtype
        )
        x[0, ..., :32] = 0.0  # a group without spread has scale 0
        expected = dequantized(quantize_reference(x, self.bits))
        rows = mx.array(x).astype(self.dtype)

        def run(launch: Launcher) -> mx.array:
            return mx.array(dequantized(quantize_rows(rows, self.bits, launch)).astype(np.float32))

        # a value halfway between two codes may round either way: one step of the largest scale
        step = float(np.abs(x).max()) * (1 / 127 if self.bits == 8 else 2 / 15)
        return Problem(
            self.name,
            expected,
            1.01 * step / np.abs(expected).max(),
            [quantize_call(rows, self.bits)],
            run,
        )


@dataclass(frozen=True)
class MlaCase:
    """A problem of mla_decode."""

    dtype: mx.Dtype = mx.float16
    heads: int = 16
    dim: int = 576
    value_dim: int = 512
    block_size: int = 16
    contexts: tuple[int, ...] = (33,)
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("mlx.core.")
        shape = f"H={self.heads} {self.dim}/{self.value_dim} ctx={self.contexts}"
        return f"mla_decode {dtype} {shape} part={self.tuning.partition}"

    def build(self, seed: int = 0) -> Problem:
        rng = np.random.default_rng(seed)
        store = _PagedStore(
            AttentionCase(
                dtype=self.dtype,
                dim=self.value_dim,
                value_dim=self.dim - self.value_dim,
                block_size=self.block_size,
                contexts=self.contexts,
            ),
            rng,
        )
        queries = _rounded(
            rng.standard_normal((len(self.contexts), self.heads, self.dim)), self.dtype
        )
        mask = Mask(self.dim**-0.5)
        expected = np.concatenate(
            [
                attend(queries[i : i + 1], np.concatenate(token, -1), token[0], mask)
                for i, token in enumerate(store.tokens)
            ]
        )
        arguments = (
            mx.array(queries).astype(self.dtype),
            LatentPool(store.pool.keys.squeeze(1), store.pool.values.squeeze(1)),
            store.context,
            mask.scale,
            self.tuning,
        )
        return Problem(
            self.name,
            expected,
            TOLERANCE[self.dtype],
            mla_calls(*arguments),
            lambda launch: mla_decode(*arguments, launch),
        )


def with_tuning(case: AttentionCase | MlaCase, **changes: int) -> AttentionCase | MlaCase:
    """The case with some numbers of its tuning replaced."""
    return replace(case, tuning=replace(case.tuning, **changes))

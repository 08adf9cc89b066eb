"""Measures the kernels on this machine's GPU and finds the tuning that is fastest here.

Owns: the timed problems, effective bandwidth, and the search over attention.tuning.Tuning. Numbers
mean something only when the launcher runs on a GPU. Knows nothing about the command line.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_cb.attention.kernels import Launcher
from mlx_cb.attention.paged import AttentionShape, KVPool, PagedContext
from mlx_cb.attention.paged_decode import paged_decode
from mlx_cb.attention.paged_prefill import PrefillChunks, paged_prefill
from mlx_cb.attention.tuning import QMM_ROWS, Tuning
from mlx_cb.model.metal_cases import filters_of
from mlx_cb.model.metal_ops import qmm_small, sample_rows


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds of one call; `bytes` it had to read, so bytes / seconds is its bandwidth."""

    name: str
    seconds: float
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain values, with GB/s."""
        return {**asdict(self), "gb_per_s": self.bytes / self.seconds / 1e9}


@dataclass(frozen=True, slots=True)
class BenchSizes:
    """How large the timed problems are."""

    repeats: int = 30
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    decodes: tuple[tuple[int, int], ...] = ((1, 512), (1, 4096), (1, 32768), (8, 2048), (32, 2048))
    prefill: tuple[int, int] = (512, 4096)
    matmul: tuple[int, int] = (4096, 4096)
    vocabulary: int = 151_936
    key_simdgroups: tuple[int, ...] = (4, 8, 16)
    registers: tuple[int, ...] = (256, 512, 1024)
    partitions: tuple[int, ...] = (256, 512, 1024)
    prefill_rows: tuple[int, ...] = (16, 32)


@dataclass(slots=True)
class KernelBench:
    """Times our kernels through one launcher."""

    launch: Launcher
    sizes: BenchSizes = field(default_factory=BenchSizes)
    clock: Callable[[], float] = time.perf_counter

    def measure(self, run: Callable[[], mx.array]) -> float:
        """Median seconds of `run`, evaluated, after two calls to compile and warm up."""
        for _ in range(2):
            mx.eval(run())
        seconds = []
        for _ in range(self.sizes.repeats):
            start = self.clock()
            mx.eval(run())
            seconds.append(self.clock() - start)
        return statistics.median(seconds)

    def decode(self, rows: int, context: int, tuning: Tuning) -> Timing:
        """`rows` sequences of `context` tokens, float16."""
        s = self.sizes
        pool, paged = self._pool(rows, context)
        queries = mx.random.normal((rows, s.kv_heads * s.group, s.dim)).astype(mx.float16)
        shape = AttentionShape(s.dim**-0.5)

        def run() -> mx.array:
            return paged_decode(queries, pool, paged, shape, None, tuning, self.launch)

        kv_bytes = rows * context * s.kv_heads * s.dim * 2 * 2
        return Timing(f"paged_decode {rows} x {context}", self.measure(run), kv_bytes)

    def prefill(self, tuning: Tuning) -> Timing:
        """One chunk behind a context, float16."""
        s = self.sizes
        chunk, context = s.prefill
        pool, paged = self._pool(1, context)
        queries = mx.random.normal((chunk, s.kv_heads * s.group, s.dim)).astype(mx.float16)
        chunks = PrefillChunks(np.array([0, chunk], np.int32))
        shape = AttentionShape(s.dim**-0.5)

        def run() -> mx.array:
            return paged_prefill(queries, pool, paged, chunks, shape, None, tuning, self.launch)

        kv_bytes = context * s.kv_heads * s.dim * 2 * 2
        return Timing(f"paged_prefill {chunk} of {context}", self.measure(run), kv_bytes)

    def matmul(self, rows: int) -> tuple[Timing, Timing]:
        """qmm_small and MLX's quantized_matmul on the same 4-bit weights."""
        n, k = self.sizes.matmul
        w, scales, biases = mx.quantize(
            mx.random.normal((n, k)).astype(mx.float16), group_size=64, bits=4
        )
        x = mx.random.normal((rows, k)).astype(mx.float16)
        read = w.nbytes + scales.nbytes + biases.nbytes
        ours = self.measure(lambda: qmm_small(x, w, scales, biases, 64, 4, self.launch))
        mlx = self.measure(
            lambda: mx.quantized_matmul(x, w, scales, biases, transpose=True, group_size=64, bits=4)
        )
        return Timing(f"qmm_small {rows} rows", ours, read), Timing(
            f"mlx matmul {rows} rows", mlx, read
        )

    def sampling(self, rows: int) -> Timing:
        """Top-k 50, top-p 0.9 of a large vocabulary."""
        logits = mx.random.normal((rows, self.sizes.vocabulary))
        filters = filters_of([(50, 0.9, 0.0, 0.5)] * rows)
        seconds = self.measure(lambda: sample_rows(logits, filters, self.launch)[1])
        return Timing(f"sample_rows {rows} rows", seconds, logits.nbytes)

    def report(self, tuning: Tuning) -> list[Timing]:
        """All timings with one tuning."""
        rows = [self.decode(*size, tuning) for size in self.sizes.decodes]
        rows.append(self.prefill(tuning))
        for count in (1, 2, 4, 8):
            rows += self.matmul(count)
        rows += [self.sampling(count) for count in (1, 8)]
        return rows

    def tune(self, start: Tuning) -> Tuning:
        """Improve one number after the other, each by the summed time of what it changes."""
        best = start
        choices: list[tuple[str, tuple[int, ...], Callable[[Tuning], float]]] = [
            ("key_simdgroups", self.sizes.key_simdgroups, self._decode_seconds),
            ("registers", self.sizes.registers, self._decode_seconds),
            ("partition", self.sizes.partitions, self._decode_seconds),
            ("prefill_rows", self.sizes.prefill_rows, lambda t: self.prefill(t).seconds),
        ]
        for name, values, cost in choices:
            candidates = [replace(best, **{name: value}) for value in values]
            best = min(candidates, key=cost)
        return replace(best, qmm_max_rows=self._largest_winning_rows())

    def _decode_seconds(self, tuning: Tuning) -> float:
        return sum(self.decode(*size, tuning).seconds for size in self.sizes.decodes)

    def _largest_winning_rows(self) -> int:
        """Most rows up to which qmm_small is at least as fast as MLX for every tried count."""
        winning = 0
        for rows in (2, 4, QMM_ROWS, 16):
            ours, mlx = self.matmul(rows)
            if ours.seconds > mlx.seconds:
                break
            winning = rows
        return winning

    def _pool(self, rows: int, context: int) -> tuple[KVPool, PagedContext]:
        """A pool of exactly these sequences, blocks of 16 in random order."""
        s = self.sizes
        blocks = -(-context // 16)
        shape = (rows * blocks, s.kv_heads, 16, s.dim)
        keys, values = (mx.random.normal(shape).astype(mx.float16) for _ in range(2))
        order = np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks)
        lengths = np.full(rows, context, np.int32)
        mx.eval(keys, values)
        paged = PagedContext.from_host(order.astype(np.int32), lengths)
        return KVPool.dense(keys, values), paged

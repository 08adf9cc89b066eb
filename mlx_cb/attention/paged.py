"""Arrays and numbers that all paged attention kernels take.

Owns: the storage formats of a KV pool, and the padding of small metadata arrays. Knows nothing
about steps, requests or layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_cb.attention.kernels import MIN_ELEMENTS, KernelCall, pad_elements

QUANT_GROUP = 32
"""Elements that share a scale in an int8 or 4-bit pool."""
THREADGROUP_BYTES = 32768


@dataclass(frozen=True, slots=True)
class KVPool:
    """One layer's keys and values as the kernels read them.

    keys, values: (num_blocks, Hkv, block_size, D) float; or int8 of that shape; or uint32 with
    D / 8 words (4-bit). Scales and biases of quantized pools: float16 (num_blocks, Hkv, block_size,
    D / 32). value = code * scale (+ bias for 4-bit).
    """

    keys: mx.array
    values: mx.array
    k_scale: mx.array
    v_scale: mx.array
    k_bias: mx.array
    v_bias: mx.array

    @staticmethod
    def dense(keys: mx.array, values: mx.array) -> KVPool:
        none = unused(mx.float16)
        return KVPool(keys, values, none, none, none, none)

    @staticmethod
    def quantized(keys: QuantizedRows, values: QuantizedRows) -> KVPool:
        return KVPool(keys.codes, values.codes, keys.scale, values.scale, keys.bias, values.bias)

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    def value_dim(self) -> int:
        return self.values.shape[3] * (8 if self.values.dtype == mx.uint32 else 1)

    def arrays(self) -> tuple[mx.array, ...]:
        return (self.keys, self.values, self.k_scale, self.v_scale, self.k_bias, self.v_bias)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """codes int8 (..., D) or uint32 (..., D / 8); scale and (4-bit) bias float16 (..., D / 32)."""

    codes: mx.array
    scale: mx.array
    bias: mx.array


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Where each sequence's keys lie.

    Padded on the host, once per step: a concatenation per layer would be a dispatch per layer.

    Attributes:
        block_tables: int32, S rows of `max_blocks`, flat, at least 8 elements; entries beyond a
            context are never read.
        context_lens: int32, S lengths, at least 8 elements: tokens with keys, the query rows
            included.
        max_blocks: entries per row of `block_tables`.
        longest: the largest context.
    """

    block_tables: mx.array
    context_lens: mx.array
    max_blocks: int
    longest: int

    @staticmethod
    def from_host(block_tables: NDArray[np.int32], context_lens: NDArray[np.int32]) -> PagedContext:
        """From (S, max_blocks) and (S,)."""
        return PagedContext(
            host_array(block_tables),
            host_array(context_lens),
            block_tables.shape[1],
            int(context_lens.max()),
        )


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a layer asks for beyond its arrays. `rows`: query rows per sequence in paged_decode."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    rows: int = 1


def host_array(values: NDArray[np.int32]) -> mx.array:
    """Flat int32 of at least 8 elements, without a dispatch."""
    flat = np.zeros(max(values.size, MIN_ELEMENTS), np.int32)
    flat[: values.size] = values.reshape(-1)
    return mx.array(flat)


@cache
def unused(dtype: mx.Dtype) -> mx.array:
    """Stands for an input that a variant does not read. Not lazy: every thread may use it."""
    return mx.array(np.zeros(MIN_ELEMENTS, np.float32 if dtype == mx.float32 else np.float16))


@lru_cache(maxsize=1024)
def int_row(*values: int) -> mx.array:
    return mx.array(np.array([*values, *[0] * (8 - len(values))], np.int32))


@lru_cache(maxsize=1024)
def float_row(*values: float) -> mx.array:
    return mx.array(np.array([*values, *[0.0] * (8 - len(values))], np.float32))


def sink_array(sinks: mx.array | None) -> mx.array:
    return unused(mx.float32) if sinks is None else pad_elements(sinks)


def with_inputs(call: KernelCall, first: list[mx.array]) -> KernelCall:
    """The call with the outputs of an earlier one before its own inputs."""
    return KernelCall(
        call.kernel,
        (*first, *call.inputs),
        call.template,
        call.grid,
        call.threadgroup,
        call.output_shapes,
        call.output_dtypes,
    )

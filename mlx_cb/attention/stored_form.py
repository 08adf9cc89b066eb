"""How numbers of keys and values are stored: as floats, or as 8- or 4-bit codes in groups of 32.

A group lies inside one token's row of one KV head, so what a token is stored as depends on nothing
but the token: neither on who shares its step nor on how its prompt was cut into chunks. Knows no
blocks and no requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from mlx_cb.attention.paged import QUANT_GROUP, KVPool, QuantizedRows, unused
from mlx_cb.errors import UnsupportedModel

#: Turns (..., D) rows into codes of 8 or 4 bits.
Quantizer = Callable[[mx.array, int], QuantizedRows]

FLOATS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
CODES = {"int8": 8, "int4": 4}


def quantize_plainly(rows: mx.array, bits: int) -> QuantizedRows:
    """What kernel kv_quantize computes, in plain MLX operations: its specification.

    value = code * scale (8 bits), or code * scale + bias (4 bits), scale and bias in float16 as
    stored; see metal/kernels/kv_quantize.metal.
    """
    *outer, dim = rows.shape
    groups = rows.astype(mx.float32).reshape(*outer, dim // QUANT_GROUP, QUANT_GROUP)
    if bits == 8:
        scale = (mx.max(mx.abs(groups), axis=-1) / 127.0).astype(mx.float16)
        codes = _codes(groups, scale, mx.zeros_like(scale), (-127.0, 127.0))
        return QuantizedRows(codes.astype(mx.int8).reshape(rows.shape), scale, unused(mx.float16))
    low = mx.min(groups, axis=-1)
    scale = ((mx.max(groups, axis=-1) - low) / 15.0).astype(mx.float16)
    bias = low.astype(mx.float16)
    codes = _codes(groups, scale, bias, (0.0, 15.0)).astype(mx.uint32)
    nibbles = codes.reshape(*outer, dim // 8, 8) << mx.arange(0, 32, 4, dtype=mx.uint32)
    return QuantizedRows(mx.sum(nibbles, axis=-1).astype(mx.uint32), scale, bias)


def _codes(
    groups: mx.array, scale: mx.array, bias: mx.array, limits: tuple[float, float]
) -> mx.array:
    step = scale.astype(mx.float32)[..., None]
    above = groups - bias.astype(mx.float32)[..., None]
    return mx.clip(mx.round(above / mx.where(step > 0, step, 1.0)), *limits)


class StoredForm(ABC):
    """How the rows of one layer's keys, or values, are kept."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As `--kv-dtype` names it."""

    @abstractmethod
    def parts(self, dim: int) -> list[tuple[int, mx.Dtype]]:
        """Width and type of each array that together keep rows of `dim` numbers."""

    @abstractmethod
    def encode(self, rows: mx.array, quantizer: Quantizer) -> list[mx.array]:
        """(..., dim) rows as one array per part."""

    @abstractmethod
    def decode(self, parts: Sequence[mx.array]) -> mx.array:
        """The rows (..., dim) that the parts stand for, in the type the model computes in."""

    def bytes_per_row(self, dim: int) -> int:
        """Bytes of one row of `dim` numbers."""
        return sum(width * dtype.size for width, dtype in self.parts(dim))


@dataclass(frozen=True)
class Floats(StoredForm):
    """Numbers of type `stored` for a model that computes in `computed`."""

    stored: mx.Dtype
    computed: mx.Dtype

    @cached_property
    def name(self) -> str:
        """See StoredForm."""
        return str(self.stored).removeprefix("mlx.core.")

    def parts(self, dim: int) -> list[tuple[int, mx.Dtype]]:
        """See StoredForm."""
        return [(dim, self.stored)]

    def encode(self, rows: mx.array, quantizer: Quantizer) -> list[mx.array]:
        """See StoredForm."""
        return [rows.astype(self.stored)]

    def decode(self, parts: Sequence[mx.array]) -> mx.array:
        """See StoredForm."""
        return parts[0].astype(self.computed)


@dataclass(frozen=True)
class Codes(StoredForm):
    """Codes of `bits` (8 or 4) with a scale, and for 4 bits a bias, per group of 32 numbers."""

    bits: int
    computed: mx.Dtype

    @cached_property
    def name(self) -> str:
        """See StoredForm."""
        return f"int{self.bits}"

    def parts(self, dim: int) -> list[tuple[int, mx.Dtype]]:
        """See StoredForm."""
        groups = (dim // QUANT_GROUP, mx.float16)
        return (
            [(dim, mx.int8), groups] if self.bits == 8 else [(dim // 8, mx.uint32), groups, groups]
        )

    def encode(self, rows: mx.array, quantizer: Quantizer) -> list[mx.array]:
        """See StoredForm."""
        made = quantizer(rows, self.bits)
        return [made.codes, made.scale] if self.bits == 8 else [made.codes, made.scale, made.bias]

    def decode(self, parts: Sequence[mx.array]) -> mx.array:
        """See StoredForm; computed in float32, as the kernels do."""
        codes, scale = parts[0], parts[1].astype(mx.float32)[..., None]
        if self.bits == 4:
            codes = (codes[..., None] >> mx.arange(0, 32, 4, dtype=mx.uint32)) & 15
        groups = codes.reshape(*scale.shape[:-1], QUANT_GROUP).astype(mx.float32) * scale
        if self.bits == 4:
            groups = groups + parts[2].astype(mx.float32)[..., None]
        return groups.reshape(*groups.shape[:-2], -1).astype(self.computed)


def stored_form(name: str, computed: mx.Dtype, dims: Sequence[int]) -> StoredForm:
    """The form for `--kv-dtype NAME`; `auto` keeps what the model computes.

    Raises UnsupportedModel when rows of these dims do not split into groups.
    """
    if name == "auto":
        return Floats(computed, computed)
    if name in FLOATS:
        return Floats(FLOATS[name], computed)
    odd = sorted({dim for dim in dims if dim % QUANT_GROUP})
    if odd:
        raise UnsupportedModel(
            f"--kv-dtype {name} stores groups of {QUANT_GROUP} numbers, and this model has keys or "
            f"values of {', '.join(map(str, odd))}. Hint: use --kv-dtype auto or float16."
        )
    return Codes(CODES[name], computed)


def kernel_pool(form: StoredForm, keys: Sequence[mx.array], values: Sequence[mx.array]) -> KVPool:
    """A layer's arrays as the kernels take them."""
    if isinstance(form, Floats):
        return KVPool.dense(keys[0], values[0])
    spare = [unused(mx.float16)]
    return KVPool.quantized(
        QuantizedRows(*[*keys, *spare][:3]), QuantizedRows(*[*values, *spare][:3])
    )

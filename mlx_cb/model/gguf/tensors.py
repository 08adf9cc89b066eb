"""Turns GGUF's quantized blocks into MLX's affine form, bit by bit where both can say the same.

Types made of groups of 32 with a scale and a minimum keep their codes: value = scale * code + bias.
The others have groups of 16, which MLX does not know: they are expanded by the `gguf` package and
quantized again at 8 bits, which loses next to nothing of their 2 to 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_cb.errors import UnsupportedModel
from mlx_cb.model.gguf.file import RawTensor

GROUP_SIZE = 32
_REQUANTIZED_BITS = 8
_PARTS = ("weight", "scales", "biases")
_PLAIN = ("F32", "F16", "BF16")

Bytes = NDArray[Any]  # uint8; numpy's stubs widen it at every step
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Converted:
    """Arrays of one weight by their suffix (`weight`, `scales`, `biases`); bits None if plain."""

    arrays: dict[str, mx.array]
    bits: int | None


def convert_tensor(tensor: RawTensor, dtype: mx.Dtype) -> Converted:
    """One tensor in MLX's form; `dtype` is that of plain values, scales and biases.

    Raises UnsupportedModel, naming tensor and type.
    """
    if tensor.kind in _PLAIN or len(tensor.shape) == 1:
        return Converted({"weight": mx.array(_expand(tensor)).astype(dtype)}, None)
    reader = _AFFINE.get(tensor.kind)
    if reader is None:
        values = mx.array(_expand(tensor)).astype(dtype)
        quantized = mx.quantize(values, GROUP_SIZE, _REQUANTIZED_BITS)
        return Converted(dict(zip(_PARTS, quantized, strict=True)), _REQUANTIZED_BITS)
    bits, read = reader
    codes, scales, biases = read(tensor.data)
    rows = tensor.data.shape[0]
    return Converted(
        {
            "weight": mx.array(_pack(codes.reshape(rows, -1), bits)),
            "scales": mx.array(scales.reshape(rows, -1)).astype(dtype),
            "biases": mx.array(biases.reshape(rows, -1)).astype(dtype),
        },
        bits,
    )


def _expand(tensor: RawTensor) -> Floats:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    values: Floats
    try:
        if tensor.kind in ("F32", "F16"):
            plain = np.float32 if tensor.kind == "F32" else np.float16
            values = tensor.data.view(plain).astype(np.float32)
        else:
            values = np.asarray(dequantize(tensor.data, GGMLQuantizationType[tensor.kind]))
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"the GGUF tensor {tensor.name!r} has the type {tensor.kind}, which is not read. "
            "Hint: use another quantization."
        ) from error
    return values.reshape(tensor.shape)


def _pack(codes: Bytes, bits: int) -> NDArray[np.uint32]:
    """Codes (rows, width) as MLX packs them: a little-endian stream of `bits` each."""
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    packed = np.packbits(stream.reshape(codes.shape[0], -1), axis=-1, bitorder="little")
    return packed.view(np.uint32)


def _half(data: Bytes) -> Floats:
    """Two bytes per row as a column of floats."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """Low halves, then high halves, of every row."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _q4_0(data: Bytes) -> tuple[Bytes, Floats, Floats]:
    blocks = data.reshape(-1, 18)
    scales = _half(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), scales, -8 * scales


def _q4_1(data: Bytes) -> tuple[Bytes, Floats, Floats]:
    blocks = data.reshape(-1, 20)
    return _nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _fifth_bits(data: Bytes) -> Bytes:
    """Bit 4 of 32 codes from 4 bytes per row."""
    return np.unpackbits(np.ascontiguousarray(data), axis=-1, bitorder="little") << 4


def _q5_0(data: Bytes) -> tuple[Bytes, Floats, Floats]:
    blocks = data.reshape(-1, 22)
    scales = _half(blocks[:, :2])
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scales, -16 * scales


def _q5_1(data: Bytes) -> tuple[Bytes, Floats, Floats]:
    blocks = data.reshape(-1, 24)
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes, _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q8_0(data: Bytes) -> tuple[Bytes, Floats, Floats]:
    blocks = data.reshape(-1, 34)
    scales = _half(blocks[:, :2])
    return blocks[:, 2:] ^ 128, scales, -128 * scales  # signed to offset codes


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases of the 8 groups of a Q4_K or Q5_K block: 6-bit factors of two halves."""
    packed = blocks[:, 4:16]
    low, high, mixed = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    factors = np.concatenate([low & 63, (mixed & 15) | ((low >> 6) << 4)], axis=-1)
    minima = np.concatenate([high & 63, (mixed >> 4) | ((high >> 6) << 4)], axis=-1)
    return _half(blocks[:, :2]) * factors, -_half(blocks[:, 2:4]) * minima


def _q4_k(data: Bytes) -> tuple[Bytes, Floats, Floats]:
    blocks = data.reshape(-1, 144)
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)), *_k_scales(blocks)


def _q5_k(data: Bytes) -> tuple[Bytes, Floats, Floats]:
    blocks = data.reshape(-1, 176)
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    group = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> group) & 1
    return codes | (fifth << 4), *_k_scales(blocks)


_AFFINE: dict[str, tuple[int, Callable[[Bytes], tuple[Bytes, Floats, Floats]]]] = {
    "Q4_0": (4, _q4_0),
    "Q4_1": (4, _q4_1),
    "Q5_0": (5, _q5_0),
    "Q5_1": (5, _q5_1),
    "Q8_0": (8, _q8_0),
    "Q4_K": (4, _q4_k),
    "Q5_K": (5, _q5_k),
}

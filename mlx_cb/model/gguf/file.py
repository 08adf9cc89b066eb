"""Reads a GGUF file: its metadata as Python values, its tensors as raw bytes. Converts nothing."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_cb.errors import UnsupportedModel

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor as it is in the file.

    Attributes:
        shape: as in a checkpoint, rows first (GGUF itself writes it the other way round).
        kind: the name of its GGML type, e.g. `Q4_K`.
        data: bytes, one row per row of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    data: NDArray[np.uint8]


class GGUFFile:
    """Metadata and tensors of one file. Raises UnsupportedModel when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, RawTensor] = {}
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._at = 0
            self._read()
        except (ValueError, struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
            raise UnsupportedModel(
                f"{path} cannot be read as GGUF: {error}. Hint: the file may be cut off."
            ) from error

    def _read(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise ValueError("it does not begin with the letters GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not one of {_VERSIONS}")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in infos:
            self.tensors[name] = self._tensor(name, shape, kind, start + offset)

    def _scalar(self, code: str) -> Any:
        value = struct.unpack_from(f"<{code}", self._bytes, self._at)[0]
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._bytes):
            raise ValueError("a text reaches behind its end")
        return self._bytes[start : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        inner, length = self._scalar("I"), self._scalar("Q")
        if inner in (_STRING, _ARRAY):
            return [self._value(inner) for _ in range(length)]
        values = struct.unpack_from(f"<{length}{_SCALARS[inner]}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{length}{_SCALARS[inner]}")
        return list(values)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> RawTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            ggml = GGMLQuantizationType(kind)
            block, size = GGML_QUANT_SIZES[ggml]
        except (ValueError, KeyError) as error:
            raise UnsupportedModel(
                f"{self.path}: the tensor {name!r} has the unknown type {kind}. "
                "Hint: use the safetensors checkpoint."
            ) from error
        row_bytes = shape[-1] // block * size
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        if start + rows * row_bytes > len(self._bytes):
            raise ValueError(f"the tensor {name!r} reaches behind its end")
        data = np.frombuffer(self._bytes, np.uint8, rows * row_bytes, start)
        return RawTensor(name, shape, ggml.name, data.reshape(rows, row_bytes))

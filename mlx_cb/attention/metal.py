"""The attention backend over our Metal kernels; every variant proves itself at its first use.

Owns: which rows of a step go to which kernel, and which variants are switched off. The launcher is
given: on a Mac MLX's, in tests the emulator's. A variant that fails to compile, or that disagrees
with the float64 oracle on a small made-up problem of its shape, is switched off by name, with a
warning; the reference backend then serves its rows. Knows nothing about requests or models.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_cb.attention.backend import AttentionBackend
from mlx_cb.attention.kernel_cases import AttentionCase, MlaCase, QuantizeCase
from mlx_cb.attention.kernels import Launcher
from mlx_cb.attention.kv_quantize import quantize_rows
from mlx_cb.attention.kv_storage import KVLayer
from mlx_cb.attention.metadata import AttentionMetadata
from mlx_cb.attention.mla_decode import LatentPool, mla_decode, slices
from mlx_cb.attention.paged import AttentionShape, PagedContext, QuantizedRows
from mlx_cb.attention.paged_decode import paged_decode
from mlx_cb.attention.paged_prefill import PrefillChunks, paged_prefill, plan_prefill
from mlx_cb.attention.reference import ReferenceBackend
from mlx_cb.attention.stored_form import CODES, kernel_pool
from mlx_cb.attention.tuning import Tuning

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Variant:
    """All that decides which text of a kernel is compiled, except the tuning."""

    kernel: str
    dtype: mx.Dtype
    kv: str
    dim: int
    value_dim: int = 0
    group: int = 1
    window: bool = False
    sinks: bool = False

    def __str__(self) -> str:
        flags = "".join(f" {name}" for name in ("window", "sinks") if getattr(self, name))
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return (
            f"{self.kernel}[{dtype}/{self.kv} D={self.dim}/{self.value_dim} G={self.group}{flags}]"
        )


@dataclass(slots=True)
class _Rows:
    """Rows `start` to `stop` of the step that one kernel takes, and the reference for the same."""

    kernel: str
    start: int
    stop: int
    context: PagedContext
    chunks: PrefillChunks | None
    metadata: AttentionMetadata
    reference: ReferenceBackend | None = None


class MetalBackend(AttentionBackend):
    """Decode rows through paged_decode, chunks through paged_prefill, codes by kv_quantize.

    Latent layers: decode rows through mla_decode. Chunks stay on the reference path, whose two
    large matrix products are what MLX's own kernels do best.
    """

    def __init__(
        self, block_size: int, launch: Launcher, tuning: Tuning, name: str = "metal"
    ) -> None:
        self.name = name
        self.block_size = block_size
        self.switched_off: dict[Variant, str] = {}
        self._launch = launch
        self._tuning = tuning
        self.proven: set[Variant] = set()
        self._parts: list[_Rows] = []

    def begin(self, metadata: AttentionMetadata) -> None:
        """Split the step and prepare what its layers share; see AttentionBackend."""
        super().begin(metadata)
        decodes, entries = metadata.num_decodes, len(metadata.seq_lens)
        self._parts = []
        if decodes:
            self._parts.append(_rows("paged_decode", metadata, 0, decodes))
        if entries > decodes:
            self._parts.append(_rows("paged_prefill", metadata, decodes, entries))

    def quantize(self, rows: mx.array, bits: int) -> QuantizedRows:
        """Through kv_quantize; see AttentionBackend."""
        variant = Variant("kv_quantize", rows.dtype, f"int{bits}", rows.shape[-1])
        if self._is_usable(variant):
            return quantize_rows(rows, bits, self._launch)
        return super().quantize(rows, bits)

    def attend(
        self, layer: KVLayer, queries: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Attend decodes, then chunks; see AttentionBackend."""
        outputs = [self._attend_rows(part, layer, queries, scale, sinks) for part in self._parts]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def attend_latent(
        self, layer: KVLayer, queries: mx.array, rotated: mx.array, scale: float
    ) -> mx.array:
        """Attend decodes, then chunks; see AttentionBackend."""
        outputs = [
            self._attend_latent_rows(
                part, layer, queries[part.start : part.stop], rotated[part.start : part.stop], scale
            )
            for part in self._parts
        ]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _attend_latent_rows(
        self, part: _Rows, layer: KVLayer, queries: mx.array, rotated: mx.array, scale: float
    ) -> mx.array:
        spec, heads = layer.spec, queries.shape[1]
        variant = Variant(
            "mla_decode",
            queries.dtype,
            layer.keys.form.name,
            spec.key_dim + spec.value_dim,
            spec.key_dim,
            heads,
            window=False,
            sinks=False,
        )
        is_plain = part.chunks is None and spec.window is None and spec.num_kv_heads == 1
        if not is_plain or not self._is_usable(variant):
            return self._reference(part).attend_latent(layer, queries, rotated, scale)
        joined = mx.concatenate([queries * scale, rotated.astype(queries.dtype)], axis=-1)
        keys, values = layer.keys.arrays[0], layer.values.arrays[0]
        pool = LatentPool(keys.squeeze(1), values.squeeze(1))
        out = mla_decode(joined[:, :, 0], pool, part.context, 1.0, self._tuning, self._launch)
        return out[:, :, None]

    def _attend_rows(
        self, part: _Rows, layer: KVLayer, queries: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        whole = len(self._parts) == 1
        rows = queries if whole else queries[part.start : part.stop]
        spec = layer.spec
        variant = Variant(
            part.kernel,
            rows.dtype,
            layer.keys.form.name,
            spec.key_dim,
            spec.value_dim,
            rows.shape[1] // spec.num_kv_heads,
            spec.window is not None,
            sinks is not None,
        )
        if not self._is_usable(variant):
            return self._reference(part).attend(layer, rows, scale, sinks)
        pool = kernel_pool(layer.keys.form, layer.keys.arrays, layer.values.arrays)
        shape = AttentionShape(scale, spec.window)
        flat = rows[:, :, 0]
        if part.chunks is None:
            out = paged_decode(flat, pool, part.context, shape, sinks, self._tuning, self._launch)
        else:
            out = paged_prefill(
                flat, pool, part.context, part.chunks, shape, sinks, self._tuning, self._launch
            )
        return out[:, :, None]

    def _reference(self, part: _Rows) -> ReferenceBackend:
        if part.reference is None:
            part.reference = ReferenceBackend(self.block_size)
            part.reference.begin(part.metadata)
        return part.reference

    def _is_usable(self, variant: Variant) -> bool:
        if variant in self.proven:
            return True
        if variant not in self.switched_off:
            reason = self._fault(variant)
            if reason is None:
                self.proven.add(variant)
                return True
            self.switched_off[variant] = reason
            _log.warning(
                "Metal kernel %s is switched off, the slower reference path serves: %s",
                variant,
                reason,
            )
        return False

    def _fault(self, variant: Variant) -> str | None:
        """Why a variant must not be used; None when it agrees with the oracle."""
        dims = (variant.dim, variant.value_dim)
        if variant.kernel == "paged_prefill" and (
            variant.dim % 8
            or variant.value_dim % 8
            or plan_prefill(dims, variant.dtype.size, self._tuning) is None
        ):
            return f"no tile for head dim {dims} of {variant.dtype}"
        if variant.kernel == "mla_decode":
            if slices(*dims) is None:
                return f"no tile for keys of {dims[0]} and latents of {dims[1]} columns"
            if str(variant.dtype) != f"mlx.core.{variant.kv}":
                return f"queries of {variant.dtype} over latents of {variant.kv}"
        for case in proof_cases(variant, self.block_size, self._tuning):
            problem = case.build()
            try:
                answer = problem.run(self._launch)
                mx.eval(answer)
            except (RuntimeError, ValueError) as error:  # MLX reports a failed compilation so
                return f"{type(error).__name__}: {str(error)[:300]}"
            error_size = problem.error(answer)
            if not error_size <= problem.tolerance:
                return f"error {error_size:.1e} on {case.name}, {problem.tolerance:.0e} allowed"
        return None


def _rows(kernel: str, metadata: AttentionMetadata, first: int, last: int) -> _Rows:
    """Entries `first` to `last` of a step, as a step of their own."""
    starts = metadata.query_start_loc[first : last + 1]
    start, stop = int(starts[0]), int(starts[-1])
    seq_lens, tables = metadata.seq_lens[first:last], metadata.block_tables[first:last]
    local = (starts - start).astype(np.int32)
    decodes = last - first if kernel == "paged_decode" else 0
    part = replace(
        metadata,
        positions=metadata.positions[start:stop],
        block_ids=metadata.block_ids[start:stop],
        block_offsets=metadata.block_offsets[start:stop],
        num_decodes=decodes,
        query_start_loc=local,
        seq_lens=seq_lens,
        block_tables=tables,
    )
    context = PagedContext.from_host(tables, seq_lens)
    chunks = None if decodes else PrefillChunks(local)
    return _Rows(kernel, start, stop, context, chunks, part)


def proof_cases(
    variant: Variant, block_size: int, tuning: Tuning
) -> Sequence[AttentionCase | MlaCase | QuantizeCase]:
    """Small problems that compile exactly the variant's texts (both splits of a decode)."""
    size = block_size
    if variant.kernel == "kv_quantize":
        return [QuantizeCase(variant.dtype, CODES[variant.kv], (3, 2, variant.dim))]
    if variant.kernel == "mla_decode":
        latent = MlaCase(
            dtype=variant.dtype,
            heads=variant.group,
            dim=variant.dim,
            value_dim=variant.value_dim,
            block_size=size,
            contexts=(1, size - 1, 2 * size + 1),
            tuning=tuning,
        )
        return [latent, replace(latent, contexts=(1, tuning.partition + 2 * size))]
    case = AttentionCase(
        dtype=variant.dtype,
        kv=variant.kv,
        dim=variant.dim,
        value_dim=variant.value_dim,
        block_size=size,
        group=variant.group,
        kv_heads=2,
        window=2 * size if variant.window else None,
        sinks=variant.sinks,
        tuning=tuning,
    )
    if variant.kernel == "paged_prefill":
        chunks = (1, size + 3, 2 * size + 1)
        return [replace(case, chunks=chunks, contexts=(1, size + 3, 4 * size + 1))]
    whole = replace(case, contexts=(1, size - 1, size, 2 * size + 1))
    wide = tuning.partition + size if variant.window else None
    split = replace(case, contexts=(1, tuning.partition + 2 * size), window=wide)
    return [whole, split]

"""The reference backend against attention written out row by row in float64."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cb.attention.addresses import Slots
from mlx_cb.attention.kv_storage import KVLayer, KVLayerSpec, KVStorage
from mlx_cb.attention.metadata import AttentionMetadata
from mlx_cb.attention.reference import ReferenceBackend, group_decodes


def metadata(
    entries: list[tuple[int, int]], block_size: int, rng: np.random.Generator
) -> AttentionMetadata:
    """Entries are (context before, rows); one-row entries come first, by context."""
    seq_lens = np.array([before + rows for before, rows in entries], dtype=np.int32)
    counts = [rows for _, rows in entries]
    needed = [-(-int(n) // block_size) for n in seq_lens]
    ids = rng.permutation(sum(needed) + 3).astype(np.int32)
    tables = np.zeros((len(entries), max(needed)), dtype=np.int32)
    taken = 0
    for index, count in enumerate(needed):
        tables[index, :count] = ids[taken : taken + count]
        taken += count
    positions = np.concatenate([np.arange(b, b + r, dtype=np.int32) for b, r in entries])
    entry_of_row = np.repeat(np.arange(len(entries)), counts)
    return AttentionMetadata(
        positions=mx.array(positions),
        block_ids=mx.array(tables[entry_of_row, positions // block_size]),
        block_offsets=mx.array(positions % block_size),
        num_decodes=sum(1 for rows in counts if rows == 1),
        query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        seq_lens=seq_lens,
        block_tables=tables,
        logit_rows=np.zeros(1, dtype=np.int32),
    )


def oracle(
    q: np.ndarray,
    keys: list[np.ndarray],
    values: list[np.ndarray],
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """q (T, Hq, D); keys and values per entry (context, Hkv, D)."""
    rows = []
    for entry in range(len(meta.seq_lens)):
        k, v = keys[entry].astype(np.float64), values[entry].astype(np.float64)
        group = q.shape[1] // k.shape[1]
        for row in range(*meta.query_start_loc[entry : entry + 2].tolist()):
            position = int(np.array(meta.positions)[row])
            first = 0 if window is None else max(0, position - window + 1)
            out = []
            for head in range(q.shape[1]):
                kv = head // group
                scores = k[first : position + 1, kv] @ q[row, head].astype(np.float64) * scale
                extra = [] if sinks is None else [float(sinks[head])]
                peak = max([*scores, *extra])
                weights = np.exp(scores - peak)
                total = weights.sum() + sum(math.exp(e - peak) for e in extra)
                out.append(weights @ v[first : position + 1, kv] / total)
            rows.append(out)
    return np.array(rows)


@given(
    decodes=st.lists(st.integers(0, 70), max_size=6),
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(2, 20)), max_size=3),
    heads=st.sampled_from([(4, 2), (6, 2), (3, 3), (5, 1)]),
    dims=st.sampled_from([(16, 16), (24, 8)]),
    block_size=st.sampled_from([4, 16]),
    window=st.sampled_from([None, 1, 7, 33]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 5),
)
@settings(max_examples=80, deadline=None)
def test_equals_attention_written_out(
    decodes: list[int],
    chunks: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_size: int,
    window: int | None,
    with_sinks: bool,
    seed: int,
) -> None:
    entries = [(before, 1) for before in sorted(decodes)] + chunks
    if not entries:
        return
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    meta = metadata(entries, block_size, rng)
    layer = KVLayer(KVLayerSpec(num_kv_heads, *dims, mx.float32, window), block_size)
    layer.resize(int(meta.block_tables.max()) + 4)
    # Stale content of other requests: finite, and must not be seen.
    layer.keys.arrays[0] = layer.keys.arrays[0] + 3.0
    layer.values.arrays[0] = layer.values.arrays[0] - 9.0
    keys = [rng.standard_normal((n, num_kv_heads, dims[0])).astype("f4") for n in meta.seq_lens]
    values = [rng.standard_normal((n, num_kv_heads, dims[1])).astype("f4") for n in meta.seq_lens]
    for entry, (before, _) in enumerate(entries):
        for position in range(before):
            block, offset = meta.block_tables[entry, position // block_size], position % block_size
            layer.write(
                mx.array(keys[entry][position][None]),
                mx.array(values[entry][position][None]),
                Slots(mx.array([int(block)]), mx.array([offset])),
            )
    backend = ReferenceBackend(block_size)
    backend.begin(meta)
    rows = [(e, p) for e, (before, n) in enumerate(entries) for p in range(before, before + n)]
    new_keys = mx.array(np.stack([keys[e][p] for e, p in rows]))[:, :, None]
    new_values = mx.array(np.stack([values[e][p] for e, p in rows]))[:, :, None]
    backend.write(layer, new_keys, new_values)
    q = rng.standard_normal((len(rows), num_heads, dims[0])).astype("f4")
    sinks = rng.standard_normal(num_heads).astype("f4") if with_sinks else None
    scale = dims[0] ** -0.5
    got = backend.attend(
        layer, mx.array(q)[:, :, None], scale, None if sinks is None else mx.array(sinks)
    )
    wanted = oracle(q, keys, values, meta, scale, window, sinks)
    assert got.shape == (len(rows), num_heads, 1, dims[1])
    np.testing.assert_allclose(np.array(got)[:, :, 0], wanted, atol=2e-5)


def test_groups_keep_padding_small_and_cover_every_row() -> None:
    lengths = np.array([1, 2, 3, 100, 110, 2000, 2001], dtype=np.int32)
    groups = group_decodes(lengths)
    assert [row for start, stop in groups for row in range(start, stop)] == list(range(7))
    assert (5, 7) in groups
    assert group_decodes(np.array([], dtype=np.int32)) == []
    assert group_decodes(np.array([9, 9, 9], dtype=np.int32)) == [(0, 3)]


@pytest.mark.parametrize("blocks", [(4, 9), (9, 4), (0, 3)])
def test_resizing_keeps_what_stays(blocks: tuple[int, int]) -> None:
    before, after = blocks
    storage = KVStorage([KVLayerSpec(2, 8, 4, mx.float16)] * 2, 4)
    storage.resize(before)
    for layer in storage.layers:
        marks = mx.arange(before, dtype=mx.float16)[:, None, None, None]
        layer.keys.arrays[0] = layer.keys.arrays[0] + marks
    storage.resize(after)
    assert storage.num_blocks == after
    assert storage.nbytes == after * storage.bytes_per_block == after * 4 * 2 * (8 + 4) * 2 * 2
    kept = min(before, after)
    for layer in storage.layers:
        assert layer.values.arrays[0].shape == (after, 2, 4, 4)
        assert np.array(layer.keys.arrays[0])[:kept, 0, 0, 0].tolist() == list(range(kept))


def test_writes_are_in_place() -> None:
    """A pool of 64 MiB is written 20 times; a copy would double the peak."""
    layer = KVLayer(KVLayerSpec(8, 64, 64, mx.float32), 16)
    layer.resize(1024)
    mx.eval(layer.arrays())
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    for step in range(20):
        rows = mx.ones((4, 8, 64))
        layer.write(rows, rows, Slots(mx.array([step, 1, 2, 3]), mx.array([0, 1, 2, 3])))
        mx.eval(layer.arrays())
    assert mx.get_peak_memory() - base < 2**20

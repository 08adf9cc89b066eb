"""What attention must know about one step's rows; knows nothing about requests or models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_cb.attention.addresses import Slots


@dataclass(slots=True)
class AttentionMetadata:
    """Shapes of one step. T rows (tokens) belong to S entries (one per request in the step).

    The first `num_decodes` entries have one row each, ordered by context length; the others are
    prefill chunks.

    Attributes:
        positions: (T,) int32, position of each row in its request.
        block_ids, block_offsets: (T,) int32, where each row's keys and values are written:
            slot = block_id * block_size + offset.
        query_start_loc: (S + 1,) int32, first row of each entry.
        seq_lens: (S,) int32, tokens of each entry's request including this step's rows.
        block_tables: (S, max blocks) int32, padded with 0 behind each entry's blocks.
        logit_rows: (R,) int32, rows whose logits are wanted, in the order they are wanted in.
    """

    positions: mx.array
    block_ids: mx.array
    block_offsets: mx.array
    num_decodes: int
    query_start_loc: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    logit_rows: NDArray[np.int32]
    _slots: Slots | None = field(default=None, init=False, compare=False)

    @property
    def slots(self) -> Slots:
        """Where each row's keys and values are written."""
        if self._slots is None:
            self._slots = Slots(self.block_ids, self.block_offsets)
        return self._slots

    def part(self, first: int, last: int) -> AttentionMetadata:
        """The entries `first` to `last` as a step of their own."""
        start, stop = int(self.query_start_loc[first]), int(self.query_start_loc[last])
        rows = self.logit_rows
        return AttentionMetadata(
            positions=self.positions[start:stop],
            block_ids=self.block_ids[start:stop],
            block_offsets=self.block_offsets[start:stop],
            num_decodes=min(max(self.num_decodes - first, 0), last - first),
            query_start_loc=self.query_start_loc[first : last + 1] - start,
            seq_lens=self.seq_lens[first:last],
            block_tables=self.block_tables[first:last],
            logit_rows=rows[(rows >= start) & (rows < stop)] - start,
        )

    def mapped(
        self, places: Callable[[NDArray[np.int32]], NDArray[np.int32]], block_size: int
    ) -> AttentionMetadata:
        """The same step over other block ids, e.g. the places of window layers."""
        counts = np.diff(self.query_start_loc)
        entries = np.repeat(np.arange(len(counts)), counts)
        rows = np.arange(len(entries)) - self.query_start_loc[entries]
        positions = rows + (self.seq_lens - counts)[entries]
        tables = places(self.block_tables)
        return replace(
            self,
            block_ids=mx.array(tables[entries, positions // block_size]),
            block_tables=tables,
        )

    def cut(self, borders: list[int]) -> list[AttentionMetadata]:
        """One chunk as several, cut behind its first `borders` tokens (ascending, inside it)."""
        count, end = int(self.query_start_loc[1]), int(self.seq_lens[0])
        parts = []
        for first, last in zip([0, *borders], [*borders, count], strict=True):
            rows = self.logit_rows
            parts.append(
                AttentionMetadata(
                    positions=self.positions[first:last],
                    block_ids=self.block_ids[first:last],
                    block_offsets=self.block_offsets[first:last],
                    num_decodes=0,
                    query_start_loc=np.array([0, last - first], dtype=np.int32),
                    seq_lens=np.array([end - count + last], dtype=np.int32),
                    block_tables=self.block_tables,
                    logit_rows=rows[(rows >= first) & (rows < last)] - first,
                )
            )
        return parts

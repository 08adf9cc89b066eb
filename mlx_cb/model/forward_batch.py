"""Turns the plan of a step into the arrays of one forward pass. Knows no layers and no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_cb.attention.metadata import AttentionMetadata
from mlx_cb.core.request import Request
from mlx_cb.core.scheduler_output import ScheduledChunk, SchedulerOutput


@dataclass(frozen=True, slots=True)
class PreviousTokens:
    """Tokens that the step before has chosen on the device and nobody has read yet.

    `token_ids` is (R,) int32; `row_of` finds a request's entry in it.
    """

    token_ids: mx.array
    row_of: dict[str, int]


@dataclass(slots=True)
class ForwardBatch:
    """One step's rows: padding and decodes by ascending context, then the chunks.

    Attributes:
        token_ids: (T, 1) int32, as layout PACKED wants them.
        entries: the request of every entry, None for padding.
        attention: shapes for the attention backend; its logit rows come in the order of
            `plan.sampling()`, followed by the rows of `prompt_rows`.
        prompt_rows: chunks whose prompt log-probabilities are wanted, with the number of rows.
    """

    token_ids: mx.array
    entries: list[Request | None]
    attention: AttentionMetadata
    num_sampled: int
    prompt_rows: list[tuple[ScheduledChunk, int]]

    @classmethod
    def build(
        cls, plan: SchedulerOutput, block_size: int, previous: PreviousTokens | None
    ) -> ForwardBatch:
        """Lay out a plan. `previous` is needed when rows continue unread tokens."""
        decodes, lengths, order = _by_context(plan.decodes)
        num_padding, num_decodes = plan.num_padding, len(decodes)
        chunks = np.array([(c.start, c.num_tokens) for c in plan.prefills], np.int32).reshape(-1, 2)
        padding = np.zeros(num_padding, dtype=np.int32)
        starts = np.concatenate([padding, lengths - 1, chunks[:, 0]])
        counts = np.concatenate([padding + 1, np.ones_like(lengths), chunks[:, 1]])
        query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        entry_of_row = np.repeat(np.arange(len(counts)), counts)
        num_rows = int(query_start_loc[-1])
        positions = np.arange(num_rows, dtype=np.int32) - query_start_loc[entry_of_row]
        positions = positions + starts[entry_of_row]
        tables = _block_tables(
            [plan.pad_table] * num_padding
            + [request.block_table for request in decodes]
            + [chunk.request.block_table for chunk in plan.prefills]
        )
        # A decode row that sorted to `rank` sits behind the padding.
        decode_rows = np.empty(num_decodes, dtype=np.int32)
        decode_rows[order] = np.arange(num_padding, num_padding + num_decodes)
        first_chunk = num_padding + num_decodes
        last_rows = query_start_loc[first_chunk + 1 :] - 1
        samples = [chunk.samples for chunk in plan.prefills]
        sampled_rows = np.concatenate([decode_rows, last_rows[samples]])
        prompt_rows = _prompt_rows(plan.prefills)
        logit_rows = [sampled_rows]
        for index, chunk in enumerate(plan.prefills):
            count = next((n for wanted, n in prompt_rows if wanted is chunk), 0)
            first = query_start_loc[first_chunk + index]
            logit_rows.append(np.arange(first, first + count, dtype=np.int32))
        return cls(
            token_ids=_token_ids(plan, decodes, previous)[:, None],
            entries=[None] * num_padding + decodes + [chunk.request for chunk in plan.prefills],
            attention=AttentionMetadata(
                positions=mx.array(positions),
                block_ids=mx.array(tables[entry_of_row, positions // block_size]),
                block_offsets=mx.array(positions % block_size),
                num_decodes=first_chunk,
                query_start_loc=query_start_loc,
                seq_lens=starts + counts,
                block_tables=tables,
                logit_rows=np.concatenate(logit_rows).astype(np.int32),
            ),
            num_sampled=len(sampled_rows),
            prompt_rows=prompt_rows,
        )


def _by_context(
    requests: list[Request],
) -> tuple[list[Request], NDArray[np.int32], NDArray[np.int64]]:
    """Requests by ascending context, their contexts, and the plan's index of each."""
    lengths = np.array([request.num_computed_tokens for request in requests], dtype=np.int32)
    order = np.argsort(lengths, kind="stable")
    return [requests[index] for index in order.tolist()], lengths[order], order


def _block_tables(tables: Sequence[list[int]]) -> NDArray[np.int32]:
    """(S, longest) int32, padded with 0."""
    lengths = np.array([len(table) for table in tables], dtype=np.int64)
    padded = np.zeros((len(tables), int(lengths.max())), dtype=np.int32)
    flat = np.fromiter(chain.from_iterable(tables), dtype=np.int32, count=int(lengths.sum()))
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = flat
    return padded


def _token_ids(
    plan: SchedulerOutput,
    decodes: list[Request],
    previous: PreviousTokens | None,
) -> mx.array:
    """(T,) int32: known tokens from the host, unread ones from the step before."""
    known: list[int] = [0] * plan.num_padding
    unread: dict[int, int] = {}  # row -> entry in `previous`
    if previous is None:
        known += [request.token_ids[request.num_computed_tokens - 1] for request in decodes]
    else:
        for row, request in enumerate(decodes, start=plan.num_padding):
            position = request.num_computed_tokens - 1
            if position < len(request.token_ids):
                known.append(request.token_ids[position])
            else:
                known.append(0)
                unread[row] = previous.row_of[request.request_id]
    for chunk in plan.prefills:
        known += chunk.request.token_ids[chunk.start : chunk.start + chunk.num_tokens]
    token_ids = mx.array(np.array(known, dtype=np.int32))
    if previous is None or not unread:
        return token_ids
    rows, entries = mx.array(list(unread)), mx.array(list(unread.values()))
    token_ids[rows] = previous.token_ids[entries]
    return token_ids


def _prompt_rows(chunks: list[ScheduledChunk]) -> list[tuple[ScheduledChunk, int]]:
    """Chunks that want prompt log-probabilities: rows that predict a later prompt token."""
    wanted = []
    for chunk in chunks:
        request = chunk.request
        if request.params.prompt_logprobs is not None and request.num_output_tokens == 0:
            end = min(chunk.start + chunk.num_tokens, request.num_prompt_tokens - 1)
            if end > chunk.start:
                wanted.append((chunk, end - chunk.start))
    return wanted

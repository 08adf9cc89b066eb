"""Keeps constrained requests within their grammar: masks over the vocabulary, by llguidance.

Knows requests' output tokens and grammars, nothing about schemas (the front has compiled those).
Masks of all constrained rows of a step are filled in parallel, off the GIL. On a device they are
applied in one operation; on the host the sampler looks up what it has chosen, and only goes through
the allowed tokens when that is not among them. Rows without a grammar pay nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from mlx_cb.core.request import Request
from mlx_cb.errors import InvalidRequest, UnsupportedModel

BANNED = -1e30

log = logging.getLogger("mlx_cb.engine")


@dataclass(frozen=True, slots=True)
class Mask:
    """Which tokens may come next: a bit for each, the lowest of a byte first.

    Tokens without a bit, and from `vocab_size` on, may not.
    """

    bits: NDArray[np.uint8]
    vocab_size: int

    @classmethod
    def of_ids(cls, token_ids: list[int], vocab_size: int) -> Mask:
        """The mask of these tokens alone."""
        allowed = np.zeros(vocab_size, dtype=bool)
        allowed[token_ids] = True
        return cls(np.packbits(allowed, bitorder="little"), vocab_size)

    def allows(self, token_id: int) -> bool:
        """Whether this token may come."""
        is_known = token_id < min(self.vocab_size, 8 * len(self.bits))
        return is_known and bool(self.bits[token_id >> 3] >> (token_id & 7) & 1)

    def ids(self) -> NDArray[np.int64]:
        """The tokens that may come, ascending."""
        return np.flatnonzero(self.as_bools())

    def as_bools(self) -> NDArray[np.bool_]:
        """(vocab_size,)"""
        known = np.unpackbits(self.bits, bitorder="little")[: self.vocab_size]
        allowed = np.zeros(self.vocab_size, dtype=bool)
        allowed[: len(known)] = known
        return allowed


@dataclass(slots=True)
class _Progress:
    """A request's matcher and how much of its output it has seen."""

    matcher: Future[LLMatcher]
    num_consumed: int = 0


class Grammars:
    """Matchers of all constrained requests of one model."""

    def __init__(
        self, tokenizer_file: Callable[[], Path], vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        """`tokenizer_file` finds the tokenizer.json; asked for when the first grammar comes."""
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._progress: dict[str, _Progress] = {}

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            file = self._tokenizer_file()
        except UnsupportedModel as error:
            raise InvalidRequest(
                f"structured output needs a tokenizer, and this model has none: {error}",
                param="response_format",
            ) from error
        return LLTokenizer(
            str(file), n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
        )

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    @cached_property
    def _compiler(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="mlx-cb grammar")

    def prepare(self, request_id: str, grammar: str) -> None:
        """Begin to compile a request's grammar, beside the steps that prefill its prompt.

        Raises InvalidRequest when this model cannot be constrained.
        """
        tokenizer = self._tokenizer
        matcher = self._compiler.submit(LLMatcher, tokenizer, grammar)
        self._progress[request_id] = _Progress(matcher)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that has ended."""
        self._progress.pop(request_id, None)

    def apply(self, logits: Any, requests: list[Request], xp: Any) -> Any:
        """Ban what does not fit from the rows of constrained requests, in one operation.

        Args:
            logits: (R, V) float32, NumPy or MLX as `xp` says. Not changed.
            requests: the R rows' requests, with all their tokens read.

        Returns: logits of the same kind; the very same array when no row is constrained.
        """
        masks = self.masks(requests, logits.shape[-1])
        if not masks:
            return logits
        row_ids = xp.array(list(masks))
        allowed = xp.array(np.stack([mask.as_bools() for mask in masks.values()]))
        banned = xp.where(allowed, logits[row_ids], BANNED)
        constrained = xp.array(logits)
        constrained[row_ids] = banned
        return constrained

    def masks(self, requests: list[Request], vocab_size: int) -> dict[int, Mask]:
        """Row → what may come next there, of the constrained rows; filled in parallel.

        `requests` have all their tokens read; `vocab_size` is the logits'.
        """
        rows = [index for index, r in enumerate(requests) if r.params.grammar is not None]
        if not rows:
            return {}
        bits = allocate_token_bitmask(len(rows), self._vocab_size)
        matchers = [(self._caught_up(requests[row]), place) for place, row in enumerate(rows)]
        fill_next_token_bitmask_par(self._executor, matchers, bits)
        packed = bits.view(np.uint8)
        made = {}
        for row, (matcher, place) in zip(rows, matchers, strict=True):
            mask = Mask(packed[place], vocab_size)
            if matcher.is_error() or not packed[place].any():
                # Nothing fits any more: the text ends here.
                log.warning("grammar of %s: %s", requests[row].request_id, matcher.get_error())
                mask = Mask.of_ids(self._eos_token_ids, vocab_size)
            made[row] = mask
        return made

    def _caught_up(self, request: Request) -> LLMatcher:
        progress = self._progress[request.request_id]
        matcher = progress.matcher.result()
        output = request.token_ids[request.num_prompt_tokens :]
        if progress.num_consumed < len(output):
            matcher.consume_tokens(output[progress.num_consumed :])
            progress.num_consumed = len(output)
        return matcher

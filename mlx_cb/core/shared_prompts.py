"""Beginnings of texts that everybody may share, because the operator has marked them.

Knows token ids only. What is shared are whole blocks inside a marked prompt: where a text goes on
by itself, its own user's blocks begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class SharedPrompts:
    """The marked prompts, `prompts`, as token ids."""

    def __init__(self, prompts: Iterable[Sequence[int]], block_size: int) -> None:
        self.prompts = [list(prompt) for prompt in prompts]
        self._block_size = block_size

    @property
    def lengths(self) -> list[int]:
        """Tokens of each marked prompt."""
        return [len(prompt) for prompt in self.prompts]

    def num_blocks(self, token_ids: Sequence[int]) -> int:
        """How many of a text's first blocks lie wholly inside a marked prompt."""
        return max((self._num_common(token_ids, p) for p in self.prompts), default=0)

    def _num_common(self, token_ids: Sequence[int], prompt: Sequence[int]) -> int:
        size = self._block_size
        most = min(len(token_ids), len(prompt)) // size
        for index in range(most):
            span = slice(index * size, (index + 1) * size)
            if token_ids[span] != prompt[span]:
                return index
        return most

"""How long answers are expected to get, so that who is let in rarely has to give way later."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_cb.core.kv_cache_manager import KVCacheManager
from mlx_cb.core.request import Request

#: Tokens of an answer before any has ended: the median of the Azure conversation trace of 2023.
FIRST_GUESS = 129.0
NEWEST = 0.1  # weight of the newest answer in the average


class Growth:
    """A moving average of the lengths of answers, and the blocks that they will want.

    A guess and no promise: what gets longer takes blocks while there are any, and then somebody
    has to give way (core/pressure.py).
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self.output_tokens = FIRST_GUESS
        self._kv_cache = kv_cache

    def note(self, request: Request) -> None:
        """An answer has come to its own end."""
        self.output_tokens += NEWEST * (request.num_output_tokens - self.output_tokens)

    def expected_tokens(self, request: Request) -> int:
        """Prompt and output that the request is expected to end with; more than it has now."""
        expected = request.num_prompt_tokens + int(self.output_tokens)
        return max(request.num_tokens + 1, min(expected, request.max_num_tokens))

    def has_room(self, request: Request, running: Sequence[Request]) -> bool:
        """True when the request fits beside what `running` are expected to become.

        Alone it only has to fit with what it has: it may always try.
        """
        if not running:
            return self._kv_cache.can_admit(request, request.num_tokens + 1, headroom=0)
        headroom = sum(
            self._kv_cache.num_missing_blocks(other, self.expected_tokens(other))
            for other in running
        )
        return self._kv_cache.can_admit(request, self.expected_tokens(request), headroom=headroom)

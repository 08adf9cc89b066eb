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

        Blocks are short at the moments just before somebody ends: those who go on are at their
        largest then, and have what the ones before have given back. Alone a request only has to
        fit with what it has: it may always try.
        """
        known, spare = self._kv_cache.room_beside(request)
        if not running:
            return self._kv_cache.num_blocks_for(request.num_tokens + 1) - known <= spare
        block_size = self._kv_cache.block_size
        # Remaining tokens, tokens, blocks held, blocks of its own to give back.
        lives = [(self._remaining(request), request.num_tokens, known, 0)]
        for other in running:
            held = len(other.block_table)
            own = max(0, held - other.num_cached_tokens // block_size)
            lives.append((self._remaining(other), other.num_tokens, held, own))
        lives.sort(reverse=True)
        given_back = sum(own for *_, own in lives)
        tokens = blocks = 0
        for alive, (remaining, size, held, own) in enumerate(lives, start=1):
            tokens, blocks, given_back = tokens + size, blocks + held, given_back - own
            # A last block is half empty, on average.
            wanted = (tokens + alive * remaining) / block_size + 0.5 * alive
            if wanted - blocks > spare + given_back:
                return False
        return True

    def _remaining(self, request: Request) -> int:
        return self.expected_tokens(request) - request.num_tokens

"""Divides the memory set aside for requests between blocks, windows and recurrent states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_cb.errors import OutOfMemory
from mlx_cb.model.cache_spec import CacheSpec

#: A step makes new states beside the old ones.
STATE_COPIES = 2
#: Most of the memory that states may take before fewer requests run at once.
MAX_STATE_SHARE = 0.5
#: Share of the memory that saved states may take.
CHECKPOINT_SHARE = 0.15
#: Most live buffers of saved states: on Metal, MLX gives up at 499,000 of all kinds together.
CHECKPOINT_BUFFERS = 150_000
#: Tokens of one step's chunks, all of which need a place in every window at once.
CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What fits.

    Attributes:
        num_blocks: blocks of the pool.
        max_num_seqs: requests running at once.
        num_checkpoints: recurrent states kept at block borders for later requests.
        window_places: blocks that the layers of each window keep.
    """

    num_blocks: int
    max_num_seqs: int
    num_checkpoints: int
    window_places: dict[int, int]

    def num_users(self, context: int, block_size: int) -> int:
        """Requests of `context` tokens each that fit at once, sharing nothing."""
        return min(self.max_num_seqs, self.num_blocks // -(-context // block_size))


@dataclass(frozen=True, slots=True)
class Limits:
    """What was asked for: tokens per block, requests at once, tokens per request."""

    block_size: int
    max_num_seqs: int
    max_model_len: int


def plan_memory(memory: int, spec: CacheSpec, limits: Limits) -> MemoryPlan:
    """Blocks, places and running requests that `memory` bytes hold.

    Raises OutOfMemory when not even one request of two blocks fits.
    """
    per_request, max_num_seqs, num_checkpoints = STATE_COPIES * spec.state_bytes, 0, 0
    if per_request:
        affordable = int(memory * MAX_STATE_SHARE) // per_request
        max_num_seqs = min(limits.max_num_seqs, affordable)
        num_checkpoints = min(
            int(memory * CHECKPOINT_SHARE) // spec.state_bytes,
            CHECKPOINT_BUFFERS // max(1, spec.num_state_arrays),
        )
    else:
        max_num_seqs = limits.max_num_seqs
    left = memory - per_request * max_num_seqs - spec.state_bytes * num_checkpoints
    places = _window_places(spec, limits, max_num_seqs)
    num_blocks = _num_blocks(left, spec, limits, places)
    if num_blocks < 2 or max_num_seqs < 1:
        raise OutOfMemory(
            f"{memory} bytes for requests hold {num_blocks} blocks of {limits.block_size} tokens "
            f"and {max_num_seqs} requests at once; one request needs two blocks"
            f"{' and a recurrent state' if per_request else ''}. Hint: raise --kv-memory."
        )
    fitting = {window: min(count, num_blocks) for window, count in places.items()}
    return MemoryPlan(num_blocks, max_num_seqs, num_checkpoints, fitting)


def workspace_bytes(config: dict[str, Any], itemsize: int) -> int:
    """Roughly what one step takes beside weights and blocks, from a model's configuration.

    A chunk's rows through the widest layer (its input, gate, product and output), and as many
    rows of logits as requests sample at once by default.
    """
    hidden = int(config.get("hidden_size") or 0)
    widest = max(hidden, int(config.get("intermediate_size") or 0))
    logits = 64 * int(config["vocab_size"]) * 4
    return CHUNK_TOKENS * (4 * hidden + 3 * widest) * itemsize + logits


def _window_places(spec: CacheSpec, limits: Limits, max_num_seqs: int) -> dict[int, int]:
    """Blocks that all running requests and a step's chunks need at once, by window."""
    size = limits.block_size
    return {
        window: max_num_seqs * (-(-window // size) + 2) + -(-CHUNK_TOKENS // size)
        for window in spec.bytes_by_window
        if window is not None
    }


def _num_blocks(memory: int, spec: CacheSpec, limits: Limits, places: dict[int, int]) -> int:
    """Blocks of layers that see everything, beside the places of those that do not.

    While every block can have a place in every window, it has one.
    """
    size = limits.block_size
    per_token = spec.bytes_by_window
    if not per_token:  # nothing but states: blocks only count tokens
        return limits.max_num_seqs * (-(-limits.max_model_len // size) + 1)
    together = memory // (size * sum(per_token.values()))
    if not places or together <= max(places.values()):
        return together
    memory -= sum(size * per_token[window] * count for window, count in places.items())
    longest = limits.max_num_seqs * (-(-limits.max_model_len // size) + 1)
    full = per_token.get(None, 0)
    return memory // (size * full) if full else longest

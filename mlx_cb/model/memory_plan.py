"""Divides the memory set aside for requests between blocks and recurrent states."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_cb.errors import OutOfMemory
from mlx_cb.model.cache_spec import CacheSpec

#: A step makes new states beside the old ones.
STATE_COPIES = 2
#: Most of the memory that states may take before fewer requests run at once.
MAX_STATE_SHARE = 0.5
#: Share of the memory that saved states may take.
CHECKPOINT_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What fits.

    Attributes:
        num_blocks: blocks of the pool.
        max_num_seqs: requests running at once.
        num_checkpoints: recurrent states kept at block borders for later requests.
        state_bytes: most that all recurrent states take, checkpoints included.
    """

    num_blocks: int
    max_num_seqs: int
    num_checkpoints: int
    state_bytes: int


def plan_memory(
    memory: int, spec: CacheSpec, block_size: int, max_num_seqs: int, max_model_len: int
) -> MemoryPlan:
    """Blocks and running requests that `memory` bytes hold.

    Raises OutOfMemory when not even one request of two blocks fits.
    """
    per_request = STATE_COPIES * spec.state_bytes
    if per_request:
        max_num_seqs = min(max_num_seqs, int(memory * MAX_STATE_SHARE) // per_request)
    num_checkpoints = int(memory * CHECKPOINT_SHARE) // spec.state_bytes if per_request else 0
    state_bytes = per_request * max_num_seqs + spec.state_bytes * num_checkpoints
    per_block = spec.bytes_per_token * block_size
    if per_block:
        num_blocks = (memory - state_bytes) // per_block
    else:  # nothing but states: blocks only count tokens
        num_blocks = max_num_seqs * (-(-max_model_len // block_size) + 1)
    if num_blocks < 2 or max_num_seqs < 1:
        raise OutOfMemory(
            f"{memory} bytes for requests hold {num_blocks} blocks of {block_size} tokens and "
            f"{max_num_seqs} recurrent states; one request needs two blocks"
            f"{' and a state' if per_request else ''}. Hint: raise --kv-memory."
        )
    return MemoryPlan(int(num_blocks), max_num_seqs, num_checkpoints, state_bytes)

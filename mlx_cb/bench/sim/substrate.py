"""What a simulated server runs on: the cost of passes, the time around them, room for blocks."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_cb.bench.sim.cost import AppleCost, PassCost
from mlx_cb.bench.sim.machines import Chip, ModelShape, kv_room


@dataclass(frozen=True, slots=True)
class Substrate:
    """A machine with a model on it.

    Attributes:
        ours, peer: cost of a forward pass of our engine and of mlx_lm.server's.
        runs_beside_host: the device computes while the host goes on (a GPU). On MLX's CPU backend
            launching a pass takes as long as the pass.
        kv_bytes, token_bytes: room for keys and values, and what a token needs of it.
        max_tokens: the model's context.
        front_s: time from the client to the engine and back, for ours; `peer_front_s` for the peer.
        step_s, row_s: of the host between two steps, per step and per token handed out.
        peer_step_s, peer_row_s: the same for the peer.
        salts_users: prefixes are shared within a user only, as the server does.
        tile_rows: as the engine knows it; see SchedulerConfig.
    """

    name: str
    ours: PassCost
    peer: PassCost
    runs_beside_host: bool
    kv_bytes: float
    token_bytes: int
    max_tokens: int
    front_s: float = 0.004
    peer_front_s: float = 0.004
    step_s: float = 0.0
    row_s: float = 0.0
    peer_step_s: float = 0.0
    peer_row_s: float = 0.0
    salts_users: bool = True
    tile_rows: int = 1

    def num_blocks(self, block_size: int) -> int:
        """Blocks that fit."""
        return int(self.kv_bytes / (self.token_bytes * block_size))

    def host_seconds(self, tokens: int) -> float:
        """Between two steps of ours, the first of which gave so many tokens."""
        return self.step_s + self.row_s * tokens

    def peer_host_seconds(self, tokens: int) -> float:
        """The same for the peer."""
        return self.peer_step_s + self.peer_row_s * tokens


def apple(chip: Chip, model: ModelShape, memory_gb: float) -> Substrate:
    """A Mac with a model on it. Raises InvalidRequest when the model does not fit."""
    cost = AppleCost(chip, model)
    return Substrate(
        name=f"{chip.name} {memory_gb:g} GB, {model.name}",
        ours=cost,
        peer=cost,
        runs_beside_host=True,
        kv_bytes=kv_room(model, memory_gb),
        token_bytes=model.kv_bytes,
        max_tokens=model.max_tokens,
        tile_rows=chip.tile_rows if model.experts is None else 1,
    )

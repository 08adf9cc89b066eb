"""What the machine can spare for requests: `--kv-memory auto`, and how many buffers MLX may hold.

On Apple Silicon the GPU and every other program share one memory. MLX names the working set that
the system keeps resident for the GPU; what the weights hold and what a step works with come off
it, and so does what other programs use now.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import psutil

from mlx_cb.config import EngineConfig

WORKSPACE_SHARE = 0.1  # of the working set: activations of a step, MLX's own cache of buffers
SPARE_SHARE = 0.7  # of what no program uses now, on a machine that people work on
CPU_SHARE = 0.4  # of what no program uses now, without a GPU: a step's work is in the same memory


@dataclass(frozen=True, slots=True)
class Machine:
    """What MLX and the system report, bytes.

    Attributes:
        available: what programs could take now without swapping.
        working_set: what the system keeps resident for the GPU; None without one.
        active: what MLX holds already, the weights above all.
        max_buffers: live buffers at which MLX gives up; None where there is no such limit.
    """

    available: int
    working_set: int | None
    active: int
    max_buffers: int | None

    @classmethod
    def read(cls) -> Machine:
        """This machine, now."""
        device = mx.device_info()
        working_set = device.get("max_recommended_working_set_size")
        max_buffers = device.get("resource_limit")
        return cls(
            psutil.virtual_memory().available,
            int(working_set) if working_set else None,
            mx.get_active_memory(),
            int(max_buffers) if max_buffers else None,
        )

    def kv_memory(self, still_to_load: int = 0) -> int:
        """Bytes that requests may take beside the weights, of which so many are not loaded yet."""
        available = max(0, self.available - still_to_load)
        if self.working_set is None:
            return int(available * CPU_SHARE)
        left = self.working_set * (1 - WORKSPACE_SHARE) - self.active - still_to_load
        return max(0, min(int(left), int(available * SPARE_SHARE)))


def request_memory(config: EngineConfig, machine: Machine, still_to_load: int = 0) -> int:
    """Bytes that requests may take: what was asked for, or what the machine can spare."""
    if config.cache.kv_memory is not None:
        return config.cache.kv_memory
    return machine.kv_memory(still_to_load)

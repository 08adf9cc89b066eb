"""The loads a server can be put under, by name.

`base` owns the registry; one class per workload in `closed` (a fixed number of streams kept busy),
`arriving` (calls come by the clock), `interactive` (what people and editors do), `team` (what many
of them do to one machine) and `memory` (what the KV cache is put to).
"""

from mlx_cb.bench.workloads import arriving, closed, interactive, memory, team
from mlx_cb.bench.workloads.base import WORKLOADS, Workload, make, workload

__all__ = [
    "WORKLOADS",
    "Workload",
    "arriving",
    "closed",
    "interactive",
    "make",
    "memory",
    "team",
    "workload",
]

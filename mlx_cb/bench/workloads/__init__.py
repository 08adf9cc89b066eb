"""The loads a server can be put under, by name.

`base` owns the registry; one class per workload in `closed` (a fixed number of streams kept busy),
`arriving` (calls come by the clock), `interactive` (what people and editors do) and `team` (what
many of them do to one machine).
"""

from mlx_cb.bench.workloads import arriving, closed, interactive, team
from mlx_cb.bench.workloads.base import WORKLOADS, Workload, make, workload

__all__ = ["WORKLOADS", "Workload", "arriving", "closed", "interactive", "make", "team", "workload"]

"""The policies by the names that `--scheduler` takes; adding one is one class and a row here."""

from __future__ import annotations

from mlx_cb.core.fair import Fair
from mlx_cb.core.policy import FirstComeFirstServed, Policy, Priority, StaticBatch

POLICIES: dict[str, type[Policy]] = {
    "continuous": Fair,
    "fair": Fair,
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "static": StaticBatch,
}

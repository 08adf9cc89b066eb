"""Costs that can be added up by hand, and a way to run a plan on one simulated server."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from mlx_cb.bench.calls import Call, CallRecord, Lane, Plan, Prompt
from mlx_cb.bench.sim.client import Client
from mlx_cb.bench.sim.clock import VirtualClock
from mlx_cb.bench.sim.cost import PassShape
from mlx_cb.bench.sim.ours import OurServer
from mlx_cb.bench.sim.peer import PeerServer, PeerSettings
from mlx_cb.bench.sim.substrate import Substrate
from mlx_cb.config import SchedulerConfig


@dataclass
class PerRow:
    """A second per pass and a tenth per row."""

    spread: float = 0.0

    def seconds(self, shape: PassShape) -> float:
        return 1.0 + 0.1 * shape.rows


CPU = Substrate(
    name="by hand",
    ours=PerRow(),
    peer=PerRow(),
    runs_beside_host=False,
    kv_bytes=1000 * 16,
    token_bytes=1,
    max_tokens=4096,
    front_s=0.0,
    peer_front_s=0.0,
)
GPU = replace(CPU, runs_beside_host=True)


def call(prompt: int, output: int, *, seed: int = 1, **fields) -> Call:
    return Call(Prompt(prompt, seed), output, **fields)


def at(time: float, *calls: Call) -> Lane:
    return Lane(deque(calls), starts_at_s=time)


def run(server_of, plan: Plan) -> tuple[list[CallRecord], OurServer | PeerServer]:
    """Records in the order of sending, and the server that made them."""
    clock = VirtualClock()
    server = server_of(clock)
    client = Client(clock, server, plan)
    clock.run()
    assert client.num_open == 0
    return client.run.records, server


def ours(substrate: Substrate = CPU, **settings):
    config = SchedulerConfig(**{"max_num_batched_tokens": 64, **settings})
    return lambda clock: OurServer(clock, substrate, config)


def peer(substrate: Substrate = CPU, **settings):
    return lambda clock: PeerServer(clock, substrate, PeerSettings(**settings))

"""What is made of samples of a server's memory, and that a server without them is refused."""

import asyncio

import pytest

from mlx_cb.bench.compare import Conditions
from mlx_cb.bench.endurance import MemorySample, endure, memory_figures
from mlx_cb.bench.prompts import CommonWords
from mlx_cb.bench.servers import Cores, Kind, RunningServer, ServerSpec
from mlx_cb.errors import MlxCbError


def test_peaks_are_held_against_the_pool_and_growth_begins_once_all_is_there():
    grown = [MemorySample(100, kv, kv + 1, 1000 + 10 * n) for n, kv in enumerate([20, 90, 100])]
    steady = [MemorySample(100, 95, 96, 1030)] * 8
    leaking = MemorySample(100, 100, 104, 1133)
    figures = memory_figures([*grown, *steady, leaking])
    assert figures["kv_peak_over_pool"] == 1.0
    assert figures["held_peak_over_pool"] == 1.04
    assert figures["resident_growth"] == pytest.approx(1133 / 1030)


def test_too_few_samples_are_no_measurement():
    with pytest.raises(MlxCbError, match="3 samples"):
        memory_figures([MemorySample(1, 1, 1, 1)] * 3)


def test_a_server_that_does_not_tell_its_memory_is_named(stub):
    server = RunningServer(ServerSpec("other", Kind.URL, None, url=stub.url), Cores())
    with pytest.raises(MlxCbError, match="other does not tell its memory: 404"):
        asyncio.run(endure(server, Conditions(CommonWords()), 0.02))

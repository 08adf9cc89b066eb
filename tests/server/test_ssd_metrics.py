"""The gauges of the SSD tier and of the pressure ladder."""

from __future__ import annotations

from typing import Any

from mlx_cb.server.metrics import Metrics


def values(status: dict[str, Any]) -> dict[str, float]:
    text = Metrics().exposition(0, status).decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_ladder_and_tier_are_gauges() -> None:
    ladder = {
        "evicted_blocks": 5,
        "restored_tokens": 64,
        "stopped_admissions": 2,
        "gave_way": 1,
        "recomputed_tokens": 7,
    }
    ssd = {"state": "on", "bytes": 100, "blocks": 3, "written_today": 50}
    found = values({"ladder": ladder, "ssd": ssd})
    assert found["mlx_cb:num_evicted_blocks"] == 5
    assert found["mlx_cb:num_restored_tokens"] == 64
    assert found["mlx_cb:num_stopped_admissions"] == 2
    assert found["mlx_cb:num_recomputed_tokens"] == 7
    assert found["mlx_cb:ssd_is_on"] == 1
    assert found["mlx_cb:ssd_bytes"] == 100
    assert found["mlx_cb:ssd_blocks"] == 3
    assert found["mlx_cb:ssd_written_bytes_today"] == 50


def test_a_tier_that_is_off_says_so() -> None:
    found = values({"ssd": {"state": "off", "reason": "no --ssd-cache"}})
    assert found["mlx_cb:ssd_is_on"] == 0
    assert found["mlx_cb:ssd_bytes"] == 0

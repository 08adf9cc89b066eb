"""The demo model itself: 64 mixed requests against mlx-lm's single-sequence run."""

from __future__ import annotations

import random

import pytest

from mlx_cb.config import CacheConfig, EngineConfig
from mlx_cb.engine.core import EngineCore
from tests import tiny

NUM_REQUESTS = 64


def test_64_mixed_requests_equal_solo_runs(capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(7)
    # Room for about a third of the text at once: the others wait. Who gives way is in test_parity.
    core = EngineCore.load(EngineConfig(cache=CacheConfig(kv_memory=46080 * 16 * 48)))
    requests = {}
    for index in range(NUM_REQUESTS):
        start = rng.randrange(1000)
        prompt = [(start + 37 * i) % 40000 + 100 for i in range(rng.randint(1, 50))]
        requests[f"r{index}"] = (prompt, rng.randint(1, 9))
    collected, waiting = tiny.Collected(), list(requests)
    while waiting or core.has_work:
        for name in waiting[: rng.randint(0, 6)]:
            prompt, output = requests[name]
            core.add(name, prompt, tiny.greedy(output, ignore_eos=True))
            waiting.remove(name)
        collected.take(core.step())
    core.scheduler.check_integrity()
    model, near_ties = core.loaded.model, 0
    for name, (prompt, output) in requests.items():
        wanted = tiny.solo(model, prompt, output)
        near_ties += tiny.same_tokens(model, prompt, collected.token_ids[name], wanted)
    with capsys.disabled():
        print(f"\n64 requests equal their solo runs; near-ties: {near_ties}")
    assert near_ties <= 3

"""The SSD tier for models that keep more of a prefix than blocks: windows, states, or both.

Tokens equal those of mlx-lm's own single run in all of them; the window is 16 positions, a block 8.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_cb.config import CacheConfig, EngineConfig, SchedulerConfig
from mlx_cb.core.beside_blocks import Part, key_of
from mlx_cb.engine.core import EngineCore
from mlx_cb.engine.ssd_carrier import SsdCarrier
from tests import tiny
from tests.engine.one_folder import OneFolder
from tests.families.alone import model, solo

BLOCK = 8
#: What beside the blocks of layers that see everything.
FAMILIES = {
    "gemma3_text": {Part.BLOCK, Part.WINDOWS},
    "gpt_oss": {Part.BLOCK, Part.WINDOWS},
    "qwen3_next": {Part.BLOCK, Part.STATE},
    "mamba": {Part.STATE},
    "recurrent_gemma": {Part.WINDOWS, Part.STATE},
}
#: Random runs; more with `MLX_CB_EXAMPLES=200 pytest ...`.
EXAMPLES = int(os.environ.get("MLX_CB_EXAMPLES", "8"))
PROMPT = [5 * n % 199 for n in range(150)]


class Engines(OneFolder):
    """Of one family each."""

    def start(self, family: str, capacity: int | None = None, **scheduler: Any) -> EngineCore:
        """A new engine, as after a restart; of `capacity` blocks."""
        cache = CacheConfig(
            block_size=BLOCK, kv_memory=2**26, ssd_cache=str(self.folder), ssd_cache_size=10**9
        )
        loaded = replace(tiny.loaded_model(model(family)), architecture=family)
        config = EngineConfig(cache=cache, scheduler=SchedulerConfig(**scheduler))
        core = self.begin(config, loaded)
        if capacity is not None:
            core.scheduler.kv_cache.pool.capacity = capacity
        return core


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    made = Engines(tmp_path / "ssd")
    yield made
    made.stop()


def ask(core: EngineCore, family: str, name: str, prompt: list[int], output: int = 8) -> int:
    """Ask, compare with the single run; returns the tokens that came from a cache."""
    core.add(name, prompt, tiny.greedy(output))
    collected = tiny.run(core)
    core.scheduler.check_integrity()
    assert core.counters.failed_steps == 0
    wanted = solo(family, tuple(prompt), output)
    tiny.same_tokens(model(family), prompt, collected.token_ids[name], wanted)
    return collected.outputs[name][-1].num_cached_tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_restart_finds_the_prefix(engines: Engines, family: str, pipelined: bool) -> None:
    core = engines.start(family, pipelined=pipelined)
    assert ask(core, family, "cold", PROMPT) == 0
    assert isinstance(core.ssd, SsdCarrier)
    assert set(core.ssd.tier.needs.parts) == FAMILIES[family]
    core = engines.start(family, pipelined=pipelined)
    assert ask(core, family, "warm", PROMPT) == 144
    assert core.ssd.status()["state"] == "on"
    # What came back is in memory now: the next one needs no disk.
    before = core.ssd.status()["restored_blocks"]
    assert ask(core, family, "again", PROMPT) >= 144
    assert core.ssd.status()["restored_blocks"] == before
    core = engines.start(family, pipelined=pipelined)
    assert ask(core, family, "other", [*PROMPT[:100], 7, 7, 7, 7, 7]) in (0, 96)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", list(Part))
def test_without_a_part_the_prefix_is_computed(engines: Engines, family: str, part: Part) -> None:
    """A part's files are deleted under the server, or cut: nothing is gone on from half of it."""
    if part not in FAMILIES[family]:
        return
    core = engines.start(family)
    ask(core, family, "cold", PROMPT)
    hashes = core.scheduler.kv_cache.pool._by_hash.keys()
    names = {f"{key_of(content_hash, part).hex()}.kv" for content_hash in hashes}
    core = engines.start(family)
    gone = [path for path in engines.folder.rglob("*.kv") if path.name in names]
    assert gone
    for path in gone:
        path.write_bytes(path.read_bytes()[:-1])
    assert ask(core, family, "warm", PROMPT) < 144
    assert core.scheduler.kv_cache.pool.num_used == 0
    assert not core.ssd.staged  # type: ignore[union-attr]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pipelined", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_small_pool_spills_and_takes_back(engines: Engines, family: str, pipelined: bool) -> None:
    prompts = {f"r{n}": [(31 * n + 5 * i) % 199 for i in range(70)] for n in range(4)}
    core = engines.start(family, 2 * 12 + 1, pipelined=pipelined, max_num_batched_tokens=96)
    for turn in range(2):
        for name, prompt in prompts.items():
            core.add(f"{turn}{name}", prompt, tiny.greedy(20))
        collected = tiny.run(core)
        core.scheduler.check_integrity()
        for name, prompt in prompts.items():
            got = collected.token_ids[f"{turn}{name}"]
            tiny.same_tokens(model(family), prompt, got, solo(family, tuple(prompt), 20))
    assert core.counters.failed_steps == 0
    assert core.scheduler.kv_cache.pool.num_evictions > 0
    assert core.ssd.status()["stored_blocks"] > 0


HEADS = [(), tuple(PROMPT[:70]), tuple(PROMPT[:43])]


@given(
    family=st.sampled_from(list(FAMILIES)),
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 10),
            st.sampled_from(HEADS),
            st.lists(st.integers(0, 190), min_size=1, max_size=20).map(tuple),
            st.integers(1, 20),
        ),
        min_size=1,
        max_size=5,
    ),
    aborts=st.lists(st.tuples(st.integers(1, 25), st.integers(0, 4)), max_size=2),
    budget=st.one_of(st.integers(4, 16), st.integers(17, 80)),
    spare_blocks=st.integers(0, 5),
    pipelined=st.booleans(),
)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_random_runs_over_one_folder_equal_solo_runs(
    engines: Engines,
    family: str,
    arrivals: list[tuple[int, tuple[int, ...], tuple[int, ...], int]],
    aborts: list[tuple[int, int]],
    budget: int,
    spare_blocks: int,
    pipelined: bool,
) -> None:
    """Every example is a restart: prefixes come from earlier examples' files too."""
    requests = [(when, head + tail, output) for when, head, tail, output in arrivals]
    longest = max(len(prompt) + output for _, prompt, output in requests)
    core = engines.start(
        family,
        -(-longest // BLOCK) + 1 + spare_blocks,
        max_num_batched_tokens=budget,
        pipelined=pipelined,
    )
    core.max_request_tokens = core.scheduler.kv_cache.pool.capacity * BLOCK
    collected = tiny.run_arrivals(core, requests, aborts, max_ticks=20_000)
    assert core.counters.failed_steps == 0

    def alone(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        return solo(family, prompt, max_tokens)

    tiny.like_alone(model(family), collected, requests, alone)


@pytest.mark.parametrize("family", ["qwen3_next", "recurrent_gemma"])
def test_a_state_survives_as_bytes(family: str) -> None:
    """Also one that is a row of several, and of bfloat16."""
    loaded = replace(tiny.loaded_model(model(family)), architecture=family)
    core = EngineCore(EngineConfig(cache=CacheConfig(block_size=BLOCK, kv_memory=2**26)), loaded)
    for name in ("a", "b"):
        core.add(name, PROMPT[: 20 + len(name)], tiny.greedy(20))
    for _ in range(6):
        core.step()
    states = core.runner.forward.states
    request = core.scheduler.requests["b"]
    row = states._rows["b"]
    row.stack.states[0][0] = row.stack.states[0][0].astype(mx.bfloat16)  # type: ignore[union-attr]
    states.restore(request, b"hash", row.num_tokens, states.dump(row))
    back = request.resume_state
    assert back.num_tokens == row.num_tokens
    for ours, theirs in zip(row.stack.states, back.stack.states, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None:
                assert mx.array_equal(mine[row.index : row.index + 1], other)
                assert mine.dtype == other.dtype

"""Sliding windows keep few blocks: exact whatever is dropped, and prefixes whose end is gone."""

from __future__ import annotations

import functools

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cb.attention.kv_storage import KVLayerSpec
from mlx_cb.engine.core import EngineCore
from mlx_cb.errors import OutOfMemory
from mlx_cb.model.cache_spec import CacheSpec, Layout
from mlx_cb.model.memory_plan import Limits, plan_memory
from tests import tiny
from tests.families.alone import model, solo
from tests.families.scenario import BLOCK_SIZE, engine

WINDOW = 16


def windowed(family: str, budget: int, **scheduler: object) -> EngineCore:
    """An engine whose window layers keep `budget` blocks unless running requests need more."""
    core = engine(model(family), family, num_blocks=64, **scheduler)
    core.runner.storage.windows[WINDOW].budget = budget
    return core


PREFIXES = st.sampled_from([(), tuple(range(24)), tuple(range(48))])
ENDS = st.lists(st.integers(0, 210), min_size=1, max_size=20).map(tuple)
PROMPTS = st.tuples(PREFIXES, ENDS).map(lambda pair: pair[0] + pair[1])


@pytest.mark.parametrize("family", ["gemma3_text", "recurrent_gemma"])
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 12), PROMPTS, st.integers(1, 20)), min_size=1, max_size=6
    ),
    aborts=st.lists(st.tuples(st.integers(1, 15), st.integers(0, 5)), max_size=2),
    step_budget=st.one_of(st.integers(1, 8), st.integers(9, 80)),
    places=st.integers(1, 12),
    max_num_seqs=st.integers(1, 5),
    pipelined=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_random_runs_with_few_places_equal_solo_runs(
    family: str,
    arrivals: list[tuple[int, tuple[int, ...], int]],
    aborts: list[tuple[int, int]],
    step_budget: int,
    places: int,
    max_num_seqs: int,
    pipelined: bool,
) -> None:
    core = windowed(
        family,
        places,
        max_num_batched_tokens=step_budget,
        max_num_seqs=max_num_seqs,
        pipelined=pipelined,
    )
    core.scheduler.kv_cache.pool.capacity = 20
    collected = tiny.run_arrivals(core, arrivals, aborts)
    tiny.like_alone(model(family), collected, arrivals, functools.partial(solo, family))


def test_a_long_text_takes_few_places() -> None:
    core = windowed("gemma3_text", 6, max_num_batched_tokens=BLOCK_SIZE)
    prompt = [n % 211 for n in range(300)]
    core.add("long", prompt, tiny.greedy(60))
    collected = tiny.run(core)
    got = collected.token_ids["long"]
    tiny.same_tokens(model("gemma3_text"), prompt, got, solo("gemma3_text", tuple(prompt), 60))
    storage = core.runner.storage
    assert storage.windows[WINDOW].num_places <= 6
    assert storage.num_blocks >= 360 // BLOCK_SIZE
    for layer in storage.windows[WINDOW].layers:
        assert layer.num_blocks == storage.windows[WINDOW].num_places
    assert storage.nbytes < storage.num_blocks * BLOCK_SIZE * core.cache_spec.bytes_per_token


@pytest.mark.parametrize(("places", "is_kept"), [(40, True), (4, False)])
def test_a_prefix_is_taken_up_while_its_end_is_kept(places: int, is_kept: bool) -> None:
    core = windowed("gemma3_text", places, max_num_batched_tokens=BLOCK_SIZE)
    prompt = list(range(80))
    collected = tiny.Collected()
    core.add("first", prompt, tiny.greedy(2))
    tiny.run(core, collected)
    core.add("other", list(range(150, 211)), tiny.greedy(2))
    tiny.run(core, collected)
    core.add("again", [*prompt, 9], tiny.greedy(6))
    tiny.run(core, collected)
    assert (collected.outputs["again"][-1].num_cached_tokens > 0) == is_kept
    wanted = solo("gemma3_text", (*prompt, 9), 6)
    tiny.same_tokens(model("gemma3_text"), [*prompt, 9], collected.token_ids["again"], wanted)


def spec(*windows: int | None, state_bytes: int = 0) -> CacheSpec:
    layers = tuple(KVLayerSpec(1, 8, 8, mx.float32, window) for window in windows)
    return CacheSpec(Layout.PACKED, layers, (), state_bytes)


def test_memory_is_divided_between_blocks_windows_and_states() -> None:
    per_block = 16 * 64  # tokens, bytes per token and layer
    limits = Limits(block_size=16, max_num_seqs=4, max_model_len=4096)
    assert plan_memory(per_block * 100, spec(None), limits).num_blocks == 100
    small = plan_memory(2 * per_block * 100, spec(None, 32), limits)
    assert (small.num_blocks, small.window_places) == (100, {32: 100})
    places = 4 * (2 + 2) + 2048 // 16
    large = plan_memory(per_block * (1000 + places), spec(None, 32), limits)
    assert (large.num_blocks, large.window_places) == (1000, {32: places})
    only = plan_memory(per_block * 1000, spec(32), limits)
    assert (only.num_blocks, only.window_places) == (4 * (256 + 1), {32: places})
    hybrid = plan_memory(per_block * 1000, spec(None, state_bytes=per_block * 10), limits)
    assert (hybrid.max_num_seqs, hybrid.num_checkpoints) == (4, 15)
    assert hybrid.num_blocks == 1000 - 2 * 4 * 10 - 15 * 10
    scarce = plan_memory(per_block * 1000, spec(None, state_bytes=per_block * 100), limits)
    assert scarce.max_num_seqs == 2
    with pytest.raises(OutOfMemory, match="a recurrent state"):
        plan_memory(per_block * 10, spec(None, state_bytes=per_block * 100), limits)


def test_a_request_that_waits_half_way_keeps_its_places() -> None:
    core = windowed("gemma3_text", 3, max_num_batched_tokens=BLOCK_SIZE)
    prompts = {"long": tuple(range(60)), **{f"s{n}": (n, 7, 9, *range(50, 62)) for n in range(3)}}
    core.add("long", prompts["long"], tiny.greedy(8))
    collected = tiny.Collected()
    for _ in range(2):
        collected.take(core.step())
    for name in ("s0", "s1", "s2"):  # shorter, so they go first
        core.add(name, prompts[name], tiny.greedy(8))
    waited = 0
    while core.has_work:
        collected.take(core.step())
        waited += core.scheduler.journal.records[-1].passed_over.get("long") == "budget"
    assert waited > 0
    for name, prompt in prompts.items():
        wanted = solo("gemma3_text", prompt, 8)
        tiny.same_tokens(model("gemma3_text"), list(prompt), collected.token_ids[name], wanted)

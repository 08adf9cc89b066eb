"""Failures from the field (reference/cases.md) about the prefix cache, windows and memory."""

from __future__ import annotations

import functools
import gc
import random
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_cb.attention.kv_storage import AHEAD, MIN_GROWTH
from mlx_cb.config import CacheConfig, EngineConfig
from mlx_cb.engine.core import EngineCore
from mlx_cb.engine.idle_memory import RELEASE_AFTER_S, TRIM_AFTER_S, IdleMemory
from mlx_cb.errors import UnsupportedModel
from mlx_cb.standing import Standing
from tests import tiny
from tests.families.build import build
from tests.families.configs import config
from tests.families.scenario import engine as family_engine

BLOCK = 8
LOGPROB_NOISE = 1e-4


@functools.cache
def model() -> tiny.llama.Model:
    return tiny.llama_model()


@functools.cache
def family(name: str) -> object:
    return build(name)


@functools.cache
def solo(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return tiny.solo(model(), list(prompt), max_tokens)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(tiny.VOCAB_SIZE) for _ in range(length)]


def ask(core: EngineCore, name: str, prompt: list[int], output: int = 8) -> tiny.Collected:
    core.add(name, prompt, tiny.greedy(output))
    collected = tiny.run(core)
    core.scheduler.check_integrity()
    wanted = solo(tuple(prompt), output)
    tiny.same_tokens(model(), prompt, collected.token_ids[name], wanted)
    return collected


def cached(collected: tiny.Collected, name: str) -> int:
    return collected.outputs[name][-1].num_cached_tokens


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("pipelined", [False, True])
def test_c083_warm_is_cold_over_twelve_turns(length: int, pipelined: bool) -> None:
    """Warm, after evictions, and while another request writes the same blocks."""
    core = tiny.engine(model(), prefix_cache=True, num_blocks=40, pipelined=pipelined)
    system = text(length, length)
    prompt = system
    for turn in range(12):
        prompt = prompt + text(100 + turn, 5)
        collected = ask(core, f"turn{turn}", prompt, output=4)
        if turn:
            known = len(prompt) - 5
            assert cached(collected, f"turn{turn}") in (known - 1, known - 2)
        prompt = prompt + collected.token_ids[f"turn{turn}"]
    for index in range(6):  # drives everything out
        ask(core, f"other{index}", text(index, 150))
    ask(core, "again", prompt)
    both = [*system, 7, 7, 7, 7]
    for name in ("left", "right"):
        core.add(name, both, tiny.greedy(8))
    collected = tiny.run(core)
    for name in ("left", "right"):
        tiny.same_tokens(model(), both, collected.token_ids[name], solo(tuple(both), 8))


@pytest.mark.parametrize("length", [20, 40, 55, 56, 57, 72])
@pytest.mark.parametrize("name", ["gemma3_text", "recurrent_gemma"])
def test_c084_a_prefix_is_cut_exactly_in_every_layer_or_computed_again(
    name: str, length: int
) -> None:
    """The window is 16: prefixes that end before it, inside it and at its edge."""
    core = family_engine(family(name), name, num_blocks=200)
    stored = text(1, 72)
    core.add("stored", stored, tiny.greedy(2))
    tiny.run(core)
    prompt = [*stored[:length], *text(2, 9)]
    core.add("cut", prompt, tiny.greedy(8))
    got = tiny.run(core).token_ids["cut"]
    tiny.same_tokens(family(name), prompt, got, tiny.solo(family(name), prompt, 8))


def test_c085_a_turn_adds_blocks_for_its_new_tokens_only() -> None:
    core = tiny.engine(model(), prefix_cache=True, num_blocks=400)
    pool = core.scheduler.kv_cache.pool
    prompt, before = text(3, 200), 0
    for turn in range(20):
        prompt = prompt + text(turn, 10)
        core.add(f"t{turn}", prompt, tiny.greedy(2))
        prompt = prompt + tiny.run(core).token_ids[f"t{turn}"]
        grown = len(pool.blocks) - before
        before = len(pool.blocks)
        assert turn == 0 or grown <= 12 // BLOCK + 2
    assert before <= len(prompt) // BLOCK + 20 + 2
    for index in range(30):  # conversations up to the limit and beyond
        core.add(f"other{index}", [*prompt[:200], *text(50 + index, 100)], tiny.greedy(2))
        tiny.run(core)
    assert len(pool.blocks) <= 400
    core.add("late", [*prompt[:200], 5, 6, 7], tiny.greedy(1))
    assert cached(tiny.run(core), "late") >= 200, "what all begin with stays longest"


def test_c086_a_wholly_cached_prompt_is_answered() -> None:
    core = tiny.engine(model(), prefix_cache=True)
    prefix = text(4, 128)
    for index in range(20):
        tail = text(500 + index, (1, BLOCK, 3)[index % 3]) if index % 4 else []
        collected = ask(core, f"r{index}", prefix + tail)
        if index:
            assert cached(collected, f"r{index}") >= 127
    core.add("decoding", text(9, 10), tiny.greedy(30))
    core.step()
    for index in range(8):
        core.add(f"crowd{index}", prefix, tiny.greedy(8))
    collected = tiny.run(core)
    for index in range(8):
        got = collected.token_ids[f"crowd{index}"]
        tiny.same_tokens(model(), prefix, got, solo(tuple(prefix), 8))


def test_c087_an_edited_history_reuses_what_is_still_the_same() -> None:
    core = tiny.engine(model(), prefix_cache=True)
    history = text(6, 100)
    ask(core, "first", history)
    edits = {
        "edited in the middle": ([*history[:50], 9, *history[51:], 1, 2], 50),
        "last message removed": ([*history[:70], 3, 4, 5], 70),
        "another end": ([*history, *text(7, 12)], 100),
    }
    for name, (prompt, common) in edits.items():
        collected = ask(core, name, prompt)
        assert cached(collected, name) >= common - 1, name


def test_c088_a_rewound_window_holds_nothing_of_another_text() -> None:
    name = "gemma3_text"
    warm = family_engine(family(name), name, num_blocks=200)
    marked = text(10, 200)
    prompts = {"a": marked, "b": [*marked[:30], *text(11, 20)], "c": text(12, 10)}
    for request_id, prompt in prompts.items():
        warm.add(request_id, prompt, tiny.greedy(6, logprobs=5))
        found = tiny.run(warm)
        cold = family_engine(family(name), name, num_blocks=200)
        cold.add(request_id, prompt, tiny.greedy(6, logprobs=5))
        wanted = tiny.run(cold)
        assert found.token_ids[request_id] == wanted.token_ids[request_id]
        ours_all, theirs_all = (
            [entry for output in run.outputs[request_id] for entry in output.logprobs or []]
            for run in (found, wanted)
        )
        for ours, theirs in zip(ours_all, theirs_all, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=LOGPROB_NOISE)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("kv_dtype", ["auto", "float16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma2", "mamba", "phimoe"])
def test_c090_every_combination_works_or_is_refused_at_the_start(
    name: str, kv_dtype: str, prefix_cache: bool
) -> None:
    settings = config(name) | (
        {"head_dim": 32} if name in ("llama", "gemma3_text", "gemma2") else {}
    )
    cache = CacheConfig(
        block_size=BLOCK, kv_memory=2**24, kv_dtype=kv_dtype, prefix_cache=prefix_cache
    )
    loaded = replace(tiny.loaded_model(build(name, settings)), architecture=name)
    if name in ("mamba", "phimoe") and kv_dtype in ("int8", "int4"):
        with pytest.raises(UnsupportedModel, match=f"--kv-dtype {kv_dtype}"):
            EngineCore(EngineConfig(cache=cache), loaded)
        return
    core = EngineCore(EngineConfig(cache=cache), loaded)
    for turn in range(2):
        core.add(f"r{turn}", list(range(30)), tiny.greedy(4))
        tiny.run(core)
    assert core.counters.failed_steps == 0


def test_c096_memory_is_flat_over_requests_of_every_ending() -> None:
    """Finished, aborted and refused; MLX's memory and the objects that remain."""
    core = tiny.engine(model(), prefix_cache=True, num_blocks=64, max_num_seqs=8)
    levels = []
    gc.collect()  # what other tests have left
    for index in range(600):
        if index % 10 == 0:
            with pytest.raises(Exception, match="not below"):
                core.add(f"bad{index}", [10**6], tiny.greedy(2))
        core.add(f"r{index}", text(index, 12), tiny.greedy(3))
        if index % 3 == 0:
            core.step()
            core.abort(f"r{index}")
        if index % 6 == 5:
            tiny.run(core)
        if index % 100 == 99:
            gc.collect()
            mx.clear_cache()
            levels.append(mx.get_active_memory())
    assert max(levels[1:]) - min(levels[1:]) < 64 * 1024
    assert not core.scheduler.requests
    assert not core.runner._prompt_logprobs
    pool = core.scheduler.kv_cache.pool
    assert pool.num_used == 0
    assert sum(map(len, pool._followers.values())) <= len(pool.blocks)
    assert not core.scheduler.kv_cache._waits._expected
    assert not core.scheduler.kv_cache._waits._waiting


def test_c097_the_idle_level_is_constant_and_given_back() -> None:
    core = tiny.engine(model(), prefix_cache=True, num_blocks=400)
    now = [0.0]
    idle = IdleMemory(core, clock=lambda: core.last_step_time + now[0])
    levels = []
    for turn in range(6):
        for index in range(4):
            core.add(f"{turn}.{index}", text(10 * turn + index, 300), tiny.greedy(2))
        tiny.run(core)
        now[0] = 0.0
        idle.rest()
        now[0] = TRIM_AFTER_S
        assert idle.wait_s() == 0.0
        idle.rest()
        levels.append(core.runner.storage.nbytes)
        have, known = core.runner.storage.num_blocks, len(core.scheduler.kv_cache.pool.blocks)
        assert have <= AHEAD / (AHEAD - 1) * (known + MIN_GROWTH)
    assert len(set(levels[3:])) == 1
    ask(core, "again", text(50, 30))
    now[0] = RELEASE_AFTER_S
    idle.rest()
    assert idle.wait_s() is None
    assert core.runner.storage.nbytes == 0
    assert not core.scheduler.kv_cache.pool.blocks
    collected = ask(core, "after", text(50, 30))
    assert cached(collected, "after") == 0
    assert idle.wait_s() == 0.0, "it has run, so it counts anew"


def test_c098_the_first_request_after_a_rest_waits_for_no_copy_of_the_cache() -> None:
    """What the rest gave back must not be grown again at once: that copies every cached block."""
    core = tiny.engine(model(), prefix_cache=True, num_blocks=2000)
    for index in range(12):
        ask(core, f"r{index}", text(index, 300))
    core.runner.storage.resize(1900)
    core.trim_memory()
    rested = core.runner.storage.num_blocks
    assert len(core.scheduler.kv_cache.pool.blocks) < rested < 1000
    for index in range(3):
        ask(core, f"after {index}", text(100 + index, 300))
    assert core.runner.storage.num_blocks == rested


def test_prefixes_are_found_by_their_user_and_within_a_group_only() -> None:
    core = tiny.engine(model(), prefix_cache=True)
    prompt = text(8, 52)
    group = Standing(cache_group="office")
    found = {}
    for name, user, standing in (
        ("ann", "ann", Standing()),
        ("ann again", "ann", Standing()),
        ("bob", "bob", Standing()),
        ("carl", "carl", group),
        ("dora", "dora", group),
        ("a user called like the group", "office", Standing()),
    ):
        core.add(name, prompt, tiny.greedy(2), user, standing)
        found[name] = cached(tiny.run(core), name)
    assert found == {
        "ann": 0,
        "ann again": 51,
        "bob": 0,
        "carl": 0,
        "dora": 51,
        "a user called like the group": 0,
    }
    counts = core.scheduler.kv_cache.counts_by_user()
    assert counts["ann"]["hits"] == 1
    assert counts["bob"] == {
        "queries": 1, "hits": 0, "misses": 1, "queried_tokens": 52, "hit_tokens": 0,
        "hit_rate": 0.0, "evictions": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "recurrent_gemma", "qwen3_next", "gemma2"]
)
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_prefix_that_many_ask_for_at_once_is_computed_once(name: str, pipelined: bool) -> None:
    """Whatever the layers keep: tokens equal solo runs, and the shared part is prefilled once."""
    built = family(name)
    core = family_engine(
        built, name, num_blocks=200, max_num_batched_tokens=24, pipelined=pipelined
    )
    prefix = text(13, 64)
    prompts = {f"r{n}": [*prefix, *text(20 + n, 3)] for n in range(6)}
    for request_id, prompt in prompts.items():
        core.add(request_id, prompt, tiny.greedy(6))
    collected = tiny.run(core)
    for request_id, prompt in prompts.items():
        wanted = tiny.solo(built, prompt, 6)
        tiny.same_tokens(built, prompt, collected.token_ids[request_id], wanted)
    prefilled = sum(record.rows_prefill for record in core.scheduler.journal.records)
    assert prefilled == 64 + 6 * 3
    assert core.counters.failed_steps == 0


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_several_answers_to_one_prompt_fork_one_prefill(name: str) -> None:
    built = family(name)
    core = family_engine(built, name, num_blocks=100)
    prompt = text(14, 45)
    for index in range(4):
        core.add(f"r{index}", prompt, tiny.greedy(12))
    collected = tiny.run(core)
    wanted = tiny.solo(built, prompt, 12)
    for index in range(4):
        tiny.same_tokens(built, prompt, collected.token_ids[f"r{index}"], wanted)
    assert sum(r.rows_prefill for r in core.scheduler.journal.records) == 45 + 3


def test_copying_a_block_does_not_copy_the_pool() -> None:
    core = tiny.engine(model(), prefix_cache=True, num_blocks=4000)
    storage = core.runner.storage
    storage.resize(4000)
    mx.eval(storage.arrays())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for target in range(1, 6):
        storage.copy_blocks([0], [target])
        mx.eval(storage.arrays())
    assert mx.get_peak_memory() - before < storage.nbytes // 16


def test_half_of_the_memory_gives_the_same_tokens() -> None:
    """G21: no failure, identical greedy tokens."""
    prompts = {f"r{n}": text(30 + n, 20 + n) for n in range(12)}
    demand = sum(-(-(len(prompt) + 24) // BLOCK) for prompt in prompts.values())
    core = tiny.engine(model(), prefix_cache=True, num_blocks=demand // 2)
    for request_id, prompt in prompts.items():
        core.add(request_id, prompt, tiny.greedy(24))
    collected = tiny.run(core)
    for request_id, prompt in prompts.items():
        tiny.same_tokens(model(), prompt, collected.token_ids[request_id], solo(tuple(prompt), 24))
    assert core.counters.failed_steps == 0
    assert core.scheduler.num_preemptions > 0

"""The engine's truth: greedy tokens equal mlx-lm's single-sequence run, whoever shares the step."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cb.core.outputs import FinishReason
from tests import tiny


@functools.cache
def model() -> tiny.llama.Model:
    return tiny.llama_model()


@functools.cache
def solo(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return tiny.solo(model(), list(prompt), max_tokens)


PROMPTS = st.lists(st.integers(0, tiny.VOCAB_SIZE - 1), min_size=1, max_size=60).map(tuple)


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 10), PROMPTS, st.integers(1, 24)), min_size=1, max_size=7
    ),
    aborts=st.lists(st.tuples(st.integers(1, 25), st.integers(0, 6)), max_size=3),
    budget=st.one_of(st.integers(1, 8), st.integers(9, 80)),
    block_size=st.sampled_from([8, 16, 32]),
    spare_blocks=st.integers(0, 6),
    max_num_seqs=st.integers(1, 6),
    pipelined=st.booleans(),
    prefix_cache=st.booleans(),
    policy=st.sampled_from(["continuous", "fcfs", "static"]),
)
@settings(max_examples=220, deadline=None)
def test_random_runs_equal_solo_runs(
    arrivals: list[tuple[int, tuple[int, ...], int]],
    aborts: list[tuple[int, int]],
    budget: int,
    block_size: int,
    spare_blocks: int,
    max_num_seqs: int,
    pipelined: bool,
    prefix_cache: bool,
    policy: str,
) -> None:
    longest = max(len(prompt) + output for _, prompt, output in arrivals)
    core = tiny.engine(
        model(),
        block_size=block_size,
        # Barely room for the longest request: preemption happens as soon as two run.
        num_blocks=max(2, -(-longest // block_size)) + spare_blocks + (policy == "static"),
        prefix_cache=prefix_cache,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        pipelined=pipelined,
        policy=policy,
    )
    collected = tiny.run_arrivals(core, arrivals, aborts)
    assert core.scheduler.kv_cache.pool.num_used == (policy == "static")
    tiny.like_alone(model(), collected, arrivals, solo)


def test_preemption_happens_and_changes_nothing() -> None:
    prompts = [tuple(range(start, start + 20)) for start in range(6)]
    core = tiny.engine(model(), num_blocks=9, max_num_batched_tokens=16)
    for index, prompt in enumerate(prompts):
        core.add(f"r{index}", prompt, tiny.greedy(30))
    collected = tiny.run(core)
    assert core.scheduler.num_preemptions > 0
    for index, prompt in enumerate(prompts):
        tiny.same_tokens(model(), list(prompt), collected.token_ids[f"r{index}"], solo(prompt, 30))


def test_rows_of_decode_and_prefill_share_a_forward() -> None:
    core = tiny.engine(model(), max_num_batched_tokens=8)
    core.add("talker", [1, 2, 3], tiny.greedy(30))
    collected = tiny.Collected()
    for _ in range(3):
        collected.take(core.step())
    core.add("reader", list(range(40)), tiny.greedy(5))
    tiny.run(core, collected)
    mixed = [r for r in core.scheduler.journal.records if r.rows_decode and r.rows_prefill]
    assert len(mixed) >= 5
    tiny.same_tokens(model(), [1, 2, 3], collected.token_ids["talker"], solo((1, 2, 3), 30))
    tiny.same_tokens(
        model(), list(range(40)), collected.token_ids["reader"], solo(tuple(range(40)), 5)
    )


def test_an_end_of_text_token_ends_and_is_not_part_of_the_output() -> None:
    tokens = solo((5, 6, 7), 12)
    eos = next(token for token in tokens if tokens.index(token) >= 3)
    core = tiny.engine(model(), eos_token_ids=frozenset({eos}))
    core.add("ends", [5, 6, 7], tiny.greedy(12))
    core.add("goes on", [5, 6, 7], tiny.greedy(12, ignore_eos=True))
    core.add("stop id", [5, 6, 7], tiny.greedy(12, ignore_eos=True, stop_token_ids=(tokens[1],)))
    collected = tiny.run(core)
    assert collected.token_ids["ends"] == tokens[: tokens.index(eos)]
    assert collected.finish_reasons["ends"] is FinishReason.STOP
    assert collected.outputs["ends"][-1].stop_token_id == eos
    assert collected.token_ids["goes on"] == tokens
    assert collected.token_ids["stop id"] == tokens[: tokens.index(tokens[1])]


def test_min_tokens_keeps_the_ending_away() -> None:
    tokens = solo((5, 6, 7), 12)
    core = tiny.engine(model(), eos_token_ids=frozenset({tokens[0]}))
    core.add("r", [5, 6, 7], tiny.greedy(12, min_tokens=4))
    collected = tiny.run(core)
    assert len(collected.token_ids["r"]) >= 4
    assert tokens[0] not in collected.token_ids["r"][:4]


def test_max_tokens_zero_prefills_and_ends() -> None:
    core = tiny.engine(model(), max_num_batched_tokens=8)
    core.add("warm", list(range(20)), tiny.greedy(0))
    collected = tiny.run(core)
    assert collected.token_ids["warm"] == []
    assert collected.finish_reasons["warm"] is FinishReason.LENGTH


def test_sliding_windows_equal_solo_runs() -> None:
    windowed = tiny.llama_model(
        seed=3, layer_types=["sliding_attention", "full_attention"], sliding_window=16
    )
    prompts = [list(range(start, start + length)) for start, length in ((0, 50), (3, 5), (9, 17))]
    core = tiny.engine(windowed, max_num_batched_tokens=20)
    for index, prompt in enumerate(prompts):
        core.add(f"r{index}", prompt, tiny.greedy(30))
    collected = tiny.run(core)
    for index, prompt in enumerate(prompts):
        wanted = tiny.solo(windowed, prompt, 30)
        tiny.same_tokens(windowed, prompt, collected.token_ids[f"r{index}"], wanted)


@pytest.mark.parametrize("pipelined", [False, True])
def test_prefix_hits_equal_cold_runs(pipelined: bool) -> None:
    core = tiny.engine(model(), prefix_cache=True, pipelined=pipelined)
    prompt = list(range(50))
    collected = tiny.Collected()
    for turn in range(4):
        core.add(f"r{turn}", prompt, tiny.greedy(10))
        tiny.run(core, collected)
        got = collected.token_ids[f"r{turn}"]
        tiny.same_tokens(model(), prompt, got, solo(tuple(prompt), 10))
        cached = collected.outputs[f"r{turn}"][-1].num_cached_tokens
        assert (cached > 0) == (turn > 0)
        prompt = prompt + got + [turn]

"""Failures from the field (reference/cases.md) that concern the engine, on the tiny model."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest

from mlx_cb.core.outputs import FinishReason
from mlx_cb.engine.core import EngineCore
from tests import tiny


@functools.cache
def model() -> tiny.llama.Model:
    return tiny.llama_model(max_position_embeddings=4096)


def first_logprobs(core: EngineCore, name: str, prompt: list[int]) -> list[float]:
    """Log-probabilities of the twenty best first tokens, by token id."""
    core.add(name, prompt, tiny.greedy(1, logprobs=20))
    (output,) = (o for o in tiny.run(core).outputs[name] if o.logprobs)
    entry = output.logprobs[0]
    return [p for _, p in sorted(zip(entry.top_ids, entry.top_logprobs, strict=True))]


def test_c001_sixteen_prompts_at_once_keep_to_themselves() -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(211) for _ in range(rng.randint(10, 600))] for _ in range(16)]
    wanted = [tiny.solo(model(), prompt, 24) for prompt in prompts]
    for _ in range(5):
        core = large_engine(max_num_batched_tokens=rng.choice([64, 256, 700]))
        for index in rng.sample(range(16), 16):
            core.add(f"r{index}", prompts[index], tiny.greedy(24))
        collected = tiny.run(core)
        for index in range(16):
            tiny.same_tokens(
                model(), prompts[index], collected.token_ids[f"r{index}"], wanted[index]
            )


def large_engine(**changes: object) -> EngineCore:
    """An engine whose context is as long as the cases want it."""
    core = tiny.engine(model(), block_size=16, num_blocks=2048, **changes)
    core.max_request_tokens = 4096
    return core


@pytest.mark.parametrize("layers", [{}, {"sliding_window": 64}])
def test_c002_a_row_does_not_depend_on_its_neighbours_length(layers: dict[str, int]) -> None:
    kinds = ["sliding_attention", "full_attention"] if layers else ["full_attention"] * 2
    kind = tiny.llama_model(max_position_embeddings=4096, layer_types=kinds, **layers)

    def first(neighbour: int) -> tuple[list[float], list[int]]:
        core = tiny.engine(kind, block_size=16, num_blocks=512, max_num_batched_tokens=2048)
        core.max_request_tokens = 4096
        if neighbour:
            core.add("neighbour", [5] * neighbour, tiny.greedy(40))
        core.add("mine", list(range(12)), tiny.greedy(32, logprobs=5))
        collected = tiny.run(core)
        entry = collected.outputs["mine"][0].logprobs[0]
        return entry.top_logprobs, collected.token_ids["mine"]

    alone = first(0)
    for neighbour in (13, 64, 300, 1500):
        logprobs, tokens = first(neighbour)
        np.testing.assert_allclose(logprobs, alone[0], atol=1e-3)
        tiny.same_tokens(kind, list(range(12)), tokens, alone[1])


def test_c003_rows_that_finish_early_do_not_corrupt_the_others() -> None:
    lengths = [2, 3, 5, 8, 13, 40, 80, 160]
    rng = random.Random(3)
    core = large_engine(max_num_seqs=8)
    collected, added = tiny.Collected(), 0
    prompts: dict[str, tuple[list[int], int]] = {}
    while added < 200 or core.has_work:
        while added < 200 and len(core.scheduler.requests) < 8:
            prompt = [rng.randrange(211) for _ in range(rng.randint(1, 20))]
            length = lengths[added] if added < 8 else rng.choice(lengths[:5])
            prompts[f"r{added}"] = (prompt, length)
            core.add(f"r{added}", prompt, tiny.greedy(length))
            added += 1
        collected.take(core.step())
    near_ties = sum(
        tiny.same_tokens(model(), prompt, collected.token_ids[name], tiny.solo(model(), prompt, n))
        for name, (prompt, n) in prompts.items()
    )
    assert near_ties <= 2


@pytest.mark.parametrize("pipelined", [False, True])
def test_c005_nothing_of_an_earlier_conversation_is_seen(pipelined: bool) -> None:
    """System prompts one or two tokens around a block's border, then a new conversation."""
    warm = large_engine(prefix_cache=True, pipelined=pipelined)
    hits = 0
    for length in [*range(14, 19), *range(30, 35), *range(46, 51)]:
        system = [(length * 7 + i) % 200 for i in range(length)]
        warm.add(f"old{length}", [*system, 201, 202, 203, 204], tiny.greedy(20))
        tiny.run(warm)
        new = [*system, 205]
        cold = large_engine(prefix_cache=False)
        got = first_logprobs(warm, f"new{length}", new)
        np.testing.assert_allclose(got, first_logprobs(cold, "new", new), atol=2e-3)
        hits += warm.scheduler.explain(f"new{length}")["num_cached_tokens"]
    assert hits > 0


@pytest.mark.parametrize("lengths", [(10, 26), (1, 2048), (2047, 2049), (512, 512), (1, 26, 512)])
def test_c007_prompts_that_arrive_together(lengths: tuple[int, ...]) -> None:
    core = large_engine(max_num_batched_tokens=512)
    prompts = [[(n * i) % 211 for i in range(n)] for n in lengths]
    for index, prompt in enumerate(prompts):
        core.add(f"r{index}", prompt, tiny.greedy(6))
    collected = tiny.run(core)
    for index, prompt in enumerate(prompts):
        wanted = tiny.solo(model(), prompt, 6)
        tiny.same_tokens(model(), prompt, collected.token_ids[f"r{index}"], wanted)


def test_c010_an_engine_with_nothing_to_do_does_nothing() -> None:
    core = tiny.engine(model())
    for _ in range(100):
        assert core.step() == []
        assert not core.has_work
    for index in range(100):
        core.add(f"r{index}", [1, 2], tiny.greedy(2))
        collected = tiny.run(core)
        assert collected.finish_reasons[f"r{index}"] is FinishReason.LENGTH
        assert core.step() == []


@pytest.mark.parametrize(
    ("policy", "third", "last"), [("continuous", [3, 4, 5], 6), ("static", [7, 8, 9], 9)]
)
def test_seed_example_read_from_the_journal(policy: str, third: list[int], last: int) -> None:
    """Acceptance b, on the real engine: two places, outputs of 6, 2 and 3 tokens."""
    core = tiny.engine(model(), policy=policy, max_num_seqs=2, max_num_batched_tokens=64)
    for name, output in (("first", 6), ("second", 2), ("third", 3)):
        core.add(name, [1, 2, 3], tiny.greedy(output))
    collected = tiny.run(core)
    records = core.scheduler.journal.last(100)
    steps = [
        record["step"]
        for record in records
        if "third" in record["decodes"] + [chunk["request_id"] for chunk in record["prefills"]]
    ]
    assert steps == third
    assert records[-1]["step"] == last
    assert [len(collected.token_ids[name]) for name in ("first", "second", "third")] == [6, 2, 3]


def test_warming_up_leaves_no_trace() -> None:
    core = tiny.engine(model(), prefix_cache=True)
    core.warm_up()
    assert core.counters.steps == 0
    assert core.scheduler.journal.last(10) == []
    core.scheduler.check_integrity()
    core.add("first", [0] * 20, tiny.greedy(2))
    assert tiny.run(core).outputs["first"][-1].num_cached_tokens == 0
    assert core.scheduler.journal.last(10)[0]["step"] == 1

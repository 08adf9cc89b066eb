"""Recurrent states: prefix hits, checkpoints and random runs of a hybrid stay exact."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache

from mlx_cb.core.checkpoints import Checkpoints
from mlx_cb.core.outputs import FinishReason
from mlx_cb.core.request import Request, RequestStatus
from mlx_cb.engine.core import EngineCore
from mlx_cb.model.cache_spec import Layout
from mlx_cb.model.layouts.grouped import GroupedForward
from mlx_cb.model.memory_plan import CHECKPOINT_BUFFERS, Limits, plan_memory
from mlx_cb.model.recurrent import RecurrentStates
from mlx_cb.sampling_params import SamplingParams
from tests import tiny
from tests.families.build import build
from tests.families.scenario import BLOCK_SIZE, engine

HYBRID = "qwen3_5"


@functools.cache
def model(family: str = HYBRID) -> nn.Module:
    return build(family)


@functools.cache
def solo(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return tiny.solo(model(), list(prompt), max_tokens)


@pytest.mark.parametrize("family", [HYBRID, "mamba2", "falcon_h1", "longcat_flash_ngram"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_conversation_goes_on_from_its_last_answer(family: str, pipelined: bool) -> None:
    core = engine(
        model(family), family, num_blocks=64, max_num_batched_tokens=13, pipelined=pipelined
    )
    prompt, computed = list(range(40)), 0
    collected = tiny.Collected()
    for turn, length in enumerate((20, 2, 9)):
        core.add(f"t{turn}", prompt, tiny.greedy(length))
        tiny.run(core, collected)
        got = collected.token_ids[f"t{turn}"]
        tiny.same_tokens(model(family), prompt, got, tiny.solo(model(family), prompt, length))
        cached = collected.outputs[f"t{turn}"][-1].num_cached_tokens
        assert cached == computed // BLOCK_SIZE * BLOCK_SIZE
        computed = len(prompt) + length - 1  # nobody has computed the last token
        prompt = [*prompt, *got, 1, 2, turn]


@pytest.mark.parametrize("pipelined", [False, True])
def test_conversations_that_share_steps_go_on_from_their_answers(pipelined: bool) -> None:
    """Their states lie in one stack, so a border's state is copied out of it."""
    core = engine(model(), HYBRID, num_blocks=200, pipelined=pipelined)
    prompts = {name: [ord(name)] * (9 + 3 * index) for index, name in enumerate("abcd")}
    collected = tiny.Collected()
    for turn in range(3):
        known = {name: len(prompt) for name, prompt in prompts.items()}
        for name, prompt in prompts.items():
            core.add(f"{name}{turn}", prompt, tiny.greedy(12))
        tiny.run(core, collected)
        for name, prompt in prompts.items():
            got = collected.token_ids[f"{name}{turn}"]
            tiny.same_tokens(model(), prompt, got, solo(tuple(prompt), 12))
            cached = collected.outputs[f"{name}{turn}"][-1].num_cached_tokens
            assert cached == (0 if turn == 0 else (known[name] - 2) // BLOCK_SIZE * BLOCK_SIZE)
            prompts[name] = [*prompt, *got, turn]
    # One where each prompt ended and one in each answer, however long it was.
    assert core.scheduler.kv_cache.num_checkpoints <= 2 * 4 * 3


def test_a_long_answer_keeps_one_state() -> None:
    core = engine(model(), HYBRID, num_blocks=64)
    core.add("a", list(range(20)), tiny.greedy(100))
    tiny.run(core)
    assert core.scheduler.kv_cache.num_checkpoints == 2


def test_an_aborted_answer_can_be_gone_on_from() -> None:
    core = engine(model(), HYBRID, num_blocks=64, pipelined=False)
    prompt = list(range(20))
    core.add("a", prompt, tiny.greedy(100))
    collected = tiny.Collected()
    for _ in range(15):
        collected.take(core.step())
    core.abort("a")
    tiny.run(core, collected)
    again = [*prompt, *collected.token_ids["a"]]
    core.add("b", again, tiny.greedy(5))
    tiny.run(core, collected)
    assert collected.outputs["b"][-1].num_cached_tokens == 32
    tiny.same_tokens(model(), again, collected.token_ids["b"], solo(tuple(again), 5))


def test_a_saved_state_does_not_hold_the_batch_it_was_in() -> None:
    states = RecurrentStates([1])
    states.checkpoints = Checkpoints(4)
    requests = [
        Request(str(n), [0], SamplingParams(), 1, frozenset(), 0, status=RequestStatus.RUNNING)
        for n in range(32)
    ]
    cache = ArraysCache(1)
    cache[0] = mx.ones((32, 2**16))  # 8 MiB
    states.save(requests, [8] * 32, [cache])
    states.note_border(requests[3])
    mx.eval(states.arrays())
    for request in requests:
        request.status = RequestStatus.FINISHED
    held = mx.get_active_memory()
    del cache
    states.sweep()
    assert requests[3].border_state is not None
    assert held - mx.get_active_memory() >= 7 * 2**20


@pytest.mark.parametrize("family", [HYBRID, "gemma2", "kimi_linear"])
def test_a_static_batch_computes_its_padding(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline pays for the rows of those who have ended, in every layout that batches."""
    core = engine(model(family), family, num_blocks=64, policy="static", pipelined=False)
    assert core.cache_spec.layout is Layout.GROUPED
    sizes: list[int] = []
    run_part = GroupedForward._run_part

    def record(self: GroupedForward, part: Any) -> Any:
        if not part.is_chunk:
            sizes.append(part.token_ids.shape[0])
        return run_part(self, part)

    monkeypatch.setattr(GroupedForward, "_run_part", record)
    prompts = {name: [ord(name)] * (5 + index) for index, name in enumerate("abc")}
    for index, (name, prompt) in enumerate(prompts.items()):
        core.add(name, prompt, tiny.greedy(4 + 5 * index))
    collected = tiny.run(core)
    for index, (name, prompt) in enumerate(prompts.items()):
        wanted = tiny.solo(model(family), prompt, 4 + 5 * index)
        tiny.same_tokens(model(family), prompt, collected.token_ids[name], wanted)
    assert sizes == [3] * 13


def test_a_shared_beginning_is_saved_where_texts_part() -> None:
    core = engine(model(), HYBRID, num_blocks=64)
    shared = list(range(100, 133))
    collected = tiny.Collected()
    for name in "abc":
        prompt = [*shared, *([ord(name)] * 20)]
        core.add(name, prompt, tiny.greedy(5))
        tiny.run(core, collected)
        tiny.same_tokens(model(), prompt, collected.token_ids[name], solo(tuple(prompt), 5))
    cached = [collected.outputs[name][-1].num_cached_tokens for name in "abc"]
    assert cached == [0, 0, 32]


def test_states_of_the_finished_are_dropped() -> None:
    core = engine(model(), HYBRID, num_blocks=64)
    for name in "ab":
        core.add(name, [1, 2, 3], tiny.greedy(4))
    core.step()
    states = core.runner.forward.states
    assert states.nbytes == 2 * core.cache_spec.state_bytes
    tiny.run(core)
    states.sweep()
    assert states.nbytes == 0


def memory_of(core: EngineCore, folder: Path) -> dict[str, Any]:
    """`memory` of `/status`; the model's folder is looked at for its age."""
    (folder / "config.json").touch()
    core.loaded = replace(core.loaded, path=folder)
    return core.status()["memory"]


def test_memory_is_accounted_per_kind_of_layer(tmp_path: Path) -> None:
    core = engine(model(), HYBRID, num_blocks=64)
    core.add("a", list(range(39)), tiny.greedy(4))
    core.step()
    memory = memory_of(core, tmp_path)
    per_token = 2 * 2 * 2 * 16 * 4  # attention layers, KV heads, keys and values, width, float32
    assert memory["kinds"] == [
        {
            "kind": "keys and values",
            "window": None,
            "stored_as": "float32",
            "num_layers": 2,
            "bytes_per_token": per_token,
        }
    ]
    arrays = core.runner.storage.arrays()
    assert memory["kv"] == sum(array.nbytes for array in arrays)
    assert memory["states"] == memory["state_per_request"] == core.cache_spec.state_bytes
    assert memory["checkpoints"] == core.cache_spec.state_bytes
    windows = memory_of(engine(build("gemma3_text"), "gemma3_text", num_blocks=64), tmp_path)
    assert [(kind["window"], kind["num_layers"]) for kind in windows["kinds"]] == [
        (16, 2),
        (None, 2),
    ]
    latent = memory_of(engine(build("deepseek_v3"), "deepseek_v3", num_blocks=64), tmp_path)
    assert [kind["kind"] for kind in latent["kinds"]] == ["latent"]


def test_a_failed_step_takes_its_checkpoints_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(model(), HYBRID, num_blocks=64)
    prompt = list(range(40))
    core.add("first", prompt, tiny.greedy(3))
    tiny.run(core)
    forward = core.runner.forward
    run = forward.run

    def fail(batch: Any) -> Any:
        monkeypatch.setattr(forward, "run", run)
        raise RuntimeError("broken")

    monkeypatch.setattr(forward, "run", fail)
    core.add("broken", [7] * 20, tiny.greedy(3))
    collected = tiny.run(core)
    collected.take(core.step())  # what a failed launch has left to say
    assert collected.finish_reasons["broken"] is FinishReason.ERROR
    core.add("again", prompt, tiny.greedy(3))
    tiny.run(core, collected)
    assert collected.outputs["again"][-1].num_cached_tokens == 0
    tiny.same_tokens(model(), prompt, collected.token_ids["again"], solo(tuple(prompt), 3))


def test_the_least_recently_used_checkpoint_goes() -> None:
    checkpoints = Checkpoints(2)
    checkpoints.save(b"a", 1)
    checkpoints.save(b"b", 2)
    assert checkpoints.load(b"a") == 1
    checkpoints.save(b"c", 3)
    assert [name in checkpoints for name in (b"a", b"b", b"c")] == [True, False, True]
    checkpoints.replace(b"c", b"d", 4)
    assert [name in checkpoints for name in (b"a", b"c", b"d")] == [True, False, True]
    checkpoints.replace(b"a", b"e", 5)
    assert b"d" in checkpoints, "what was used stays until it is the oldest"
    assert b"a" not in checkpoints
    nothing = Checkpoints(0)
    nothing.save(b"a", 1)
    assert len(nothing) == 0


PREFIXES = st.sampled_from([(), tuple(range(20)), tuple(range(40))])
ENDS = st.lists(st.integers(0, 210), min_size=1, max_size=20).map(tuple)
PROMPTS = st.tuples(PREFIXES, ENDS).map(lambda pair: pair[0] + pair[1])


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 8), PROMPTS, st.integers(1, 12)), min_size=1, max_size=6
    ),
    aborts=st.lists(st.tuples(st.integers(1, 15), st.integers(0, 5)), max_size=2),
    budget=st.one_of(st.integers(1, 8), st.integers(9, 80)),
    spare_blocks=st.integers(0, 8),
    num_checkpoints=st.integers(0, 4),
    max_num_seqs=st.integers(1, 5),
    pipelined=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_random_runs_of_a_hybrid_equal_solo_runs(
    arrivals: list[tuple[int, tuple[int, ...], int]],
    aborts: list[tuple[int, int]],
    budget: int,
    spare_blocks: int,
    num_checkpoints: int,
    max_num_seqs: int,
    pipelined: bool,
) -> None:
    longest = max(len(prompt) + output for _, prompt, output in arrivals)
    core = engine(
        model(),
        HYBRID,
        num_blocks=max(2, -(-longest // BLOCK_SIZE)) + spare_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        pipelined=pipelined,
    )
    assert core.cache_spec.layout is Layout.GROUPED
    assert core.scheduler.kv_cache.checkpoints is not None
    core.scheduler.kv_cache.checkpoints.capacity = num_checkpoints
    collected = tiny.run_arrivals(core, arrivals, aborts)
    tiny.like_alone(model(), collected, arrivals, solo)


def test_live_buffers_stay_bounded_whatever_comes() -> None:
    core = engine(model(), HYBRID, num_blocks=64)
    checkpoints = core.scheduler.kv_cache.checkpoints
    assert checkpoints is not None
    checkpoints.capacity = 5
    seen = []
    for turn in range(30):
        core.add(f"r{turn}", [turn, *range(40)], tiny.greedy(3))
        tiny.run(core)
        seen.append(core.runner.num_buffers)
    assert len(checkpoints) == 5
    assert max(seen) <= seen[0] + 5 * core.cache_spec.num_state_arrays
    assert max(seen[20:]) <= max(seen[10:20]), "buffers grow with what was served"


def test_saved_states_are_planned_within_the_limit_of_buffers() -> None:
    spec = engine(model(), HYBRID, num_blocks=64).cache_spec
    plan = plan_memory(2**45, spec, Limits(16, 64, 4096))
    assert 0 < plan.num_checkpoints * spec.num_state_arrays <= CHECKPOINT_BUFFERS
    assert plan_memory(2**26, spec, Limits(16, 64, 4096)).num_checkpoints > 5

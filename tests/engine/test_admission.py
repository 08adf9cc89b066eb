"""The queue's bound: refused in time, with an honest word on when to come back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlx_cb.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_cb.core.outputs import RequestOutput
from mlx_cb.engine.admission import MIN_RETRY_S, AdmissionControl
from mlx_cb.engine.client import AsyncEngine
from mlx_cb.engine.messages import StepOutputs
from mlx_cb.errors import Overloaded
from mlx_cb.standing import Standing
from tests import tiny


def told(
    control: AdmissionControl,
    now: float = 0.0,
    *,
    tokens: int = 0,
    seconds: float = 0.0,
    first: tuple[str, ...] = (),
    **progress: dict[str, int],
) -> None:
    """A frame of the engine: prompt tokens of a step and their time, requests that got a token."""
    outputs = [RequestOutput(name, [7]) for name in first]
    control.saw(StepOutputs(outputs, tokens, seconds, **progress), now)


def busy(queued: int, *, max_wait_s: float = 10.0, **settings: object) -> AdmissionControl:
    """100 prompt tokens a second; `queued` prompts of 500 tokens wait."""
    control = AdmissionControl(max_num_seqs=100, max_wait_s=max_wait_s + 1e-6, **settings)
    control.queue("before", 500)
    for _ in range(50):
        told(control, tokens=50, seconds=0.5)
    control.leave("before", 0.0)
    for index in range(queued):
        control.queue(f"r{index}", 500)
    return control


def test_nothing_known_means_welcome() -> None:
    control = AdmissionControl(max_num_seqs=1, max_wait_s=0.1)
    control.queue("a", 10_000)
    control.check()


def test_waiting_prompts_are_worth_their_seconds() -> None:
    assert busy(3).predicted_wait("") == pytest.approx(15.0)
    with pytest.raises(Overloaded) as caught:
        busy(3).check()
    assert caught.value.retry_after == pytest.approx(15.0 - 8.0, rel=0.11)
    busy(2).check()


def test_prompts_that_have_their_first_token_wait_no_more() -> None:
    control = busy(3)
    told(control, first=("r0",))
    control.leave("r1", 2.0)
    assert control.predicted_wait() == pytest.approx(5.0)
    control.check()


def test_what_is_computed_and_what_was_cached_is_not_waited_for() -> None:
    control = busy(3)
    told(control, computed={"r0": 200}, cached={"r1": 480})
    assert control.predicted_wait() == pytest.approx((300 + 20 + 500) / 100)


def test_a_step_that_was_not_full_says_little_about_the_speed() -> None:
    control = busy(0)
    told(control, tokens=1, seconds=0.5)
    control.queue("r0", 500)
    assert control.predicted_wait() == pytest.approx(5.0)


def test_old_measurements_give_way_to_new_ones() -> None:
    control = busy(1)
    for _ in range(200):
        told(control, tokens=25, seconds=0.5)
    assert control.predicted_wait() == pytest.approx(10.0, rel=0.02)


def test_a_flood_closes_the_door_to_its_user_and_to_nobody_else() -> None:
    control = busy(0)
    for index in range(60):
        control.queue(f"hog{index}", 500, "hog")
    with pytest.raises(Overloaded):
        control.check("hog")
    control.check("ann")
    assert control.predicted_wait("ann", prompt_tokens=100) == pytest.approx(1.0)
    control.queue("ann0", 500, "ann")
    # Before her next prompt of 100 tokens comes her first, and as much again of the hog's.
    assert control.predicted_wait("ann", prompt_tokens=100) == pytest.approx(5.0 + 6.0)
    first_come = busy(0, is_fair=False)
    first_come.queue("hog0", 5000, "hog")
    with pytest.raises(Overloaded):
        first_come.check("ann")


def test_a_heavier_user_waits_for_less_of_the_others() -> None:
    control = busy(0)
    for index in range(60):
        control.queue(f"hog{index}", 500, "hog")
    wait = control.predicted_wait("boss", Standing(weight=4.0), prompt_tokens=400)
    assert wait == pytest.approx(1.0)


def test_many_users_with_one_request_each_are_a_queue_like_any_other() -> None:
    control = busy(0)
    refused = 0
    for index in range(60):
        try:
            control.check(f"user{index}")
        except Overloaded:
            refused += 1
        else:
            control.queue(f"r{index}", 500, f"user{index}")
    assert refused == 57, "two prompts are ten seconds, and a third is let in at the limit"


def test_batch_holds_up_nobody_of_a_lower_rank() -> None:
    control = busy(0)
    for index in range(60):
        control.queue(f"night{index}", 500, "night", Standing(rank=1))
    control.check("ann")
    with pytest.raises(Overloaded):
        control.check("night", Standing(rank=1))
    control = busy(0)
    for index in range(4):
        control.queue(f"ann{index}", 500, "ann")
    with pytest.raises(Overloaded):
        control.check("night", Standing(rank=1))


def test_a_closed_door_opens_when_it_said_it_would() -> None:
    """From the first refusal on, until the wait has fallen to four fifths of the limit."""
    control = busy(0)
    control.queue("r0", 1500)
    with pytest.raises(Overloaded) as caught:
        control.check()
    waited = 0.0
    while True:
        waited += 0.25
        told(control, waited, tokens=25, seconds=0.25, computed={"r0": int(100 * waited)})
        try:
            control.check()
        except Overloaded:
            assert waited < 60
            continue
        break
    assert waited == pytest.approx(caught.value.retry_after or 0, rel=0.15)
    assert control.predicted_wait() == pytest.approx(8.0, abs=0.3)


def test_full_places_are_worth_a_service_time() -> None:
    control = AdmissionControl(max_num_seqs=4, max_wait_s=10.0)
    for index in range(40):
        control.queue(f"old{index}", 1)
        told(control, 0.0, computed={f"old{index}": 1}, first=(f"old{index}",))
        control.leave(f"old{index}", 8.0)
    for index in range(7):
        control.queue(f"r{index}", 1)
        if index < 4:
            told(control, 0.0, first=(f"r{index}",))
    assert control.predicted_wait() == pytest.approx(4 * 8.0 / 4)
    control.queue("r7", 1)
    control.queue("r8", 1)
    with pytest.raises(Overloaded, match="about 12 s of work"):
        control.check()


def test_a_place_is_held_from_the_first_chunk_on() -> None:
    control = AdmissionControl(max_num_seqs=1, max_wait_s=10.0)
    control.queue("r0", 100)
    told(control, 3.0, computed={"r0": 50})
    told(control, 6.0, computed={"r0": 100}, first=("r0",))
    control.leave("r0", 8.0)
    control.queue("r1", 1)
    assert control.predicted_wait() == pytest.approx(5.0)


def test_a_flood_is_refused_at_once_and_the_accepted_all_finish(tmp_path: Path) -> None:
    folder = tiny.save(tiny.llama_model(), tmp_path / "tiny")
    config = EngineConfig(
        model=ModelConfig(model=str(folder)),
        cache=CacheConfig(kv_memory=1 << 24, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_queue_wait_s=0.3),
    )

    async def main() -> None:
        engine = AsyncEngine(config)
        await engine.start()
        await engine.wait_ready()

        async def one(name: str) -> int:
            count = 0
            async for output in engine.generate(name, [1] * 100, tiny.greedy(30)):
                count += len(output.token_ids)
            return count

        await asyncio.gather(*(one(f"warm{index}") for index in range(3)))
        accepted, refused = [], []
        for index in range(200):
            task = asyncio.ensure_future(one(f"r{index}"))
            await asyncio.sleep(0)
            if task.done():
                error = task.exception()
                assert isinstance(error, Overloaded)
                assert (error.retry_after or 0) >= 0.9 * MIN_RETRY_S
                refused.append(task)
            else:
                accepted.append(task)
        assert accepted
        assert refused, "decided without a word from the engine"
        assert set(await asyncio.gather(*accepted)) == {30}
        assert await one("afterwards") == 30
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_tiny_first_prompt_and_the_first_full_step_say_nothing_of_the_speed() -> None:
    """Both take the time of compiling: 16 prompts were refused for a wait of ten minutes."""
    control = AdmissionControl(max_num_seqs=100, max_wait_s=10.0)
    control.queue("hello", 8)
    told(control, tokens=8, seconds=4.0, computed={"hello": 8}, first=("hello",))
    control.leave("hello", 4.0)
    for index in range(16):
        control.check("", prompt_tokens=352)
        control.queue(f"r{index}", 352)
    told(control, tokens=88, seconds=5.0)
    control.check("", prompt_tokens=352)
    told(control, tokens=88, seconds=0.5)
    assert control.predicted_wait("other", prompt_tokens=0) == 0.0
    assert control.predicted_wait("") == pytest.approx(16 * 352 * 0.5 / 88)

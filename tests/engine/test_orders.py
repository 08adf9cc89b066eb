"""Operators' orders and deadlines on a real engine process: pause, cancel, freeze, restart."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_cb.core.outputs import FinishReason, RequestOutput
from mlx_cb.engine.client import CANCELLED, AsyncEngine
from mlx_cb.engine.interface import Order, Verb
from tests import tiny
from tests.engine.test_async_engine import asynchronous, read, running, tokens, until


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.llama_model(), tmp_path_factory.mktemp("tiny"))


class Reader:
    """Reads one stream beside the test."""

    def __init__(self, engine: AsyncEngine, name: str, user: str, **more: Any) -> None:
        self.outputs: list[RequestOutput] = []
        self._engine = engine
        self.task = asyncio.create_task(self._read(name, user, more))

    async def _read(self, name: str, user: str, more: dict[str, Any]) -> None:
        prompt = [len(name) % 200] * 20
        stream = self._engine.generate(name, prompt, tiny.greedy(450), user=user, **more)
        async for output in stream:
            self.outputs.append(output)

    @property
    def num_tokens(self) -> int:
        return len(tokens(self.outputs))

    @property
    def reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None


async def settled(count: Callable[[], int]) -> int:
    """The count, once it has stopped growing."""
    last, since = count(), 0
    while since < 20:
        await asyncio.sleep(0.02)
        since = since + 1 if count() == last else 0
        last = count()
    return last


@asynchronous
async def test_a_paused_user_stands_still_frees_blocks_and_goes_on_to_the_same_tokens(
    checkpoint: Path,
) -> None:
    wanted = tiny.solo(tiny.llama_model(), [3] * 20, 450)
    async with running(checkpoint) as engine:
        reader = Reader(engine, "ann", "ann")
        await until(lambda: reader.num_tokens > 10, 20)
        control = await engine.order(Order(Verb.PAUSE_USER, "ann", by="boss"))
        assert control is not None
        (act,) = control["in_force"]
        assert (act["action"], act["target"], act["by"]) == ("pause user", "ann", "boss")
        before = await settled(lambda: reader.num_tokens)
        assert before < 450
        status = await engine.status()
        assert status["blocks"]["used"] == 0
        assert len(tokens(await read(engine, "bob", [1] * 8, 5))) == 5
        assert reader.num_tokens == before
        control = await engine.order(Order(Verb.RESUME_USER, "ann", by="boss"))
        assert control is not None
        assert control["in_force"] == []
        assert control["records"][-1]["ended_because"] == "boss said so"
        await asyncio.wait_for(reader.task, 30)
        tiny.same_tokens(tiny.llama_model(), [3] * 20, tokens(reader.outputs), wanted)


@asynchronous
async def test_a_cancelled_request_ends_and_leaves_nothing(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        one, two = Reader(engine, "a" * 32, "ann"), Reader(engine, "a" * 32 + "-1", "ann")
        other = Reader(engine, "bob", "bob")
        await until(lambda: min(one.num_tokens, two.num_tokens) > 3, 20)
        await engine.order(Order(Verb.CANCEL_REQUEST, "a" * 32))
        await asyncio.gather(one.task, two.task)
        assert one.reason is two.reason is FinishReason.ABORT
        assert one.outputs[-1].error == CANCELLED
        await other.task
        assert other.reason is FinishReason.LENGTH
        assert (await engine.status())["blocks"]["used"] == 0


@asynchronous
async def test_a_deadline_ends_a_request_with_what_it_has(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        late = Reader(engine, "late", "ann", timeout_s=0.15)
        await asyncio.wait_for(late.task, 20)
        if late.num_tokens < 450:  # unless this machine is faster than the clock allows
            assert late.reason is FinishReason.DEADLINE
        await engine.order(Order(Verb.PAUSE_USER, "eve"))
        paused = Reader(engine, "paused", "eve", timeout_s=0.3)
        await asyncio.wait_for(paused.task, 20)
        assert (paused.reason, paused.num_tokens) == (FinishReason.DEADLINE, 0)


@asynchronous
async def test_a_paused_engine_is_idle_and_alive(checkpoint: Path) -> None:
    async with running(checkpoint, step_timeout_s=1.5) as engine:
        await engine.order(Order(Verb.PAUSE_USER, "eve"))
        paused = Reader(engine, "paused", "eve")
        await asyncio.sleep(2.5)
        assert engine.is_ready
        assert engine.num_restarts == 0
        assert not paused.outputs
        await engine.order(Order(Verb.CANCEL_USER, "eve"))
        await asyncio.wait_for(paused.task, 20)
        assert paused.reason is FinishReason.ABORT


@asynchronous
async def test_freeze_and_pauses_outlive_a_restart_which_is_recorded(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        await engine.order(Order(Verb.FREEZE))
        await engine.order(Order(Verb.PAUSE_USER, "eve"))
        await engine.order(Order(Verb.PAUSE_USER, "ann"))
        await engine.order(Order(Verb.RESUME_USER, "ann"))
        os.kill(engine.worker_pid or 0, signal.SIGKILL)
        await until(lambda: engine.num_restarts == 1, 20)
        await until(lambda: engine.is_ready, 30)
        status = await engine.status()
        assert status["control"]["frozen"]
        assert status["control"]["restraint"]["paused_users"] == ["eve"]
        (restart,) = status["engine_restarts"]
        assert restart["cause"] == "the engine ended by itself"
        assert len(tokens(await read(engine, "ann", [1] * 8, 5))) == 5


def test_failing_steps_make_the_engine_take_one_at_a_time() -> None:
    """A step that fails takes its requests with it; after three, each fails alone."""
    core = tiny.engine(tiny.llama_model(), max_num_seqs=4)
    launch = core.runner.launch

    def failing(plan: Any, previous: Any) -> Any:
        named = [*plan.decodes, *(chunk.request for chunk in plan.prefills)]
        if any(request.request_id.startswith("bad") for request in named):
            raise RuntimeError("no such kernel")
        return launch(plan, previous)

    core.runner.launch = failing  # type: ignore[method-assign]
    for number in range(3):
        core.add(f"bad{number}", [1, 2, 3], tiny.greedy(4))
        tiny.run(core)
    restraint = core.scheduler.entrance.restraint
    assert restraint.one_at_a_time
    for name in ("good1", "bad4", "good2"):
        core.add(name, [1, 2, 3], tiny.greedy(4))
    reasons = tiny.run(core).finish_reasons
    assert reasons["good1"] is reasons["good2"] is FinishReason.LENGTH
    assert reasons["bad4"] is FinishReason.ERROR
    (act,) = core.status()["control"]["in_force"]
    assert act["action"] == "one at a time"
    assert "failed steps in a minute is 3" in act["cause"]

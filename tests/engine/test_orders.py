"""Operators' orders and deadlines on a real engine process: pause, cancel, freeze, restart."""

from __future__ import annotations

import asyncio
import os
import signal
import time
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
        stream = self._engine.generate(name, prompt, tiny.greedy(60), user=user, **more)
        async for output in stream:
            self.outputs.append(output)

    @property
    def num_tokens(self) -> int:
        return len(tokens(self.outputs))

    @property
    def reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_pause_in_the_middle_frees_blocks_and_changes_no_token(pipelined: bool) -> None:
    model = tiny.llama_model()
    prompts = {"ann": [3] * 20, "bob": [5] * 30}
    core = tiny.engine(model, prefix_cache=True, pipelined=pipelined)
    for name, prompt in prompts.items():
        core.add(name, prompt, tiny.greedy(60), user=name)
    collected = tiny.Collected()
    for _ in range(25):
        collected.take(core.step())
    core.order(Order(Verb.PAUSE_USER, "ann", by="boss"))
    core.scheduler.check_integrity()
    assert core.scheduler.requests["ann"].block_table == []
    while "bob" in core.scheduler.requests:
        collected.take(core.step())
    core.step()
    stood = len(collected.token_ids["ann"])
    assert stood < 60
    assert core.is_held
    core.order(Order(Verb.RESUME_USER, "ann", by="boss"))
    tiny.run(core, collected)
    for name, prompt in prompts.items():
        tiny.same_tokens(model, prompt, collected.token_ids[name], tiny.solo(model, prompt, 60))
    (act,) = core.governor.control.records
    assert (act.action, act.target, act.by) == ("pause user", "ann", "boss")
    assert act.ended_because == "boss said so"


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_deadline_ends_a_request_with_what_it_has(pipelined: bool) -> None:
    core = tiny.engine(tiny.llama_model(), pipelined=pipelined)
    core.add("late", [1] * 20, tiny.greedy(400), timeout_s=3600)
    core.add("other", [2] * 20, tiny.greedy(40))
    collected = tiny.Collected()
    for _ in range(10):
        collected.take(core.step())
    core.scheduler._clock = lambda: time.monotonic() + 7200
    tiny.run(core, collected)
    assert collected.finish_reasons["late"] is FinishReason.DEADLINE
    assert 5 < len(collected.token_ids["late"]) < 20
    assert collected.finish_reasons["other"] is FinishReason.LENGTH
    assert core.scheduler.kv_cache.pool.num_used == 0


@asynchronous
async def test_a_paused_user_waits_and_others_do_not(checkpoint: Path) -> None:
    wanted = tiny.solo(tiny.llama_model(), [3] * 20, 60)
    async with running(checkpoint) as engine:
        control = await engine.order(Order(Verb.PAUSE_USER, "ann"))
        assert control is not None
        assert control["restraint"]["paused_users"] == ["ann"]
        reader = Reader(engine, "ann", "ann")
        assert len(tokens(await read(engine, "bob", [1] * 8, 5))) == 5
        assert reader.num_tokens == 0
        status = await engine.status()
        assert status["users"]["ann"]["waiting"] == 1
        await engine.order(Order(Verb.RESUME_USER, "ann"))
        await asyncio.wait_for(reader.task, 30)
        tiny.same_tokens(tiny.llama_model(), [3] * 20, tokens(reader.outputs), wanted)


@asynchronous
async def test_a_cancelled_request_ends_and_leaves_nothing(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        await engine.order(Order(Verb.PAUSE_USER, "ann"))
        one, two = Reader(engine, "a" * 32, "ann"), Reader(engine, "a" * 32 + "-1", "ann")
        other = Reader(engine, "b" * 32, "ann")
        await asyncio.sleep(0)
        await engine.order(Order(Verb.CANCEL_REQUEST, "a" * 32))
        await asyncio.wait_for(asyncio.gather(one.task, two.task), 20)
        assert one.reason is two.reason is FinishReason.ABORT
        assert one.outputs[-1].error == CANCELLED
        assert not other.outputs
        status = await engine.status()
        assert status["users"]["ann"] == {"waiting": 1, "running": 0}
        await engine.order(Order(Verb.RESUME_USER, "ann"))
        await asyncio.wait_for(other.task, 30)
        assert other.reason is FinishReason.LENGTH
        assert (await engine.status())["blocks"]["used"] == 0


@asynchronous
async def test_a_paused_requests_time_runs_on(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
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
    (act,) = core.governor.as_dict()["in_force"]
    assert act["action"] == "one at a time"
    assert "failed steps in a minute is 3" in act["cause"]

"""The worker process and its handle: deaths, hang-ups, questions and a quiet end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlx_cb.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_cb.core.outputs import FinishReason, RequestOutput
from mlx_cb.engine.client import AsyncEngine
from mlx_cb.engine.stream import OutputStream
from mlx_cb.errors import ContextLengthExceeded, EngineDead, ModelNotFound
from tests import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.llama_model(), tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def running(checkpoint: Path, **changes: Any) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        model=ModelConfig(model=str(checkpoint)),
        cache=CacheConfig(kv_memory=1 << 24),
        scheduler=SchedulerConfig(max_num_batched_tokens=64),
    )
    engine = AsyncEngine(config, **changes)
    await engine.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.stop()


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine test to its end within a minute."""

    def wrapper(checkpoint: Path) -> None:
        asyncio.run(asyncio.wait_for(test(checkpoint), 60))

    wrapper.__name__ = test.__name__
    return wrapper


async def read(engine: AsyncEngine, name: str, prompt: list[int], n: int) -> list[RequestOutput]:
    return [o async for o in engine.generate(name, prompt, tiny.greedy(n))]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


@asynchronous
async def test_many_streams_equal_solo_runs(checkpoint: Path) -> None:
    model = tiny.llama_model()
    prompts = [[index] * (index + 1) for index in range(16)]
    async with running(checkpoint) as engine:
        results = await asyncio.gather(
            *(read(engine, f"r{i}", prompt, 20) for i, prompt in enumerate(prompts))
        )
        assert engine.model_info.vocab_size == tiny.VOCAB_SIZE
    for prompt, outputs in zip(prompts, results, strict=True):
        tiny.same_tokens(model, prompt, tokens(outputs), tiny.solo(model, prompt, 20))
        assert [o.finish_reason for o in outputs][-1] is FinishReason.LENGTH


@asynchronous
async def test_worker_killed_three_times_under_eight_streams(checkpoint: Path) -> None:
    """Acceptance h."""
    async with running(checkpoint) as engine:
        for round_ in range(3):
            streams = [
                asyncio.create_task(read(engine, f"r{round_}-{i}", [i + 1], 450)) for i in range(8)
            ]
            await asyncio.sleep(0.3)
            pid = engine.worker_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            results = await asyncio.gather(*streams)
            assert time.monotonic() - killed < 1.0
            for outputs in results:
                assert outputs[-1].finish_reason is FinishReason.ERROR
                assert "started again" in (outputs[-1].error or "")
            assert not engine.is_ready
            with pytest.raises(EngineDead):
                await read(engine, "too early", [1], 1)
            await until(lambda: engine.is_ready, 30)
            assert engine.worker_pid != pid
            assert not psutil.pid_exists(pid)
            assert len(tokens(await read(engine, f"again{round_}", [1], 5))) == 5
        assert engine.num_restarts == 3


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux schedules so")
@asynchronous
async def test_no_thread_of_the_worker_interrupts_another(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        await read(engine, "r", [1], 3)
        threads = psutil.Process(engine.worker_pid).threads()
        assert len(threads) > 1
        assert {os.sched_getscheduler(thread.id) for thread in threads} == {os.SCHED_BATCH}


@asynchronous
async def test_c009_a_stuck_worker_is_noticed_and_replaced(checkpoint: Path) -> None:
    async with running(checkpoint, step_timeout_s=1.0) as engine:
        stream = asyncio.create_task(read(engine, "r", [1], 450))
        await asyncio.sleep(0.1)
        os.kill(engine.worker_pid or 0, signal.SIGSTOP)
        outputs = await asyncio.wait_for(stream, 5)
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert not engine.is_ready
        await until(lambda: engine.is_ready, 30)
        assert len(tokens(await read(engine, "again", [1], 5))) == 5


@asynchronous
async def test_leaving_a_stream_frees_its_blocks(checkpoint: Path) -> None:
    """C011, G17: queued, prefilling or decoding; the generated tokens stop."""
    async with running(checkpoint) as engine:

        async def leave_after(count: int) -> None:
            stream = engine.generate(f"r{count}", [1] * 40, tiny.greedy(450))
            async for _ in stream:
                count -= 1
                if count <= 0:
                    break
            await stream.aclose()

        await asyncio.gather(*(leave_after(count) for count in range(1, 6)))
        waiting = asyncio.create_task(read(engine, "never read", [1] * 40, 450))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        status: dict[str, Any] = {"blocks": {"used": 1}}
        deadline = time.monotonic() + 2
        while status["blocks"]["used"] and time.monotonic() < deadline:
            status = await engine.status()
        assert status["blocks"]["used"] == 0
        assert status["open_streams"] == 0
        story = await engine.explain("r3")
        assert story is not None
        assert story["finish_reason"] == "abort"
        steps = await engine.steps(3)
        assert 1 <= len(steps) <= 3


@asynchronous
async def test_refusals_reach_the_reader(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        with pytest.raises(ContextLengthExceeded):
            await read(engine, "long", [1] * 600, 1)
        assert await engine.explain("long") is None


@asynchronous
async def test_stopping_ends_streams_and_leaves_no_process(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        pid = engine.worker_pid
        stream = asyncio.create_task(read(engine, "r", [1], 450))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await engine.stop()
        assert time.monotonic() - began < 3
        outputs = await stream
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert not psutil.pid_exists(pid or 0)


def test_a_missing_model_is_reported_and_not_retried() -> None:
    async def main() -> None:
        engine = AsyncEngine(EngineConfig(model=ModelConfig(model="/no/such/folder")))
        await engine.start()
        with pytest.raises(ModelNotFound, match="no folder or file"):
            await engine.wait_ready()
        assert engine.num_restarts == 0
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_lagging_reader_gets_what_came_meanwhile_as_one() -> None:
    async def main() -> None:
        stream = OutputStream()
        for token in (1, 2, 3):
            stream.put(RequestOutput("r", [token]))
        stream.put(RequestOutput("r", finish_reason=FinishReason.STOP))
        output = await stream.get()
        assert output.token_ids == [1, 2, 3]
        assert output.finish_reason is FinishReason.STOP

    asyncio.run(main())

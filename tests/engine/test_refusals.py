"""A worker that refuses a request says when to come back, and the client hears it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlx_cb.config import EngineConfig
from mlx_cb.engine.client import AsyncEngine
from mlx_cb.engine.messages import Add, Refused, decode_from_worker, encode
from mlx_cb.engine.stream import OutputStream
from mlx_cb.engine.worker import Worker
from mlx_cb.errors import Overloaded
from mlx_cb.sampling_params import SamplingParams


class Channel:
    """The worker's end, which keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Busy:
    """An engine that takes nothing more."""

    def add(self, *request: Any) -> None:
        raise Overloaded("too much work is waiting", retry_after=7.5)


def test_when_to_come_back_crosses_the_process_border() -> None:
    channel = Channel()
    worker = Worker(channel)  # type: ignore[arg-type]
    worker._core = Busy()  # type: ignore[assignment]
    worker._take(Add("r", [1], SamplingParams(), "ann"))
    (refused,) = channel.sent
    received = decode_from_worker(encode(refused)[4:])
    assert isinstance(received, Refused)

    async def read() -> None:
        engine = AsyncEngine(EngineConfig())
        stream = engine._streams["r"] = OutputStream()
        engine._take(received)
        await stream.get()

    with pytest.raises(Overloaded) as caught:
        asyncio.run(read())
    assert caught.value.retry_after == 7.5

"""A small server with scripted timing, and a way to run a plan against it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from mlx_cb.bench.calls import Call, CallRecord, Lane, Plan, Prompt
from mlx_cb.bench.exchange import Endpoint
from mlx_cb.bench.generator import Target
from mlx_cb.bench.prompts import CommonWords


@dataclass
class Script:
    """How the stub answers: pauses (s) before each chunk, and what goes wrong."""

    pauses: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    status: int = 200
    cut_after: int | None = None
    error_after: int | None = None
    usage: bool = True
    steps: list[dict] = field(default_factory=list)


class Stub:
    """A server in a thread; `bodies` are what it was asked, `gone` counts clients that hung up."""

    def __init__(self) -> None:
        self.script = Script()
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.gone = 0
        routes = [
            Route("/health", lambda request: JSONResponse({"status": "ok"})),
            Route("/status/steps", self.steps),
            Route("/v1/completions", self.answer, methods=["POST"]),
            Route("/v1/chat/completions", self.answer, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off")
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)

    def start(self) -> None:
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=5)
        self.socket.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    async def steps(self, request):
        return JSONResponse(self.script.steps)

    async def answer(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        if self.script.status != 200:
            return JSONResponse({"error": {"message": "no"}}, status_code=self.script.status)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body):
        script, ended = self.script, False
        chat = "messages" in body
        try:
            yield ": keep-alive\n\n"
            for index, pause in enumerate(script.pauses[: body["max_tokens"]]):
                await asyncio.sleep(pause)
                if script.error_after == index:
                    yield 'data: {"error": {"message": "engine died"}}\n\n'
                    return
                if script.cut_after == index:
                    return
                choice = {"index": 0, "finish_reason": None}
                choice |= {"delta": {"content": " w"}} if chat else {"text": " w"}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            last = {"index": 0, "finish_reason": "length"}
            last |= {"delta": {}} if chat else {"text": ""}
            yield f"data: {json.dumps({'choices': [last]})}\n\n"
            if script.usage:
                usage = {"prompt_tokens": 11, "completion_tokens": len(script.pauses)}
                usage["prompt_tokens_details"] = {"cached_tokens": 4}
                yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
            ended = True
        finally:
            self.gone += not ended


@pytest.fixture
def stub():
    server = Stub()
    server.start()
    yield server
    server.stop()


def target(stub: Stub, **fields) -> Target:
    """The stub as the generator addresses it."""
    return Target(Endpoint.parse(stub.url), CommonWords(), timeout_s=10.0, **fields)


def one_call(**fields) -> Plan:
    """A plan of a single call."""
    return Plan([Lane(deque([Call(Prompt(8, 1), 16, **fields)]))])


def record(times: list[float], *, sent: float = 0.0, **fields) -> CallRecord:
    """A complete record with chunks at these times, one token each."""
    call = Call(Prompt(8, 1), len(times), fields.pop("user", "local"), fields.pop("group", "all"))
    values = {"ended_s": times[-1] if times else sent, "output_tokens": len(times)}
    return CallRecord(call, sent, chunk_times_s=times, **(values | fields))

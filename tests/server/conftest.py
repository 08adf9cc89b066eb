"""A live server on the scripted engine, on a port of its own, for real clients to talk to."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import httpx2
import msgspec
import pytest

from mlx_cb.config import EngineConfig, ModelConfig, ServerConfig
from mlx_cb.engine.script import Script
from mlx_cb.engine.scripted import ScriptedEngine
from mlx_cb.server.front import Front
from mlx_cb.server.serving import Serving, bind


class LiveServer:
    """A server in a thread of this process; `engine` may be looked at."""

    def __init__(self, script: dict[str, Any], listen_port: int = 0, **settings: Any) -> None:
        """`limits` are of connections, `certificates` for TLS, `loop` makes the event loop; the
        rest is a ServerConfig's."""
        self._listen_port = listen_port
        self._limits = settings.pop("limits", None)
        self._certificates = settings.pop("certificates", None)
        loop = settings.pop("loop", None)
        self.engine = ScriptedEngine(msgspec.convert(script, Script))
        name = self.engine.script.model
        settings.setdefault("engine", EngineConfig(model=ModelConfig(model=name)))
        self._config = ServerConfig(**settings)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(loop,), daemon=True)
        self._thread.start()
        assert self._started.wait(20)
        self._client = httpx2.Client(timeout=20, verify=False)

    def _run(self, loop: Callable[[], asyncio.AbstractEventLoop] | None) -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.front = Front(self.engine, self._config)
        self.prompts: dict[str, list[int]] = {}
        self._remember_prompts()
        await self.engine.start()
        await self.engine.wait_ready()
        await self.front.load()
        listener = bind("127.0.0.1", self._listen_port)
        scheme = "http" if self._certificates is None else "https"
        self.url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        self.serving = Serving(self.front, self._certificates, self._limits)
        self._started.set()
        await self.serving.run([listener])
        await self.engine.stop()

    def _remember_prompts(self) -> None:
        """Keep the token ids that the engine is given, by request id."""
        generate = self.engine.generate

        def remembering(request_id: str, prompt_ids: Any, params: Any, **more: Any) -> Any:
            self.prompts[request_id] = list(prompt_ids)
            return generate(request_id, prompt_ids, params, **more)

        self.engine.generate = remembering  # type: ignore[method-assign]

    def begin_stop(self, drain_s: float = 0.0) -> Future[None]:
        """Tell the server to end; open answers are ended after `drain_s`."""
        self._client.close()
        return asyncio.run_coroutine_threadsafe(self.serving.stop(drain_s), self._loop)

    def has_stopped(self, timeout: float = 10.0) -> bool:
        """Wait until the server's thread has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def wait_until_idle(self, timeout: float = 2.0) -> None:
        """Wait until no answer is open: the server closes one just after its last byte."""
        deadline = time.monotonic() + timeout
        while self.front.open_answers:
            assert time.monotonic() < deadline, "an answer is still open"
            time.sleep(0.005)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        """One request, not streamed. `content=` sends raw bytes instead of JSON."""
        if body is not None:
            options["json"] = body
        return self._client.post(self.url + path, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return self._client.get(self.url + path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        return self._client.request(method, self.url + path, **options)

    def stream(self, method: str, path: str, **options: Any) -> Any:
        """A response whose body is read by the caller, if at all."""
        return self._client.stream(method, self.url + path, **options)

    def chat(self, content: str = "hello", **fields: Any) -> httpx2.Response:
        """A chat with one user message."""
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})


@pytest.fixture(scope="session")
def stopping() -> Iterator[list[LiveServer]]:
    """Servers that were told to stop; all of them must have, at the end."""
    servers: list[LiveServer] = []
    yield servers
    assert all(server.has_stopped() for server in servers)


def _starting(stopping: list[LiveServer]) -> Iterator[Callable[..., LiveServer]]:
    servers: list[LiveServer] = []

    def start(
        *replies: dict[str, Any], script: dict[str, Any] | None = None, **settings: Any
    ) -> LiveServer:
        server = LiveServer({"replies": list(replies), **(script or {})}, **settings)
        servers.append(server)
        return server

    yield start
    for server in servers:
        if not server.has_stopped(0):
            server.begin_stop()
            stopping.append(server)


@pytest.fixture
def serve(stopping: list[LiveServer]) -> Iterator[Callable[..., LiveServer]]:
    """Start servers for one test: `serve(*replies, script={...}, **server_settings)`."""
    yield from _starting(stopping)


@pytest.fixture(scope="module")
def serve_all(stopping: list[LiveServer]) -> Iterator[Callable[..., LiveServer]]:
    """The same for a file whose tests share a server."""
    yield from _starting(stopping)

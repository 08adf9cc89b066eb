"""Starts the servers under test, waits until they answer, stops them; ours and peers alike.

Owns processes, ports and cores. Knows nothing about workloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO

import msgspec
import psutil

from mlx_cb.bench.exchange import Endpoint, exchange, get_json_bytes
from mlx_cb.bench.wire import Api, body
from mlx_cb.errors import MlxCbError

PEER_TUNED = ("--prefill-step-size", "64", "--prompt-concurrency", "1")


class Kind(Enum):
    """Which program serves."""

    MLX_CB = "mlx-cb"
    MLX_LM = "mlx-lm"
    URL = "url"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server under test.

    Attributes:
        label: its column in every table: `ours`, `P`, `T`, …
        model: folder (or any MODEL the program takes); for `URL` the model field, or None.
        flags: command-line flags beside model, host and port.
        url: where a server that is already running listens.
        key: sent with what is asked beside the load.
    """

    label: str
    kind: Kind
    model: str | None
    flags: tuple[str, ...] = ()
    url: str | None = None
    key: str | None = None

    def command(self, port: int) -> list[str]:
        """Command line that starts it."""
        listen = ["--host", "127.0.0.1", "--port", str(port)]
        if self.kind is Kind.MLX_CB:
            return [sys.executable, "-m", "mlx_cb", "serve", str(self.model), *listen, *self.flags]
        launcher = "mlx_cb.bench.peer_launcher"
        return [
            *(sys.executable, "-m", launcher, "--model", str(self.model)),
            *(*listen, "--log-level", "WARNING", *self.flags),
        ]


@dataclass(frozen=True, slots=True)
class Cores:
    """Which cores the client and the servers may use; empty means all."""

    client: frozenset[int] = field(default_factory=frozenset)
    server: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def choose(cls, policy: str) -> Cores:
        """`split` gives the last core to the client and the rest to the servers; `auto` does so
        from three cores on. With two, the client keeps to the last core and the servers have
        both: a server is several threads, and its model needs a core to itself."""
        if policy == "off" or not hasattr(os, "sched_getaffinity"):
            return cls()
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            return cls()
        rest = cores[:-1] if policy == "split" or len(cores) > 2 else cores
        return cls(frozenset(cores[-1:]), frozenset(rest))

    def pin_client(self) -> None:
        """Keep this process to the client's cores."""
        if self.client:
            os.sched_setaffinity(0, self.client)


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RunningServer:
    """A server that was started, or found at a URL."""

    def __init__(self, spec: ServerSpec, cores: Cores) -> None:
        """Start the program; `ready` waits for it."""
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.started = time.monotonic()
        if spec.url is not None:
            self.endpoint = Endpoint.parse(spec.url)
            self.command = [spec.url]
            self._pid = _listener(self.endpoint)
            return
        port = free_port()
        self.endpoint = Endpoint("127.0.0.1", port, "", False)
        self.command = spec.command(port)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        self.process = subprocess.Popen(
            self.command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._pid = self.process.pid
        if cores.server:
            # Before the interpreter is up: all threads and children inherit it.
            os.sched_setaffinity(self.process.pid, cores.server)

    async def ready(self, deadline_s: float = 300.0) -> Startup:
        """Wait for `/health` and for one token. Raises MlxCbError with the log's end on failure."""
        healthy_s = await self._until(deadline_s, self._is_healthy)
        await self._until(deadline_s, self._says_something)
        return Startup(healthy_s, time.monotonic() - self.started)

    async def _until(self, deadline_s: float, condition: Callable[[], Awaitable[bool]]) -> float:
        while not await condition():
            if self.process is not None and self.process.poll() is not None:
                raise MlxCbError(f"{self.spec.label} ended at once: {self.log_tail()}")
            if time.monotonic() - self.started > deadline_s:
                raise MlxCbError(
                    f"{self.spec.label} at {self.endpoint.url} did not answer within "
                    f"{deadline_s:g} s: {self.log_tail()}"
                )
            await asyncio.sleep(0.01)
        return time.monotonic() - self.started

    async def _is_healthy(self) -> bool:
        answer = await get_json_bytes(self.endpoint, "/health")
        # A server without the route is up as soon as it says so.
        return answer.status in (200, 404)

    async def _says_something(self) -> bool:
        content = body(Api.COMPLETIONS, "Hello", model=self.model_field, max_tokens=1)
        head = self.endpoint.head("POST", Api.COMPLETIONS.path, len(content), self.spec.key)
        answer = await exchange(self.endpoint, head + content, timeout_s=120.0)
        if answer.status not in (0, 200, 503):
            raise MlxCbError(
                f"{self.spec.label} refuses a completion with {answer.status}: "
                f"{answer.body[:300].decode(errors='replace')}"
            )
        return answer.status == 200

    @property
    def model_field(self) -> str | None:
        """What to put into `model`. mlx_lm.server loads whatever is named there, so for one that
        was started with a model the field stays out."""
        return self.spec.model if self.spec.kind is Kind.URL else None

    def log_tail(self) -> str:
        """The last lines of what the program printed."""
        if self._log is None:
            return "(no log)"
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()[-1500:]

    def cpu_seconds(self) -> float | None:
        """CPU time of the program and its children so far; None for a server elsewhere, or one
        whose process cannot be told."""
        if self._pid is None:
            return None
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def processes(self) -> list[psutil.Process]:
        """The program and its children that are alive; none for a server elsewhere."""
        return _family(self._pid) if self._pid is not None else []

    def stop(self) -> None:
        """End the program and its children; those that do not go within 10 s are killed."""
        if self.process is None:
            return
        family = _family(self.process.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, alive = psutil.wait_procs(family[1:], timeout=3)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._log is not None:
            self._log.close()


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds from the start of the program."""

    healthy_s: float
    first_token_s: float


def _family(pid: int) -> list[psutil.Process]:
    """The process and all below it; empty when it is gone."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _listener(endpoint: Endpoint) -> int | None:
    """Process on this machine that listens there; None when it is elsewhere or hidden."""
    if endpoint.host not in ("127.0.0.1", "localhost", "::1"):
        return None
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    for connection in connections:
        is_there = connection.laddr and connection.laddr.port == endpoint.port
        if is_there and connection.status == psutil.CONN_LISTEN:
            pid: int | None = connection.pid
            return pid
    return None


def float32_copy(model: Path, cache: Path) -> Path:
    """Folder with the model's weights as plain fp32, made once with mlx-lm's own converter.

    Both engines read the same files then, and batching can show on a CPU: quantized matrix
    products there work row by row. The copy never ends its turn (`never_end`), so that output
    lengths are the limits asked for. Raises MlxCbError when the conversion fails.
    """
    folder = cache / f"{model.resolve().name}-float32-unending"
    if (folder / "config.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    command = [
        *(sys.executable, "-m", "mlx_lm", "convert", "--hf-path", str(model)),
        *("--mlx-path", str(partial), "--dequantize", "--dtype", "float32"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MlxCbError(f"cannot make an fp32 copy of {model}: {done.stderr.strip()[-500:]}")
    never_end(partial)
    with contextlib.suppress(FileExistsError, OSError):
        # Another run may have finished first; its copy is as good.
        partial.rename(folder)
    return folder


def never_end(folder: Path) -> None:
    """Name a special token that a model hardly ever says as the end of its turn.

    mlx_lm.server cannot be told to ignore the end-of-sequence token; both servers take it from
    these files. Of the tokenizer's special tokens the last one counts as hardly ever said; with
    no other than the present ones, nothing is changed.
    """
    tokenizer = msgspec.json.decode((folder / "tokenizer.json").read_bytes())
    special = {t["id"]: t["content"] for t in tokenizer.get("added_tokens", []) if t["special"]}
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    named: set[object] = set()
    for kind in ("bos", "eos", "pad"):
        ids = config.get(f"{kind}_token_id")
        named.update(ids if isinstance(ids, list) else [ids])
    spare = [token_id for token_id in special if token_id not in named]
    if not spare:
        return
    for name in ("config.json", "generation_config.json"):
        _change(folder / name, eos_token_id=spare[-1])
    _change(folder / "tokenizer_config.json", eos_token=special[spare[-1]])


def _change(path: Path, **values: object) -> None:
    content = msgspec.json.decode(path.read_bytes()) if path.is_file() else {}
    path.write_bytes(msgspec.json.encode(content | values))

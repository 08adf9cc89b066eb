"""AsyncEngine: the front's handle on an engine that runs in a process of its own.

A Metal failure, or any other, ends that process only: every open stream then ends with an error
within a second, and the worker is started again with back-off. Knows nothing about HTTP or text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from mlx_cb import errors
from mlx_cb.config import EngineConfig
from mlx_cb.core.outputs import FinishReason, RequestOutput
from mlx_cb.engine.admission import AdmissionControl
from mlx_cb.engine.interface import ModelInfo, Order, Verb
from mlx_cb.engine.messages import (
    Abort,
    Add,
    Answer,
    Ask,
    Command,
    FrameBuffer,
    FromWorker,
    LoadFailed,
    Ready,
    Refused,
    Start,
    StepOutputs,
    Stop,
    ToWorker,
    decode_from_worker,
    encode,
)
from mlx_cb.engine.stream import OutputStream
from mlx_cb.errors import EngineDead, MlxCbError
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.standing import EQUAL, Standing

log = logging.getLogger("mlx_cb.engine")

FIRST_BACK_OFF = 0.25  # seconds before the first restart; doubled up to the last
LAST_BACK_OFF = 30.0
STABLE_AFTER = 60.0  # seconds of readiness after which the back-off starts anew
STOP_TIMEOUT = 2.0  # seconds that a worker gets to end by itself
KEPT_RESTARTS = 64
CANCELLED = "the operator of this server has cancelled the request"
ANSWER_TIMEOUT = 5.0  # seconds that a question may take, the current step included


class AsyncEngine:
    """One worker process and the streams that it feeds. Lives on one asyncio loop."""

    def __init__(self, config: EngineConfig, *, step_timeout_s: float = 120.0) -> None:
        self.config = config
        self.step_timeout_s = step_timeout_s
        self.num_restarts = 0
        self._streams: dict[str, OutputStream] = {}
        self._users: dict[str, str] = {}  # of the streams
        self._orders: list[Order] = []  # that a new worker has to be told again
        self._restarts: deque[dict[str, Any]] = deque(maxlen=KEPT_RESTARTS)
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._question_ids = itertools.count()
        self._info: ModelInfo | None = None
        self._load_error: MlxCbError | None = None
        self._ready = asyncio.Event()  # set when the first load has ended, well or not
        self._is_ready = False
        self._worker: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._last_frame = 0.0
        self._back_off = FIRST_BACK_OFF
        self._killed_because = ""
        self._admission = AdmissionControl(
            config.scheduler.max_num_seqs,
            config.scheduler.max_queue_wait_s,
            is_fair=config.scheduler.policy in ("continuous", "fair"),
        )

    async def start(self) -> None:
        """Start the worker; returns at once, before the model is loaded."""
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises what the loading raised."""
        await self._ready.wait()
        if self._load_error is not None:
            raise self._load_error

    async def stop(self) -> None:
        """End every stream and the worker; kills the worker when it does not end by itself."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._fail_streams("the server is shutting down")
        self._is_ready = False
        if self._worker is not None:
            with contextlib.suppress(ConnectionError):
                self._send(Stop())
            await self._end_worker(STOP_TIMEOUT)

    @property
    def is_ready(self) -> bool:
        """Loaded, alive, and not stuck; see Engine."""
        return self._is_ready and not self._is_stuck()

    @property
    def model_info(self) -> ModelInfo:
        """What is loaded; see Engine."""
        if self._info is None:
            raise EngineDead("the model is still loading", retry_after=2)
        return self._info

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker, None while there is none."""
        return self._worker.pid if self._worker is not None else None

    def check_admission(self, user: str, standing: Standing = EQUAL) -> None:
        """Refuse before any work is done; see Engine."""
        self._admission.check(user, standing)

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        user: str = "local",
        standing: Standing = EQUAL,
        timeout_s: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Stream one generation; see Engine."""
        if not self.is_ready:
            raise EngineDead(
                "the engine is starting; try again in a moment", retry_after=self._back_off + 1
            )
        if request_id in self._streams:
            raise errors.InvalidRequest(f"request {request_id} is running already")
        self._admission.check(user, standing, len(prompt_ids))
        stream = self._streams[request_id] = OutputStream()
        self._users[request_id] = user
        self._admission.queue(request_id, len(prompt_ids), user, standing)
        if len(self._streams) == 1:
            self._last_frame = time.monotonic()
        try:
            self._send(Add(request_id, list(prompt_ids), params, user, standing, timeout_s))
            while True:
                output = await stream.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._streams.pop(request_id, None)
            self._users.pop(request_id, None)
            self._admission.leave(request_id, time.monotonic())
            if not stream.is_finished:
                with contextlib.suppress(ConnectionError):
                    self._send(Abort(request_id))

    async def status(self) -> dict[str, Any]:
        """State of worker and engine; see Engine."""
        details = await self._ask("status", None) or {}
        state = {
            "ready": self.is_ready,
            "stuck": self._is_stuck(),
            "worker_pid": self.worker_pid,
            "restarts": self.num_restarts,
            "open_streams": len(self._streams),
            "predicted_wait_s": self._admission.predicted_wait(),
            "last_frame_age": time.monotonic() - self._last_frame if self._last_frame else None,
            "engine_restarts": list(self._restarts),
        }
        return state | details

    async def order(self, order: Order) -> dict[str, Any] | None:
        """Carry out an operator's order; see Engine."""
        self._remember(order)
        if order.verb.is_cancel:
            for request_id, stream in list(self._streams.items()):
                if order.means(request_id, self._users[request_id]) and not stream.is_finished:
                    stream.put(
                        RequestOutput(request_id, finish_reason=FinishReason.ABORT, error=CANCELLED)
                    )
        control: dict[str, Any] | None = await self._tell(lambda number: Command(number, order))
        return control

    def _remember(self, order: Order) -> None:
        """Keep what is in force, so that a worker that is started again is told."""
        taken_back = [verb for verb in Verb if verb.undone_by is order.verb]
        self._orders = [
            other
            for other in self._orders
            if other.target != order.target or other.verb not in (*taken_back, order.verb)
        ]
        if order.verb.undone_by is not None:
            self._orders.append(order)

    async def steps(self, last: int) -> list[dict[str, Any]]:
        """Newest records of the step journal; see Engine."""
        return await self._ask("steps", last) or []

    async def overview(self, after: int) -> dict[str, Any] | None:
        """What an operator watches; see Engine."""
        return await self._ask("overview", after)

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """A request's life stage by stage; see Engine."""
        return await self._ask("explain", request_id)

    async def _ask(self, topic: str, argument: int | str | None) -> Any:
        """Answer of the worker to a question."""
        return await self._tell(lambda number: Ask(number, topic, argument))

    async def _tell(self, message: Callable[[int], Ask | Command]) -> Any:
        """What the worker answers between two steps; None when it is down or too slow."""
        if not self._is_ready:
            return None
        question_id = next(self._question_ids)
        future = self._questions[question_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(message(question_id))
            return await asyncio.wait_for(future, ANSWER_TIMEOUT)
        except (TimeoutError, ConnectionError):
            return None
        finally:
            del self._questions[question_id]

    def _send(self, message: ToWorker) -> None:
        if self._writer is None or self._writer.is_closing():
            raise ConnectionError("the engine is not connected")
        self._writer.write(encode(message))

    def _is_stuck(self) -> bool:
        silent = time.monotonic() - self._last_frame
        return self._is_ready and bool(self._streams) and silent > self.step_timeout_s

    async def _supervise(self) -> None:
        """Keep a worker running; start it again with back-off when it ends."""
        while True:
            reader = await self._spawn()
            watchdog = asyncio.create_task(self._watch())
            try:
                await self._read(reader)
            finally:
                watchdog.cancel()
            lived = time.monotonic() - self._last_frame if self._is_ready else 0.0
            self._is_ready = False
            await self._end_worker(0.0)
            self._fail_streams("the engine ended unexpectedly and is being started again")
            if self._load_error is not None:
                return
            self.num_restarts += 1
            self._note_restart()
            log.error("the engine ended; starting it again in %.2f s", self._back_off)
            await asyncio.sleep(self._back_off)
            grown = min(self._back_off * 2, LAST_BACK_OFF)
            self._back_off = FIRST_BACK_OFF if lived > STABLE_AFTER else grown

    def _note_restart(self) -> None:
        """The one act of the control loop that is the front's: its owner is the worker's parent."""
        cause, self._killed_because = self._killed_because or "the engine ended by itself", ""
        self._restarts.append(
            {
                "action": "engine restart",
                "time": time.time(),
                "cause": cause,
                "alternatives": {"waiting longer": "no step can be expected of it"},
                "back_off_s": self._back_off,
            }
        )

    async def _spawn(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            self._worker = subprocess.Popen(
                [sys.executable, "-m", "mlx_cb.engine.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._send(Start(self.config))
        return reader

    async def _watch(self) -> None:
        """End a worker that makes no progress with work pending."""
        while True:
            await asyncio.sleep(min(1.0, self.step_timeout_s / 4))
            if self._is_stuck() and self._worker is not None:
                self._killed_because = f"no step for {self.step_timeout_s:g} s with work pending"
                log.error("%s", self._killed_because)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._worker.pid, signal.SIGKILL)
                return

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = FrameBuffer()
        while True:
            try:
                data = await reader.read(1 << 20)
            except ConnectionError:
                return
            if not data:
                return
            self._last_frame = time.monotonic()
            for payload in frames.feed(data):
                self._take(decode_from_worker(payload))

    def _take(self, message: FromWorker) -> None:
        match message:
            case StepOutputs():
                self._admission.saw(message, self._last_frame)
                for output in message.outputs:
                    stream = self._streams.get(output.request_id)
                    if stream is not None:
                        stream.put(output)
            case Refused(request_id, error, text, param, seconds):
                stream = self._streams.get(request_id)
                if stream is not None:
                    kind = getattr(errors, error)
                    stream.refuse(kind(text, param=param, retry_after=seconds))
            case Answer(question_id, data):
                future = self._questions.get(question_id)
                if future is not None and not future.done():
                    future.set_result(data)
            case Ready(info):
                self._info, self._is_ready = info, True
                for number, order in enumerate(self._orders):
                    self._send(Command(-1 - number, order))  # nobody waits for these answers
                self._ready.set()
            case LoadFailed(error, text):
                if not self._ready.is_set():
                    self._load_error = getattr(errors, error)(text)
                    self._ready.set()

    def _fail_streams(self, message: str) -> None:
        for request_id, stream in self._streams.items():
            if not stream.is_finished:
                stream.put(
                    RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=message)
                )
        for future in self._questions.values():
            if not future.done():
                future.set_result(None)

    async def _end_worker(self, patience: float) -> None:
        """Close the channel; kill the worker unless it ends within `patience` seconds."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        deadline = time.monotonic() + patience
        while worker.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if worker.poll() is None:
            worker.kill()
        await asyncio.to_thread(worker.wait)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

"""Main of the engine's process: loads one model, then steps for as long as the front is there.

One thread does everything, because a lazy MLX array made in one thread raises in another. Run as
`python -m mlx_cb.engine.worker FD`, with FD the number of an inherited socket.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from mlx_cb.engine.messages import (
    Abort,
    Add,
    Answer,
    Ask,
    Command,
    LoadFailed,
    Ready,
    Refused,
    Start,
    StepOutputs,
    Stop,
    ToWorker,
    WorkerChannel,
)
from mlx_cb.errors import MlxCbError
from mlx_cb.model.light_import import skip_mlx_lm_init

if TYPE_CHECKING:
    from mlx_cb.engine.idle_memory import IdleMemory

log = logging.getLogger("mlx_cb.engine")


HELD_S = 0.5  # how often paused requests are looked after: their deadlines, and a sign of life


class Worker:
    """Serves one EngineCore to one front."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._stopping = False
        self._cached: dict[str, int] = {}  # of newcomers, for the next frame

    def run(self) -> None:
        """Load, report, step until told to stop or the front is gone."""
        skip_mlx_lm_init()
        from mlx_cb.engine.core import EngineCore

        (start,) = self._channel.receive(None)
        assert isinstance(start, Start)
        try:
            self._core = EngineCore.load(start.config)
        except MlxCbError as error:
            self._channel.send(LoadFailed(type(error).__name__, error.message))
            return
        # What is here now stays: without it in the collector's way, steps have no long pauses.
        gc.collect()
        gc.freeze()
        self._channel.send(Ready(self._core.info()))
        try:
            self._serve()
        finally:
            self._core.close()

    def _serve(self) -> None:
        from mlx_cb.engine.idle_memory import IdleMemory

        idle_memory = IdleMemory(self._core)
        while not self._stopping:
            messages = self._channel.receive(self._wait_s(idle_memory))
            for message in messages:
                self._take(message)
            if not (messages or self._core.has_work):
                idle_memory.rest()
            if self._core.has_work:
                self._step()

    def _step(self) -> None:
        """One step, and its frame."""
        frame = StepOutputs(self._core.step())
        record = self._core.last_measured
        if record is not None:
            frame.prefill_tokens, frame.seconds = record.rows_prefill, record.seconds or 0.0
            frame.computed = {c.request_id: c.start + c.num_tokens for c in record.prefills}
        frame.cached, self._cached = self._cached, {}
        self._channel.send(frame)

    def _wait_s(self, idle_memory: IdleMemory) -> float | None:
        """Seconds to wait for messages; None for ever."""
        if self._core.is_held:
            return HELD_S
        is_busy = self._core.has_work or self._core.idle()
        return 0.0 if is_busy else idle_memory.wait_s()

    def _take(self, message: ToWorker) -> None:
        match message:
            case Add():
                self._add(message)
            case Abort(request_id):
                self._core.abort(request_id)
            case Ask(question_id, topic, argument):
                self._channel.send(Answer(question_id, self._answer(topic, argument)))
            case Command(question_id, order):
                self._core.order(order)
                self._channel.send(Answer(question_id, self._core.governor.as_dict()))
            case Stop():
                self._stopping = True
            case Start():
                raise ValueError("a worker is started once")

    def _add(self, message: Add) -> None:
        try:
            request = self._core.add(
                message.request_id,
                message.prompt_ids,
                message.params,
                message.user,
                message.standing,
                message.timeout_s,
            )
        except MlxCbError as error:
            self._channel.send(
                Refused(
                    message.request_id,
                    type(error).__name__,
                    error.message,
                    error.param,
                    error.retry_after,
                )
            )
            return
        if request.num_resident_tokens:
            self._cached[request.request_id] = request.num_resident_tokens

    def _answer(self, topic: str, argument: Any) -> Any:
        scheduler = self._core.scheduler
        if topic == "steps":
            return scheduler.journal.last(argument)
        if topic == "explain":
            return scheduler.explain(argument)
        if topic == "overview":
            return self._core.overview(argument)
        return self._core.status()


def let_threads_finish() -> None:
    """Linux: threads of this process that wake up wait for the processor's next free moment.

    MLX's CPU backend hands each operation to a thread of its own. On one core that thread took the
    processor at every one, 180 times in a step of two layers, and the step took a fifth longer.
    What the front has to send goes first as well. Where the system forbids it all goes as it went.
    """
    if hasattr(os, "SCHED_BATCH"):
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:
            log.info("the engine's threads are scheduled as any: %s", error)


def main() -> None:
    """Entry point of the process."""
    # Ctrl-C goes to the whole terminal group; the front decides when the worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    let_threads_finish()  # before there are any, which inherit it
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        Worker(WorkerChannel(connection)).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        log.info("the front is gone; the engine ends")


if __name__ == "__main__":
    main()

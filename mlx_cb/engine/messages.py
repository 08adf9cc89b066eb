"""The frames between the front and the worker: MessagePack with a length in front, over a socket.

In go additions, aborts and questions; out comes one frame per step for all requests.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from mlx_cb.config import EngineConfig
from mlx_cb.core.outputs import RequestOutput
from mlx_cb.engine.interface import ModelInfo, Order
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.standing import EQUAL, Standing

_LENGTH = struct.Struct("!I")


class Start(msgspec.Struct, tag=True):
    """First frame to a worker: what to load."""

    config: EngineConfig


class Add(msgspec.Struct, tag=True):
    """A new request."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    user: str
    standing: Standing = EQUAL
    timeout_s: float | None = None


class Abort(msgspec.Struct, tag=True):
    """Nobody wants this request's output any more."""

    request_id: str


class Ask(msgspec.Struct, tag=True):
    """A question about the engine's state: `status`, `steps`, `explain`, `overview`."""

    question_id: int
    topic: str
    argument: int | str | None = None


class Command(msgspec.Struct, tag=True):
    """An operator's order; answered with the control's state."""

    question_id: int
    order: Order


class Stop(msgspec.Struct, tag=True):
    """End the worker."""


class Ready(msgspec.Struct, tag=True):
    """The model is loaded."""

    info: ModelInfo


class LoadFailed(msgspec.Struct, tag=True):
    """The model cannot be loaded; `error` is the name of an exception of `errors`."""

    error: str
    message: str


class StepOutputs(msgspec.Struct, tag=True):
    """What one step added to all requests; empty for a step that only prefilled.

    The newest measured step took `seconds` and computed `prefill_tokens`, whose requests have
    `computed` so much of their prompts now. `cached` is what newcomers had in the prefix cache.
    """

    outputs: list[RequestOutput]
    prefill_tokens: int = 0
    seconds: float = 0.0
    computed: dict[str, int] = {}
    cached: dict[str, int] = {}


class Refused(msgspec.Struct, tag=True):
    """A request that was not accepted; `error` is the name of an exception of `errors`."""

    request_id: str
    error: str
    message: str
    param: str | None = None
    retry_after: float | None = None


class Answer(msgspec.Struct, tag=True):
    """Reply to an Ask or a Command."""

    question_id: int
    data: Any


ToWorker = Start | Add | Abort | Ask | Command | Stop
FromWorker = Ready | LoadFailed | StepOutputs | Refused | Answer

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """A frame: four bytes of length, then MessagePack."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Cuts a byte stream into payloads."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; returns the payloads that are complete now."""
        self._data += data
        payloads, start = [], 0
        while len(self._data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, start)
            end = start + _LENGTH.size + length
            if len(self._data) < end:
                break
            payloads.append(bytes(self._data[start + _LENGTH.size : end]))
            start = end
        del self._data[:start]
        return payloads


def decode_from_worker(payload: bytes) -> FromWorker:
    """Message of a payload that a worker sent."""
    return _from_worker.decode(payload)


class WorkerChannel:
    """The worker's end of the socket: blocking when idle, polled while there is work."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = FrameBuffer()

    def receive(self, wait_s: float | None) -> list[ToWorker]:
        """Messages that are there; without any, those that come within `wait_s` seconds.

        None waits for ever. Raises EOFError when the front has closed its end.
        """
        messages: list[ToWorker] = []
        while True:
            self._connection.settimeout(0.0 if messages else wait_s)
            try:
                data = self._connection.recv(1 << 20)
            except (BlockingIOError, TimeoutError):
                return messages
            if not data:
                raise EOFError("the front has closed the channel")
            messages += [_to_worker.decode(payload) for payload in self._buffer.feed(data)]

    def send(self, message: FromWorker) -> None:
        """Send one frame; waits while the front is slow to read."""
        self._connection.setblocking(True)
        self._connection.sendall(encode(message))

"""OutputStream: one request's outputs on their way to a reader that may be slow."""

from __future__ import annotations

import asyncio

import msgspec

from mlx_cb.core.outputs import RequestOutput
from mlx_cb.errors import MlxCbError


class OutputStream:
    """Holds at most one output: a reader that lags gets what came meanwhile as one."""

    __slots__ = ("_arrived", "_error", "_pending", "is_finished")

    def __init__(self) -> None:
        self.is_finished = False
        self._pending: RequestOutput | None = None
        self._error: MlxCbError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output behind what is still unread; what comes after the end is dropped."""
        if self.is_finished:
            return
        self.is_finished = self.is_finished or output.finish_reason is not None
        self._pending = output if self._pending is None else merge(self._pending, output)
        self._arrived.set()

    def refuse(self, error: MlxCbError) -> None:
        """End the stream with an exception."""
        self.is_finished = True
        self._error = error
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """Next output. Raises the error the stream was refused with."""
        await self._arrived.wait()
        self._arrived.clear()
        if self._error is not None:
            raise self._error
        output, self._pending = self._pending, None
        assert output is not None
        return output


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of one request as if they had come at once."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (first.logprobs or []) + (second.logprobs or [])
    return msgspec.structs.replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )

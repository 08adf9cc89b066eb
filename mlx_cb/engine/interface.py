"""The engine as the HTTP front and the Python API see it; who implements it is not known here.

`AsyncEngine` (a worker process), `EngineCore` in-process behind `LLM`, and the scripted engine of
the tests all answer to this.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_cb.core.outputs import RequestOutput
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.standing import EQUAL, Standing


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is loaded. Known once the engine is ready.

    Attributes:
        name: as the operator named it (hub id, folder, file or `demo`).
        path: folder with config, tokenizer and chat template, for the text room.
        max_model_len: longest prompt plus output, tokens.
        eos_token_ids: ids that end the model's turn.
        weights_bytes, kv_bytes_per_token: memory.
        quantization: e.g. "4-bit group 32", or None for plain weights.
        created: seconds since the epoch, of the model's files.
        pooling: `mean` or `last` for a model that embeds and generates nothing, None for others.
        hidden_size: numbers in an embedding; 0 where that is not known.
    """

    name: str
    path: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_parameters: int
    dtype: str
    quantization: str | None
    weights_bytes: int
    kv_bytes_per_token: int
    block_size: int
    attention: str
    layout: str
    blas: str
    created: int
    pooling: str | None = None
    hidden_size: int = 0


class Engine(Protocol):
    """Generates tokens for many requests at once."""

    @property
    def is_ready(self) -> bool:
        """False while the model loads, after the worker died, and while it makes no progress."""
        ...

    @property
    def model_info(self) -> ModelInfo:
        """What is loaded. Raises EngineDead (with retry_after) while `is_ready` has never been."""
        ...

    def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        user: str = "local",
        standing: Standing = EQUAL,
    ) -> AsyncIterator[RequestOutput]:
        """Stream one generation; the last output carries the finish reason.

        A reader that lags gets merged outputs. Closing the iterator (or cancelling its reader)
        aborts the request; its blocks are free at the next step. An engine that dies ends the
        stream with FinishReason.ERROR within a second.

        Raises, at the first `__anext__` and before anything runs: EngineDead, Overloaded,
        InvalidRequest and ContextLengthExceeded.
        """
        ...

    async def status(self) -> dict[str, Any]:
        """Engine, blocks, queue and users as JSON-ready data; answers while the worker is down."""
        ...

    async def steps(self, last: int) -> list[dict[str, Any]]:
        """The newest `last` records of the step journal, oldest first."""
        ...

    async def overview(self, after: int) -> dict[str, Any] | None:
        """Steps newer than number `after` and the unfinished requests, for who watches.

        None while the worker is down; see `engine.overview`.
        """
        ...

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """A request's life stage by stage; None for an unknown or forgotten id."""
        ...

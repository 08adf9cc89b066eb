"""Stage 3: advances every request of a plan by one step, in one forward pass.

Owns the model, the storage behind the blocks and the sampler. A step is launched without waiting
for it and collected later, so that the next one can be planned and launched in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_cb.attention.block_bytes import BlockBytes
from mlx_cb.attention.kernels import launch_metal
from mlx_cb.attention.kv_storage import KVStorage
from mlx_cb.attention.select import make_backend, runs_on_metal
from mlx_cb.attention.tuning import gpu_architecture, load_tuning
from mlx_cb.core.outputs import SampledToken, TokenLogprobs
from mlx_cb.core.request import Request
from mlx_cb.core.scheduler_output import SchedulerOutput
from mlx_cb.model import heap, sampler
from mlx_cb.model.cache_spec import CacheSpec, layer_kinds
from mlx_cb.model.fast_swiglu import bind_swiglu
from mlx_cb.model.forward_batch import ForwardBatch, PreviousTokens
from mlx_cb.model.grammar import Grammars
from mlx_cb.model.loader import LoadedModel
from mlx_cb.model.metal_sampler import MetalSampler
from mlx_cb.model.probe import make_forward
from mlx_cb.model.sampler import SampleRow
from mlx_cb.model.shared_rotation import share_rotation
from mlx_cb.model.small_matmul import bind_small_matmul
from mlx_cb.model.window_places import WindowPlaces

#: By block: bytes of the layers that see everything, and for some of those with windows.
BlockContents = tuple[dict[int, bytes], dict[int, bytes]]


@dataclass(slots=True)
class LaunchedStep:
    """A step on its way.

    `requests` get a token each; `rows` says how, unless all take the arg max. `token_ids` is None
    while the choice has to wait for the host (`sample_late`). `tells_logits` when somebody wants to
    know log-probabilities.
    """

    plan: SchedulerOutput
    batch: ForwardBatch
    requests: list[Request]
    rows: list[SampleRow]
    logits: mx.array | None
    token_ids: mx.array | None
    launched: float
    tells_logits: bool

    @property
    def sample_late(self) -> bool:
        """True when the next step cannot be launched before this one is collected."""
        return self.token_ids is None and bool(self.requests)

    def unread(self) -> PreviousTokens | None:
        """The chosen tokens, for a step that is launched before they are read."""
        if self.token_ids is None:
            return None
        row_of = {request.request_id: index for index, request in enumerate(self.requests)}
        return PreviousTokens(self.token_ids, row_of)


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """What a runner is told beside the model.

    Attributes:
        block_size: tokens per block.
        max_blocks: most blocks there may be.
        attention: name of the attention backend.
        tokenizer_file: finds the model's tokenizer.json, for grammars; may raise UnsupportedModel.
    """

    block_size: int
    max_blocks: int
    attention: str
    tokenizer_file: Callable[[], Path]


class ModelRunner:
    """Runs plans. All calls come from the thread that loaded the model."""

    def __init__(self, loaded: LoadedModel, spec: CacheSpec, *, settings: RunnerSettings) -> None:
        model, block_size = loaded.model, settings.block_size
        self.model = model
        self.max_blocks = settings.max_blocks
        self.storage = KVStorage(list(spec.layers), block_size)
        self.backend = make_backend(settings.attention, block_size)
        self._window_places = WindowPlaces(self.storage)
        self.forward = make_forward(model, spec, self.storage, self.backend)
        self._on_cpu = mx.default_device().type == mx.DeviceType.cpu
        if self._on_cpu:
            heap.keep_arrays()
            share_rotation(model)
            bind_swiglu(model)
        self._choose_on_device = sampler.choose_on_device
        if runs_on_metal():
            self._choose_on_device = MetalSampler(launch_metal).choose
            tuning = load_tuning(gpu_architecture())
            bind_small_matmul(model, tuning.qmm_max_rows, launch_metal)
        self.grammars = Grammars(
            settings.tokenizer_file, int(loaded.config["vocab_size"]), loaded.eos_token_ids
        )
        #: Leave the arg max to NumPy, which is ten times faster than MLX's on a CPU. Only for who
        #: does not launch a step before the last one is read.
        self.choose_late = False
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self._last_ready = 0.0

    @property
    def runs_beside_host(self) -> bool:
        """False on MLX's CPU backend: there launching a step takes nearly as long as the step."""
        return not self._on_cpu

    @cached_property
    def block_bytes(self) -> BlockBytes:
        """Whole blocks as bytes, over the layers that see everything."""
        return BlockBytes.of_full_layers(self.storage)

    @cached_property
    def window_bytes(self) -> BlockBytes:
        """What layers with a sliding window have of blocks, as bytes."""
        return BlockBytes.of_windows(self.storage)

    def restore_blocks(self, plan: SchedulerOutput, contents: BlockContents) -> None:
        """Put contents into blocks by id. From now on what `plan.restoring` have stays in place."""
        blocks, windows = contents
        self._window_places.drop(list(blocks))
        self._window_places.restore(plan.restoring, list(windows))
        self.storage.ensure(plan.num_blocks, self.max_blocks)
        self.block_bytes.copy_in(list(blocks), list(blocks.values()))
        self.window_bytes.copy_in(list(windows), list(windows.values()))

    def launch(self, plan: SchedulerOutput, previous: LaunchedStep | None) -> LaunchedStep:
        """Start a step; returns before it has run.

        `previous` is the launched, uncollected step whose tokens this one continues.
        """
        launched = time.perf_counter()
        self.storage.ensure(plan.num_blocks, self.max_blocks)
        self._window_places.prepare(plan)
        if plan.copies:
            self.storage.copy_blocks(
                [copy.source for copy in plan.copies], [copy.target for copy in plan.copies]
            )
        unread = previous.unread() if previous is not None else None
        batch = ForwardBatch.build(plan, self.storage.block_size, unread)
        requests = plan.sampling()
        all_plain = all(request.is_plain_greedy for request in requests)
        rows = [] if all_plain else [SampleRow(r, r.num_computed_tokens) for r in requests]
        self.forward.states.sweep()
        output = self.forward.run(batch)
        logits = output.astype(mx.float32) if batch.attention.logit_rows.size else None
        token_ids = self._choose_now(logits, requests, rows)
        tells_logits = bool(batch.prompt_rows) or any(map(self._wants_logits, requests))
        if token_ids is not None and not tells_logits:
            logits = None
        wanted = [array for array in (logits, token_ids) if array is not None]
        mx.async_eval(*wanted, *self.storage.arrays(), *self.forward.states.arrays())
        return LaunchedStep(plan, batch, requests, rows, logits, token_ids, launched, tells_logits)

    def _wants_logits(self, request: Request) -> bool:
        """True when a request is told more of its row than the token that was chosen."""
        return request.params.logprobs is not None

    def _choose_now(
        self, logits: mx.array | None, requests: list[Request], rows: list[SampleRow]
    ) -> mx.array | None:
        """Chosen tokens as a lazy array, None when the choice needs the host."""
        if logits is None or not requests:
            return None
        sampled = logits[: len(requests)]
        if not rows:
            return None if self.choose_late else mx.argmax(sampled, axis=-1).astype(mx.int32)
        if self._on_cpu or any(request.params.depends_on_history for request in requests):
            return None
        return self._choose_on_device(sampler.adjust(sampled, rows, mx), rows)

    def collect(self, step: LaunchedStep) -> tuple[list[SampledToken], float]:
        """Wait for a step; returns one token per `plan.sampling()` and the seconds it took."""
        logits = None
        if step.token_ids is not None:
            token_ids = np.array(step.token_ids)
            if step.logits is not None:
                logits = np.array(step.logits, copy=False)
        elif step.logits is not None:
            logits = np.array(step.logits, copy=False)
            token_ids = self._choose_late(step)
            if not step.tells_logits:
                logits = None
        else:
            mx.eval(
                self.forward.states.arrays(), [a.values.arrays for a in self.storage.layers[-1:]]
            )
            token_ids = np.zeros(0, dtype=np.int64)
        ready = time.perf_counter()
        seconds = ready - max(step.launched, self._last_ready)
        self._last_ready = ready
        if logits is None:
            return [SampledToken(token_id) for token_id in token_ids.tolist()], seconds
        self._collect_prompt_logprobs(step, logits[len(step.requests) :])
        sampled = [
            self._sampled_token(request, int(token_id), row_logits)
            for request, token_id, row_logits in zip(step.requests, token_ids, logits, strict=False)
        ]
        return sampled, seconds

    def _choose_late(self, step: LaunchedStep) -> np.ndarray[Any, Any]:
        assert step.logits is not None
        sampled: Any = step.logits[: len(step.requests)]
        if self._on_cpu:
            sampled = sampler.adjust(np.array(sampled, copy=False), step.rows, np)
            masks = self.grammars.masks(step.requests, sampled.shape[-1])
            return sampler.choose_on_host(sampled, step.rows, masks)
        sampled = sampler.adjust(sampled, step.rows, mx)
        sampled = self.grammars.apply(sampled, step.requests, mx)
        return np.array(self._choose_on_device(sampled, step.rows))

    def _sampled_token(self, request: Request, token_id: int, logits: Any) -> SampledToken:
        params, request_id = request.params, request.request_id
        logprobs = None
        if params.logprobs is not None:
            logprobs = sampler.logprobs_of(logits, token_id, params.logprobs)
        return SampledToken(token_id, logprobs, self._prompt_logprobs.pop(request_id, None))

    def _collect_prompt_logprobs(self, step: LaunchedStep, logits: Any) -> None:
        first = 0
        for chunk, count in step.batch.prompt_rows:
            request = chunk.request
            if chunk.start == 0:
                self._prompt_logprobs[request.request_id] = []
            kept = self._prompt_logprobs[request.request_id]
            for offset in range(count):
                target = request.token_ids[chunk.start + offset + 1]
                num_top = request.params.prompt_logprobs or 0
                kept.append(sampler.logprobs_of(logits[first + offset], target, num_top))
            first += count

    def prepare(self, request: Request) -> None:
        """Take note of a new request. Raises InvalidRequest when it cannot be served."""
        if request.params.grammar is not None:
            self.grammars.prepare(request.request_id, request.params.grammar)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that has ended."""
        self._prompt_logprobs.pop(request_id, None)
        self.grammars.forget(request_id)

    def trim(self, num_blocks: int) -> None:
        """Keep little more than `num_blocks` blocks in memory; see KVStorage.trim."""
        self.storage.trim(num_blocks)
        heap.give_back()

    def reset(self) -> None:
        """Give up everything that is kept between steps, after a step that failed."""
        self.storage.clear()
        self.forward.states.clear()
        self._prompt_logprobs.clear()
        mx.clear_cache()

    def memory_status(self, spec: CacheSpec) -> dict[str, Any]:
        """What is kept between steps, and what MLX holds now and held at most; bytes."""
        storage, states = self.storage, self.forward.states
        return {
            "kv": storage.nbytes,
            "kinds": [asdict(kind) for kind in layer_kinds(spec)],
            "window_places": {str(w): b.num_places for w, b in storage.windows.items()},
            "states": states.nbytes,
            "state_per_request": spec.state_bytes,
            "buffers": self.num_buffers,
            "active": mx.get_active_memory(),
            "peak": mx.get_peak_memory(),
        }

    @property
    def num_buffers(self) -> int:
        """Live buffers that are kept between steps: weights, blocks, states and saved states."""
        weights: Any = tree_flatten(self.model.parameters())
        return len(weights) + len(self.storage.arrays()) + self.forward.states.num_buffers

"""The engine's loop: schedule, launch, collect, update. One thread makes every MLX call.

Knows no sockets and no text. The worker process and the Python API both drive it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlx_cb import blas
from mlx_cb.config import EngineConfig
from mlx_cb.core.block_pool import BlockPool
from mlx_cb.core.checkpoints import Checkpoints
from mlx_cb.core.journal import StepRecord
from mlx_cb.core.kv_cache_manager import KVCacheManager, prefix_salt, shared_salt
from mlx_cb.core.outputs import RequestOutput
from mlx_cb.core.request import Request
from mlx_cb.core.scheduler import Scheduler
from mlx_cb.core.shared_prompts import SharedPrompts
from mlx_cb.engine.checks import check_request
from mlx_cb.engine.governor import Governor
from mlx_cb.engine.interface import ModelInfo, Order
from mlx_cb.engine.overview import count_users, overview
from mlx_cb.engine.ssd_carrier import SsdCarrier, open_tier
from mlx_cb.errors import InvalidRequest
from mlx_cb.model.cache_spec import CacheSpec, store_as
from mlx_cb.model.checkpoint import says_where_turns_end
from mlx_cb.model.embedding_runner import EmbeddingRunner
from mlx_cb.model.loader import LoadedModel, load
from mlx_cb.model.machine_memory import Machine, request_memory
from mlx_cb.model.matmul_tiles import tile_rows
from mlx_cb.model.memory_plan import Limits, plan_memory
from mlx_cb.model.probe import probe
from mlx_cb.model.proof import prove
from mlx_cb.model.resolve import cache_dir
from mlx_cb.model.runner import LaunchedStep, ModelRunner, RunnerSettings
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.standing import EQUAL, Standing
from mlx_cb.text.tokenizer import tokenizer_file
from mlx_cb.text.turn_ending import turn_endings


@dataclass(slots=True)
class Counters:
    """Totals since start, for `/metrics`."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    failed_steps: int = 0


class EngineCore:
    """One loaded model and everything that is being generated with it."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        *,
        cache_spec: CacheSpec | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cache_spec` is a layout that was proven; without one the model is only tried."""
        self.config = config
        self.loaded = loaded
        self.counters = Counters()
        self.last_step_time = clock()
        self.last_measured: StepRecord | None = None
        self._clock = clock
        self._in_flight: LaunchedStep | None = None
        self._pending_outputs: list[RequestOutput] = []
        found = cache_spec or probe(loaded.model, loaded.architecture)
        self.cache_spec = store_as(found, config.cache.kv_dtype)
        block_size = config.cache.block_size
        limits = Limits(block_size, config.scheduler.max_num_seqs, loaded.max_model_len)
        self.machine = Machine.read()
        memory = request_memory(config, self.machine)
        plan = plan_memory(memory, self.cache_spec, limits)
        settings = RunnerSettings(
            block_size,
            plan.num_blocks,
            config.attention,
            lambda: tokenizer_file(loaded.path, cache_dir()),
        )
        make_runner = ModelRunner if loaded.pooling is None else EmbeddingRunner
        self.runner = make_runner(loaded, self.cache_spec, settings=settings)
        self.ssd = open_tier(config.cache, loaded, self.cache_spec, self.runner)
        self.shared_prompts = SharedPrompts((), block_size)
        pool = BlockPool(plan.num_blocks)
        num_checkpoints = plan.num_checkpoints if config.cache.prefix_cache else 0
        checkpoints = Checkpoints(num_checkpoints) if self.cache_spec.is_recurrent else None
        kv_cache = KVCacheManager(
            pool,
            block_size,
            prefix_cache=config.cache.prefix_cache,
            checkpoints=checkpoints,
            keeps=self.runner.storage.keeps,
            tier=self.ssd.tier if isinstance(self.ssd, SsdCarrier) else None,
        )
        scheduling = replace(
            config.scheduler,
            max_num_seqs=plan.max_num_seqs,
            tile_rows=config.scheduler.tile_rows
            or tile_rows(loaded.config, is_quantized=loaded.quantization is not None),
        )
        self.scheduler = Scheduler(scheduling, kv_cache, clock=clock)
        self.governor = Governor(self.scheduler, clock)
        pipelined = config.scheduler.pipelined
        self._pipelined = self.runner.runs_beside_host if pipelined is None else pipelined
        self.runner.choose_late = not (self._pipelined or self.runner.runs_beside_host)
        self.runner.forward.states.checkpoints = checkpoints
        for window, places in plan.window_places.items():
            self.runner.storage.windows[window].budget = places
        self.max_request_tokens = min(loaded.max_model_len, pool.capacity * block_size)

    @classmethod
    def load(cls, config: EngineConfig) -> EngineCore:
        """Load the configured model. Raises ModelNotFound, UnsupportedModel or OutOfMemory."""
        loaded = load(config.model)
        if not says_where_turns_end(loaded.path):
            endings = loaded.eos_token_ids | turn_endings(loaded.path)
            loaded = replace(loaded, eos_token_ids=endings)
        spec = prove(loaded.model, loaded.architecture, loaded.dtype)
        core = cls(config, loaded, cache_spec=spec)
        if files := config.cache.shared_prompts:
            from mlx_cb.engine.marked_prompts import read_marked_prompts

            marked = read_marked_prompts(files, loaded.path)
            core.shared_prompts = SharedPrompts(marked, config.cache.block_size)
        if core.runner.backend.name != "reference":
            core.warm_up()
        return core

    def warm_up(self) -> None:
        """Run two short requests through every kind of step, and leave no trace of them.

        Each kernel variant proves itself against the reference at its first use; here that
        happens before anybody waits for an answer.
        """
        most = 3 if self.loaded.pooling is None else 0
        params = SamplingParams(temperature=0.7, max_tokens=most, ignore_eos=True)
        prompt = [0] * (2 * self.config.cache.block_size + 3)
        for request_id in ("warm-up decode", "warm-up prefill"):
            self.add(request_id, prompt[: self.max_request_tokens - 1], params)
            self.step()
        while self.has_work:
            self.step()
        self.counters = Counters()
        self.scheduler.forget_past()
        self.governor.forget_past()

    @property
    def has_work(self) -> bool:
        """True while a step can make progress, or has outputs to hand out."""
        waiting = self._in_flight is not None or bool(self._pending_outputs)
        return self.scheduler.has_work or waiting

    @property
    def is_held(self) -> bool:
        """True while there is work, but an operator has paused all of it."""
        is_empty = self._in_flight is None and not self._pending_outputs
        return is_empty and self.scheduler.is_held

    def idle(self) -> bool:
        """Do a little of what can wait; True while there is more. For when `has_work` is False."""
        return self.ssd.write_behind(self.scheduler.kv_cache.pool.find)

    def close(self, patience: float = 1.0) -> None:
        """Write what is only in memory to the SSD tier, for at most `patience` seconds."""
        self.ssd.close(patience, self.scheduler.kv_cache.pool.find)

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        user: str = "local",
        standing: Standing = EQUAL,
        timeout_s: float | None = None,
    ) -> Request:
        """Accept a request; it joins at the next step, and ends `timeout_s` from now at the latest.

        Raises InvalidRequest or ContextLengthExceeded for what can never be served.
        """
        room, kv_dtype = self.max_request_tokens - len(prompt_ids), self.config.cache.kv_dtype
        if self.loaded.pooling is not None and params.max_tokens != 0:
            raise InvalidRequest("an embedding model generates no text", param="model")
        check_request(prompt_ids, params, self.vocab_size, self.max_request_tokens)
        params = params.with_defaults(self.loaded.generation_defaults)
        now = self._clock()
        request = Request(
            request_id=request_id,
            token_ids=list(prompt_ids),
            params=params,
            max_output_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            eos_token_ids=self.loaded.eos_token_ids,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            user=user,
            standing=standing,
            arrival_time=now,
            cache_salt=prefix_salt(user, standing.cache_group, kv_dtype),
            shared_salt=shared_salt(kv_dtype),
            num_shared_blocks=self.shared_prompts.num_blocks(prompt_ids),
            deadline=None if timeout_s is None else now + timeout_s,
        )
        self.runner.prepare(request)
        self.scheduler.add(request)
        self.counters.prompt_tokens += len(prompt_ids)
        return request

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free for the next step."""
        output = self.scheduler.abort(request_id)
        if output is not None:
            self._pending_outputs.append(output)

    def order(self, order: Order) -> None:
        """Carry out an operator's order."""
        for request_id in self.governor.order(order):
            self.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Advance every running request by one token; returns what is new."""
        outputs, self._pending_outputs = self._pending_outputs, []
        outputs += self.scheduler.expire()
        self.last_measured = None
        outputs += self._step_ahead() if self._pipelined else self._step_plainly()
        for output in outputs:
            if output.finish_reason is not None:
                self.runner.forget(output.request_id)
        return outputs

    def _step_plainly(self) -> list[RequestOutput]:
        """Form a step, run it, take in what it chose: the reference, and the way on a CPU."""
        launched = self._launch(None)
        return self._collect(launched) if launched is not None else []

    def _step_ahead(self) -> list[RequestOutput]:
        """Launch the next step before the last one's tokens are read.

        Unless a row needs them on the host first: then the last one is collected before.
        """
        outputs = []
        previous, self._in_flight = self._in_flight, None
        if previous is not None and previous.sample_late:
            outputs += self._collect(previous)
            previous = None
        self._in_flight = self._launch(previous)
        if previous is not None:
            outputs += self._collect(previous)
        return outputs

    def _launch(self, previous: LaunchedStep | None) -> LaunchedStep | None:
        self.ssd.take_events()
        plan = self.scheduler.schedule()
        try:
            self.ssd.carry_out(plan)
            if plan.is_empty:
                if previous is None:
                    self.ssd.wait()
                return None
            return self.runner.launch(plan, previous)
        except Exception as error:
            self._pending_outputs += self._fail(error, plan)
            return None

    def _collect(self, step: LaunchedStep) -> list[RequestOutput]:
        try:
            sampled, seconds = self.runner.collect(step)
        except Exception as error:
            return self._fail(error, step.plan)
        self.last_step_time = self._clock()
        self.last_measured = step.plan.record
        self.counters.steps += 1
        self.counters.generated_tokens += len(sampled)
        outputs = self.scheduler.update(step.plan, sampled, seconds)
        self.governor.saw(step.plan)
        return outputs

    def _fail(self, error: Exception, plan: Any) -> list[RequestOutput]:
        """A step went wrong: its requests end with an error; the others start over from scratch.

        The arrays behind the blocks may be broken, so nothing that was in them is kept.
        """
        self.counters.failed_steps += 1
        self.governor.failed()
        outputs = self.scheduler.fail(plan, f"step {plan.record.step} failed: {error}")
        if self._in_flight is not None and self._in_flight.plan is not plan:
            outputs += self.scheduler.fail(self._in_flight.plan, "the step before it failed")
        self._in_flight = None
        self.scheduler.restart_running(f"step {plan.record.step} failed")
        self.runner.reset()
        return outputs

    def trim_memory(self) -> None:
        """Give back most blocks that the storage has in advance; only while nothing runs."""
        self.runner.trim(len(self.scheduler.kv_cache.pool.blocks))

    def release_memory(self) -> None:
        """Give back every block that no request holds, with the prefixes that were in them."""
        self.scheduler.kv_cache.forget_all()
        self.scheduler.kv_cache.pool.shrink(0)
        self.runner.reset()
        self.trim_memory()

    @property
    def vocab_size(self) -> int:
        """Number of token ids the model knows."""
        return int(self.loaded.config["vocab_size"])

    def info(self) -> ModelInfo:
        """What is loaded."""
        loaded = self.loaded
        return ModelInfo(
            name=self.config.model.model,
            path=str(loaded.path),
            architecture=loaded.architecture,
            max_model_len=self.max_request_tokens,
            vocab_size=self.vocab_size,
            eos_token_ids=tuple(sorted(loaded.eos_token_ids)),
            num_layers=len(self.cache_spec.layers),
            num_parameters=loaded.num_parameters,
            dtype=str(loaded.dtype).removeprefix("mlx.core."),
            quantization=loaded.quantization,
            weights_bytes=loaded.weights_bytes,
            kv_bytes_per_token=self.cache_spec.bytes_per_token,
            block_size=self.config.cache.block_size,
            attention=self.runner.backend.name,
            layout=self.cache_spec.layout.value,
            blas=blas.active(),
            created=int((loaded.path / "config.json").stat().st_mtime),
            pooling=loaded.pooling,
            hidden_size=int(loaded.config.get("hidden_size") or 0),
        )

    def overview(self, after: int) -> dict[str, Any]:
        """Steps newer than number `after` and the unfinished requests, in little."""
        return overview(self.scheduler, self._clock(), after)

    def status(self) -> dict[str, Any]:
        """Engine, blocks, queue and users, JSON-ready. Times in seconds, memory in bytes."""
        scheduler = self.scheduler
        pool, storage = scheduler.kv_cache.pool, self.runner.storage
        base, per_row, per_context = (
            scheduler.cost_model.base,
            scheduler.cost_model.per_row,
            scheduler.cost_model.per_context,
        )
        return {
            "model_info": asdict(self.info()),
            "requests": {
                "waiting": len(scheduler.waiting),
                "prefilling": len(scheduler.prefilling),
                "decoding": len(scheduler.decoding),
                "preemptions": scheduler.num_preemptions,
            },
            "blocks": {
                "size": scheduler.kv_cache.block_size,
                "capacity": pool.capacity,
                "used": pool.num_used,
                "cached": pool.num_cached,
                "available": pool.num_available,
                "in_memory": storage.num_blocks,
                "evictions": pool.num_evictions,
            },
            "memory": {
                "weights": self.loaded.weights_bytes,
                "kv_used": pool.num_used * storage.bytes_per_block,
                "checkpoints": scheduler.kv_cache.num_checkpoints * self.cache_spec.state_bytes,
                "max_buffers": self.machine.max_buffers,
                **self.runner.memory_status(self.cache_spec),
            },
            "ladder": {
                "evicted_blocks": pool.num_evictions,
                "restored_tokens": scheduler.restoring.num_tokens,
                **asdict(scheduler.ladder),
            },
            "ssd": self.ssd.status(),
            "shared_prompts": self.shared_prompts.lengths,
            "prefix_cache": scheduler.kv_cache.stats.as_dict(),
            "steps": {
                "count": self.counters.steps,
                "failed": self.counters.failed_steps,
                "age": self._clock() - self.last_step_time,
                "predicted": {"base": base, "per_row": per_row, "per_context": per_context},
            },
            "tokens": {
                "prompt": self.counters.prompt_tokens,
                "generated": self.counters.generated_tokens,
            },
            "policy": self.config.scheduler.policy,
            "users": count_users(scheduler),
            "machine_seconds": dict(scheduler.service),
            "control": self.governor.as_dict(),
        }
